"""DeviceMesh over MPI: where every rank stands, whom its groups reach, slices, flattened and unflattened meshes."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.stack.meshes import grids
from tests.support import agree

SECTION = "Meshes and DTensor"
NAMES = ("pp", "dp", "tp")

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # all_gather_tensor, which 2.11 knows


def along(mesh: torch.Tensor, rank: int, dim: int) -> list[int]:
    """The ranks that differ from ``rank`` in dimension ``dim`` of the mesh only."""
    place = [int(i) for i in (mesh == rank).nonzero()[0]]
    return mesh.movedim(dim, 0).reshape(mesh.shape[dim], -1)[:, _column(mesh, place, dim)].tolist()


def _column(mesh: torch.Tensor, place: list[int], dim: int) -> int:
    column = 0
    for other in range(mesh.ndim):
        if other != dim:
            column = column * mesh.shape[other] + place[other]
    return column


def reaches(group: dist.ProcessGroup, rank: int) -> list[int]:
    """Who takes part in a collective of ``group``, by a collective: their ranks in the group's order."""
    answers = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(answers, torch.tensor([rank]), group=group)
    return [int(answer) for answer in answers]


@pytest.mark.feature("init_device_mesh 1D, 2D, 3D: coordinates, groups")
@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_every_dimension_has_its_group(ndim: int, rank: int, size: int) -> None:
    """Row-major ranks; each dimension's group is of MPI and reaches the ranks along that dimension, and those alone."""
    wrong = []
    for shape in grids(size, ndim):
        ranks = torch.arange(size).reshape(shape)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=NAMES[:ndim])
        place = tuple(int(i) for i in (ranks == rank).nonzero()[0])
        said = (tuple(mesh.shape), mesh.ndim, mesh.size(), tuple(mesh.get_coordinate() or ()), mesh.mesh.tolist())
        if said != (shape, ndim, size, place, ranks.tolist()):
            wrong.append((shape, said))
        for dim in range(ndim):
            group, name = mesh.get_group(dim), NAMES[dim]
            found = (reaches(group, rank), dist.get_rank(group), mesh.get_local_rank(name), mesh.size(dim))
            expected = (along(ranks, rank, dim), place[dim], place[dim], shape[dim])
            if found != expected or dist.get_backend(group) != "mpi" or mesh.get_group(name) is not group:
                wrong.append((shape, dim, found, expected))
        if mesh.get_all_groups() != [mesh.get_group(dim) for dim in range(ndim)]:
            wrong.append((shape, "get_all_groups"))
    agree(not wrong, wrong)


@pytest.mark.feature("init_device_mesh 1D, 2D, 3D: coordinates, groups")
@pytest.mark.ranks(8)
def test_a_cube_of_eight(rank: int, size: int) -> None:
    """Sums along each edge of a 2x2x2 mesh."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=NAMES)
    sums = []
    for name in NAMES:
        value = torch.tensor([float(rank)])
        dist.all_reduce(value, group=mesh.get_group(name))
        sums.append(int(value))
    agree(sums == [2 * (rank & 3) + 4, 2 * (rank & 5) + 2, 2 * (rank & 6) + 1], sums)


@pytest.mark.feature("a mesh as the group of a functional collective")
def test_functional_collectives_take_a_mesh(rank: int, size: int) -> None:
    """(mesh, dim) and a 1D slice name the same group."""
    wrong = []
    for shape in grids(size, 2):
        ranks = torch.arange(size).reshape(shape)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        for dim, name in enumerate(("dp", "tp")):
            expected = along(ranks, rank, dim)
            mine = torch.tensor([rank, 10 * rank])
            for group in ((mesh, dim), mesh[name], mesh.get_group(name)):
                total = funcol.all_reduce(mine, "sum", group)
                rows = funcol.all_gather_tensor(mine, 0, group).view(-1, 2)
                if total.tolist() != [sum(expected), 10 * sum(expected)] or rows[:, 0].tolist() != expected:
                    wrong.append((shape, name, total, rows))
    agree(not wrong, wrong)


@pytest.mark.feature("mesh slices, nested, with their names")
@pytest.mark.parametrize("ndim", [2, 3])
def test_slices_share_the_groups_of_the_mesh(ndim: int, rank: int, size: int) -> None:
    """mesh["tp"] is 1D with the mesh's own group; a pair of names is 2D and can be sliced again; no group is made anew."""
    names = NAMES[-ndim:]
    wrong = []
    for shape in grids(size, ndim):
        ranks = torch.arange(size).reshape(shape)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        groups_before = dist.distributed_c10d._world.group_count
        for dim, name in enumerate(names):
            line = mesh[name]
            right = (
                line.mesh_dim_names == (name,)
                and line.ndim == 1
                and line.mesh.tolist() == along(ranks, rank, dim)
                and line.get_group() is mesh.get_group(name)
                and line.get_local_rank()
                == mesh.get_local_rank(dim)
                == line.get_rank() // math.prod(shape[dim + 1 :]) % shape[dim]
            )
            wrong += [] if right else [(shape, name, line)]
        pair = mesh[names[:2]] if ndim == 2 else mesh["pp", "tp"]
        if pair[pair.mesh_dim_names[1]].get_group() is not mesh.get_group(pair.mesh_dim_names[1]) or pair.ndim != 2:
            wrong.append((shape, pair))
        if dist.distributed_c10d._world.group_count != groups_before:
            wrong.append((shape, "slicing made groups"))
    agree(not wrong, wrong)


@pytest.mark.feature("mesh slices, nested, with their names")
def test_a_slice_that_is_not_there(size: int) -> None:
    """An unknown name is a KeyError on every rank, before any communication."""
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "tp"))
    with pytest.raises(KeyError, match="ep"):
        mesh["ep"]
    agree(mesh["dp", "tp"] is mesh, mesh)


@pytest.mark.feature("flattened, unflattened and concatenated meshes")
@pytest.mark.parametrize("ndim", [2, 3])
def test_flattened_dimensions_talk_as_one(ndim: int, rank: int, size: int) -> None:
    """mesh["dp", "tp"]._flatten(): a 1D group over both, with ranks in row-major order."""
    wrong = []
    for shape in grids(size, ndim):
        ranks = torch.arange(size).reshape(shape)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=NAMES[-ndim:])
        flat = mesh["dp", "tp"]._flatten("dp_tp")
        plane = ranks if ndim == 2 else ranks[(ranks == rank).nonzero()[0, 0]]
        found = (flat.mesh.tolist(), reaches(flat.get_group(), rank), flat.get_local_rank(), flat.mesh_dim_names)
        expected = plane.flatten().tolist()
        if found != (expected, expected, expected.index(rank), ("dp_tp",)):
            wrong.append((shape, found, expected))
        if mesh["dp", "tp"]._flatten("dp_tp").get_group() is not flat.get_group():
            wrong.append((shape, "flattened twice, two groups"))
    agree(not wrong, wrong)


@pytest.mark.feature("flattened, unflattened and concatenated meshes")
def test_unflattened_dimensions_have_groups(rank: int, size: int) -> None:
    """A 1D world is cut into dp x tp afterwards."""
    wrong = []
    for shape in grids(size, 2):
        ranks = torch.arange(size).reshape(shape)
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("world",))._unflatten(0, shape, ("dp", "tp"))
        found = [reaches(mesh.get_group(name), rank) for name in ("dp", "tp")]
        if mesh.mesh.tolist() != ranks.tolist() or found != [along(ranks, rank, 0), along(ranks, rank, 1)]:
            wrong.append((shape, mesh, found))
    agree(not wrong, wrong)


@pytest.mark.feature("flattened, unflattened and concatenated meshes")
@pytest.mark.skipif(not hasattr(DeviceMesh, "_concatenate"), reason="needs DeviceMesh._concatenate")
def test_concatenated_slices(rank: int, size: int) -> None:
    """Two 1D slices put together are the 2D slice."""
    mesh = init_device_mesh("cpu", (1, size, 1), mesh_dim_names=NAMES)
    both = DeviceMesh._concatenate([mesh["dp"], mesh["tp"]])
    agree(both.mesh_dim_names == ("dp", "tp") and reaches(both.get_group("dp"), rank) == list(range(size)), both)


@pytest.mark.feature("meshes of ranks in any order, of some of the ranks")
def test_transposed_ranks(rank: int, size: int) -> None:
    """A mesh given as a tensor that is not row-major: the columns are the lines of the transpose."""
    wrong = []
    for shape in grids(size, 2):
        ranks = torch.arange(size).reshape(shape).t()
        mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("a", "b"))
        found = [reaches(mesh.get_group(dim), rank) for dim in (0, 1)]
        if found != [along(ranks, rank, 0), along(ranks, rank, 1)] or mesh.mesh.tolist() != ranks.tolist():
            wrong.append((shape, found))
    agree(not wrong, wrong)


@pytest.mark.feature("meshes of ranks in any order, of some of the ranks")
def test_shuffled_ranks_stand_as_on_gloo(rank: int, size: int) -> None:
    """Ranks in no order at all: torch sorts the ranks of each group and keeps the coordinates; both as with Gloo."""
    shuffled = torch.randperm(size, generator=torch.Generator().manual_seed(3))
    wrong = []
    for shape in grids(size, 2):
        said = []
        for override in (None, {0: "gloo", 1: "gloo"}):
            ranks = shuffled.reshape(shape)
            if override is None:
                mesh = DeviceMesh("cpu", ranks)
            else:
                mesh = DeviceMesh("cpu", ranks, backend_override=(("gloo", None), ("gloo", None)))
            groups = [(mesh.get_local_rank(dim), reaches(mesh.get_group(dim), rank)) for dim in (0, 1)]
            said.append((groups, tuple(mesh.get_coordinate() or ())))
        place = tuple(int(i) for i in (ranks == rank).nonzero()[0])
        if said[0] != said[1] or said[0][1] != place:
            wrong.append((shape, said))
    agree(not wrong, wrong)


@pytest.mark.feature("meshes of ranks in any order, of some of the ranks")
@pytest.mark.min_ranks(2)
def test_a_mesh_of_some_ranks(rank: int, size: int) -> None:
    """The last rank stays outside: no coordinate, no group, and nobody waits for it."""
    mesh = DeviceMesh("cpu", torch.arange(size - 1), mesh_dim_names=("some",))
    if rank < size - 1:
        right = mesh.get_coordinate() is not None and reaches(mesh.get_group(), rank) == list(range(size - 1))
    else:
        right = mesh.get_coordinate() is None
    agree(right, mesh.get_coordinate())


@pytest.mark.feature("DeviceMesh.from_group")
def test_from_one_group(rank: int, size: int) -> None:
    """The world, and a group of the program's own."""
    world = DeviceMesh.from_group(dist.group.WORLD, "cpu", mesh_dim_names=("world",))
    halves = [dist.new_group(list(range(half, size, 2))) for half in range(min(2, size))]
    mine = DeviceMesh.from_group(halves[rank % 2], "cpu")
    found = (world.get_group() is dist.group.WORLD, mine.mesh.tolist(), reaches(mine.get_group(), rank), mine.get_local_rank())
    same_half = list(range(rank % 2, size, 2))
    agree(found == (True, same_half, same_half, rank // 2), found)


@pytest.mark.feature("DeviceMesh.from_group")
def test_from_a_group_per_dimension(rank: int, size: int) -> None:
    """The groups of one mesh make another mesh, equal to it."""
    wrong = []
    for shape in grids(size, 2):
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        again = DeviceMesh.from_group(mesh.get_all_groups(), "cpu", mesh=mesh.mesh, mesh_dim_names=("dp", "tp"))
        value = torch.tensor([1.0])
        dist.all_reduce(value, group=again["tp"].get_group())
        if again != mesh or hash(again) != hash(mesh) or again.get_all_groups() != mesh.get_all_groups() or value != shape[1]:
            wrong.append((shape, again, value))
    agree(not wrong, wrong)


@pytest.mark.feature("a dimension of a mesh on another backend")
def test_one_dimension_on_gloo(rank: int, size: int) -> None:
    """backend_override: dp on Gloo beside tp on MPI."""
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("dp", "tp"), backend_override={"dp": "gloo"})
    total = funcol.all_reduce(torch.tensor([rank]), "sum", mesh["dp"])
    names = [dist.get_backend(group) for group in mesh.get_all_groups()]
    agree(names == ["gloo", "mpi"] and int(total) == size * (size - 1) // 2, (names, total))


@pytest.mark.feature("DeviceMesh pickled, compared, printed")
def test_a_pickled_mesh_finds_its_groups(rank: int, size: int) -> None:
    """What a checkpoint or a copied model does with a mesh."""
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "tp"))
    again = pickle.loads(pickle.dumps(mesh))
    agree(again == mesh and again.get_group("tp") is mesh.get_group("tp") and "tp" in repr(again), again)

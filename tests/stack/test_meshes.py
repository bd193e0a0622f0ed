"""DeviceMesh over MPI: where every rank stands, whom its groups reach; slices, flattened and unflattened meshes; split_group."""

import pickle
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mpicoll._engine.registry import registry
from tests.stack.exercise import total
from tests.stack.meshes import grids, place
from tests.stack.sharded import TORCH
from tests.support import agree

NAMES = ("pp", "dp", "tp")
on_cpu = pytest.mark.skipif(TORCH < (2, 15), reason="needs torch >= 2.15")


def spot(ranks: torch.Tensor, rank: int) -> tuple[int, ...]:
    return tuple(int(i) for i in (ranks == rank).nonzero()[0])


def along(ranks: torch.Tensor, rank: int, dim: int) -> list[int]:
    """The ranks that differ from ``rank`` in dimension ``dim`` of the mesh only."""
    return ranks[tuple(slice(None) if d == dim else i for d, i in enumerate(spot(ranks, rank)))].tolist()


def reaches(group: Any, rank: int) -> list[int]:
    """Who takes part in a collective of ``group``, by a collective: their ranks in the group's order."""
    answers = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(answers, torch.tensor([rank]), group=group)
    return [int(answer) for answer in answers]


def meshes(size: int, ndim: int) -> Iterator[tuple[DeviceMesh, torch.Tensor]]:
    """A mesh of each shape, with the last of ``NAMES``, and its ranks, row-major."""
    for shape in grids(size, ndim):
        yield init_device_mesh("cpu", shape, mesh_dim_names=NAMES[-ndim:]), torch.arange(size).reshape(shape)


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_every_dimension_has_its_group(ndim: int, rank: int, size: int) -> None:
    """Each dimension's group is of MPI and reaches the ranks along that dimension, and those alone."""
    wrong: list[Any] = []
    for mesh, ranks in meshes(size, ndim):
        said = (tuple(mesh.shape), mesh.ndim, mesh.size(), place(mesh), mesh.mesh.tolist())
        wrong += [] if said == (ranks.shape, ndim, size, spot(ranks, rank), ranks.tolist()) else [(ranks.shape, said)]
        for dim, name in enumerate(NAMES[-ndim:]):
            group, here = mesh.get_group(dim), spot(ranks, rank)[dim]
            found = (reaches(group, rank), dist.get_rank(group), mesh.get_local_rank(name), mesh.size(dim))
            right = found == (along(ranks, rank, dim), here, here, ranks.shape[dim])
            if not right or dist.get_backend(group) != "mpi" or mesh.get_group(name) is not group:
                wrong.append((ranks.shape, dim, found))
        wrong += [] if mesh.get_all_groups() == [mesh.get_group(dim) for dim in range(ndim)] else [(ranks.shape, "all groups")]
    agree(not wrong, wrong)


@pytest.mark.parametrize("ndim", [2, 3])
def test_slices_share_the_groups_and_flattened_dimensions_talk_as_one(ndim: int, rank: int, size: int) -> None:
    """mesh["tp"] is 1D with the mesh's own group. A pair of names is 2D; flattened, it is one 1D group, made once."""
    wrong: list[Any] = []
    for mesh, ranks in meshes(size, ndim):
        before = dist.distributed_c10d._world.group_count
        for dim, name in enumerate(NAMES[-ndim:]):
            line = mesh[name]
            found = (line.mesh_dim_names, line.mesh.tolist(), line.get_local_rank(), line.get_group() is mesh.get_group(name))
            expected = ((name,), along(ranks, rank, dim), mesh.get_local_rank(dim), True)
            wrong += [] if found == expected else [(ranks.shape, found)]
        pair = mesh["dp", "tp"]
        right = pair.ndim == 2 and pair["tp"].get_group() is mesh.get_group("tp")
        wrong += [] if right and dist.distributed_c10d._world.group_count == before else [(ranks.shape, pair)]
        flat, again = (pair._flatten("dp_tp") for _ in range(2))
        both = (ranks if ndim == 2 else ranks[spot(ranks, rank)[0]]).flatten().tolist()
        told = (flat.mesh.tolist(), reaches(flat.get_group(), rank), flat.get_local_rank(), again.get_group() is flat.get_group())
        wrong += [] if told == (both, both, both.index(rank), True) else [(ranks.shape, told, both)]
    agree(not wrong, wrong)


def test_unflattened_and_concatenated_dimensions_have_groups(rank: int, size: int) -> None:
    """A 1D world is cut into dp x tp afterwards; two 1D slices put together are the 2D slice."""
    wrong: list[Any] = []
    for shape in grids(size, 2):
        ranks = torch.arange(size).reshape(shape)
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("world",))._unflatten(0, shape, ("dp", "tp"))
        found = [reaches(mesh.get_group(name), rank) for name in ("dp", "tp")]
        right = mesh.mesh.tolist() == ranks.tolist() and found == [along(ranks, rank, 0), along(ranks, rank, 1)]
        wrong += [] if right else [(shape, mesh, found)]
    if hasattr(DeviceMesh, "_concatenate"):
        mesh = init_device_mesh("cpu", (1, size, 1), mesh_dim_names=NAMES)
        both = DeviceMesh._concatenate([mesh["dp"], mesh["tp"]])
        right = both.mesh_dim_names == ("dp", "tp") and reaches(both.get_group("dp"), rank) == list(range(size))
        wrong += [] if right else [both]
    agree(not wrong, wrong)


def test_ranks_in_any_order_stand_as_on_gloo(rank: int, size: int) -> None:
    """Transposed, and in no order at all: torch sorts the ranks of each group and keeps the coordinates; both as with Gloo."""
    wrong: list[Any] = []
    shuffled = torch.randperm(size, generator=torch.Generator().manual_seed(3))
    for ranks in [ranks for _, line in meshes(size, 2) for ranks in (line.t(), shuffled.reshape(line.shape))]:
        said = []
        for options in ({}, {"backend_override": (("gloo", None), ("gloo", None))}):
            mesh = DeviceMesh("cpu", ranks, **options)
            groups = [(mesh.get_local_rank(dim), reaches(mesh.get_group(dim), rank)) for dim in (0, 1)]
            said.append((groups, place(mesh), mesh.mesh.tolist()))
        lines = [sorted(along(ranks, rank, dim)) for dim in (0, 1)]
        right = said[0] == said[1] and said[0][1:] == (spot(ranks, rank), ranks.tolist())
        wrong += [] if right and [members for _, members in said[0][0]] == lines else [(ranks, said)]
    agree(not wrong, wrong)


def test_from_one_group(rank: int, size: int) -> None:
    """A group of the program's own."""
    halves = [dist.new_group(list(range(half, size, 2))) for half in range(min(2, size))]
    mine = DeviceMesh.from_group(halves[rank % 2], "cpu")
    same_half = list(range(rank % 2, size, 2))
    found = (mine.mesh.tolist(), reaches(mine.get_group(), rank), mine.get_local_rank())
    agree(found == (same_half, same_half, rank // 2), found)


def test_a_pickled_mesh_finds_its_groups(size: int) -> None:
    """What a checkpoint or a copied model does with a mesh."""
    mesh = init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "tp"))
    again = pickle.loads(pickle.dumps(mesh))
    agree(again == mesh and again.get_group("tp") is mesh.get_group("tp") and "tp" in repr(again), again)


# -- split_group: groups made by members of the parent alone (torch >= 2.15 does it on the CPU) ------------------------


@on_cpu
def test_parts_of_the_world(rank: int, size: int) -> None:
    """Each part in the order that was given; its ranks, timeout, description and name are those that torch means."""
    parts = [list(range(size))[start::2][::-1] for start in range(min(2, size))]
    mine = parts[rank % 2]
    for turn in range(2):  # the same ranks again: another group
        group = dist.split_group(split_ranks=parts, timeout=timedelta(seconds=77), group_desc="part")
        communicator = registry.find(group.group_name)
        told = (dist.get_process_group_ranks(group), dist.get_rank(group), dist.get_backend(group), group.group_desc)
        added, seconds = total(group, rank + 1.0), communicator.timeout_s if communicator else None
        dist.destroy_process_group(group)
        agree(told == (mine, mine.index(rank), dist.get_backend(), "part"), (turn, told))
        agree(added == sum(r + 1 for r in mine) and seconds == 77 and registry.find(group.group_name) is None, (added, seconds))


@on_cpu
@pytest.mark.min_ranks(2)
def test_those_left_over_and_a_part_of_a_part(rank: int, size: int) -> None:
    """A rank in no part gets torch's sentinel and waits for nobody. To split a part, its own ranks are given."""
    outside = dist.GroupMember.NON_GROUP_MEMBER
    upper = dist.split_group(split_ranks=[list(range(1, size))])
    right = (upper is outside) == (rank == 0)
    if rank:
        last = dist.split_group(upper, [[size - 2]])  # the world's last rank
        right = right and total(upper) == size - 1 and (last is outside) == (rank < size - 1)
        right = right and (rank < size - 1 or total(last, float(size)) == size)
        for group in (last, upper) if rank == size - 1 else (upper,):
            dist.destroy_process_group(group)
    agree(right, upper)


@on_cpu
@pytest.mark.parametrize("kind", ["bound to a device", "DETAIL", "cpu:mpi,cuda:gloo", "cpu:gloo,cuda:mpi"])
def test_worlds_of_all_kinds(kind: str, no_world: None, rank: int, size: int) -> None:
    """torch hides our half of the group in a wrapper, or another backend splits as well; on who is left over, too.

    With device_id new_group splits, too, and those who are not members are told.
    """
    if kind == "DETAIL":
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    device = torch.device("cpu:0") if kind == "bound to a device" else None
    dist.init_process_group(kind if ":" in kind else "mpi", device_id=device)
    made, split = dist.new_group([0]), dist.split_group(split_ranks=[[size - 1]])
    everyone = total(None, rank + 1.0)
    agree(everyone == size * (size + 1) / 2 and (rank != 0 or total(made) == 1), everyone)
    agree((split is dist.GroupMember.NON_GROUP_MEMBER) == (rank < size - 1), split)
    agree(rank < size - 1 or total(split, float(size)) == size)

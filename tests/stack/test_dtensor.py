"""DTensor over MPI: how tensors are dealt out and come together again, with gradients; modules, factories, random numbers."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as dtensor
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)

from tests.stack.meshes import drawn, grids, numbers, share_of, whole
from tests.stack.record import refused_alike
from tests.support import agree, everyone

SECTION = "Meshes and DTensor"
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64]
PLACEMENTS = [Shard(0), Shard(1), Replicate()]

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*not have complete support on cpu:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),
]


def tuples(ndim: int) -> list[tuple[Placement, ...]]:
    return list(itertools.product(PLACEMENTS, repeat=ndim))


@pytest.mark.feature("distribute_tensor: Shard, Replicate, even and uneven")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_rank_gets_its_share(dtype: torch.dtype, rank: int, size: int) -> None:
    """Chunks as torch.chunk makes them, the last ones smaller or empty; back to the full tensor. Rank 0's data count."""
    wrong = []
    for grid in grids(size, 1) + grids(size, 2):
        mesh = init_device_mesh("cpu", grid)
        place = tuple(mesh.get_coordinate() or ())
        shapes = [(2 * size, size), (size + 1, 3), (1, 5), (0, 4), (7, 2 * size - 1)]
        for shape, placements in itertools.product(shapes, tuples(len(grid))):
            full = numbers(*shape, dtype=dtype)
            given = full if rank == 0 else torch.zeros_like(full)  # scatter and broadcast come from the group's first rank
            tensor = distribute_tensor(given, mesh, placements)
            expected, back = share_of(full, grid, place, placements), tensor.full_tensor()
            if not (torch.equal(tensor.to_local(), expected) and torch.equal(back, full) and back.dtype == dtype):
                wrong.append((grid, placements, shape, tensor.to_local(), expected, back))
    agree(not wrong, wrong[:2])


@pytest.mark.feature("distribute_tensor: Shard, Replicate, even and uneven")
def test_without_communication(rank: int, size: int) -> None:
    """src_data_rank=None: each rank cuts its own copy; negative dimensions count from the end."""
    mesh = init_device_mesh("cpu", (size,))
    mine = numbers(3, size + 2) + rank
    tensor = distribute_tensor(mine, mesh, [Shard(-1)], src_data_rank=None)
    expected = share_of(mine, (size,), (rank,), [Shard(1)])
    agree(torch.equal(tensor.to_local(), expected) and tensor.placements == (Shard(1),), tensor)


@pytest.mark.feature("distribute_tensor: Shard, Replicate, even and uneven")
def test_strided_input(rank: int, size: int) -> None:
    """Transposed, sliced, expanded and channels-last tensors are dealt out by what they mean, not by how they lie."""
    mesh = init_device_mesh("cpu", (size,))
    base = numbers(2 * size, 6)
    images = numbers(2, size, 3, 2).contiguous(memory_format=torch.channels_last)
    wrong = []
    for full in (base.t(), base[:, ::2], base[0].expand(size, 6), images):
        for placement in PLACEMENTS:
            tensor = distribute_tensor(full, mesh, [placement])
            expected = share_of(full, (size,), (rank,), [placement])
            if not (torch.equal(tensor.to_local(), expected) and torch.equal(tensor.full_tensor(), full)):
                wrong.append((full.stride(), placement))
    agree(not wrong, wrong)


@pytest.mark.feature("distribute_tensor: Partial")
@pytest.mark.parametrize("op", ["sum", "avg", "max", "min"])
def test_partial_comes_together(op: str, rank: int, size: int) -> None:
    """What was cut into partial values reduces to itself."""
    wrong = []
    for grid in grids(size, 2):
        mesh = init_device_mesh("cpu", grid)
        full = drawn(3, 5)
        for placements in [
            (Partial(op), Partial(op)),
            (Partial(op), Replicate()),
            (Partial(op), Shard(1)),
            (Shard(0), Partial(op)),
        ]:
            back = distribute_tensor(full, mesh, placements).full_tensor()
            if not torch.allclose(back, full, rtol=0, atol=1e-12):
                wrong.append((grid, placements, back))
    agree(not wrong, wrong)


@pytest.mark.feature("a mesh of some ranks: the others hold nothing")
@pytest.mark.min_ranks(2)
def test_on_some_of_the_ranks(rank: int, size: int) -> None:
    """The last rank is not in the mesh: its share is empty, it waits for nobody."""
    mesh = DeviceMesh("cpu", torch.arange(size - 1))
    full = numbers(5, 3)
    tensor = distribute_tensor(full, mesh, [Shard(0)])
    if rank < size - 1:
        doubled = (tensor + tensor).full_tensor()
        right = torch.equal(tensor.to_local(), share_of(full, (size - 1,), (rank,), [Shard(0)])) and torch.equal(
            doubled, 2 * full
        )
    else:
        right = tensor.to_local().numel() == 0 and (tensor + tensor).to_local().numel() == 0
    agree(right, tensor.to_local())


@pytest.mark.feature("from_local, to_local, full_tensor, with gradients")
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate(), Partial()], ids=str)
def test_gradients_through_a_dtensor(placement: Placement, rank: int, size: int) -> None:
    """from_local -> an operation -> full_tensor: each rank's gradient is its part of what one process gets."""
    mesh = init_device_mesh("cpu", (size,))
    parts = [drawn(4, 3, seed=r) for r in range(size)]
    if placement.is_replicate():
        parts = [parts[0]] * size
    mine = parts[rank].clone().requires_grad_()
    weight = drawn(*_whole_of(parts, placement).shape, seed=99)
    (DTensor.from_local(mine, mesh, [placement], run_check=False) ** 2 if not placement.is_partial() else
     DTensor.from_local(mine, mesh, [placement], run_check=False) * 2).full_tensor().mul(weight).sum().backward()  # fmt: skip

    leaves = [part.clone().requires_grad_() for part in ([parts[0]] if placement.is_replicate() else parts)]
    full = _whole_of(leaves, placement)
    (full * 2 if placement.is_partial() else full**2).mul(weight).sum().backward()
    expected = leaves[0 if placement.is_replicate() else rank].grad
    agree(torch.allclose(mine.grad, expected, rtol=0, atol=1e-12), (mine.grad, expected))


def _whole_of(parts: list[Tensor], placement: Placement) -> Tensor:
    if placement.is_shard():
        return torch.cat(parts, placement.dim)
    return sum(parts[1:], parts[0]) if placement.is_partial() else parts[0]


@pytest.mark.feature("from_local, to_local, full_tensor, with gradients")
def test_uneven_shares_and_gradient_placements(rank: int, size: int) -> None:
    """from_local with shape and stride given; to_local(grad_placements=Partial) sums the ranks' gradients."""
    mesh = init_device_mesh("cpu", (size,))
    full = drawn(2 * size + 1, 3)
    mine = share_of(full, (size,), (rank,), [Shard(0)]).clone().requires_grad_()
    tensor = DTensor.from_local(mine, mesh, [Shard(0)], shape=full.shape, stride=full.stride(), run_check=False)
    local = tensor.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    (local * (rank + 1)).sum().backward()  # every rank's own loss; together they have 1 + 2 + ... + size
    total = size * (size + 1) / 2
    agree(torch.equal(local, full) and torch.equal(mine.grad, torch.full_like(mine, total)), (local, mine.grad))


@pytest.mark.feature("from_local, to_local, full_tensor, with gradients")
@pytest.mark.min_ranks(2)
def test_run_check_broadcasts_or_refuses(rank: int, size: int) -> None:
    """run_check=True: a Replicate tensor becomes rank 0's, and shares of different dtypes are refused on all ranks."""
    mesh = init_device_mesh("cpu", (size,))
    same = DTensor.from_local(torch.full((3,), float(rank)), mesh, [Replicate()], run_check=True)
    refused = ""
    try:
        DTensor.from_local(torch.ones(2, dtype=torch.float64 if rank else torch.float32), mesh, [Shard(0)], run_check=True)
    except ValueError as error:
        refused = str(error)
    agree(torch.equal(same.to_local(), torch.zeros(3)) and "Inconsistent" in refused, (same, refused))


@pytest.mark.feature("factories: zeros, ones, full, empty")
def test_factories(rank: int, size: int) -> None:
    """dtensor.zeros(...) on each rank makes its share only."""
    wrong = []
    for grid in grids(size, 2):
        mesh = init_device_mesh("cpu", grid)
        place = tuple(mesh.get_coordinate() or ())
        for placements in tuples(2):
            made = (
                (dtensor.zeros(size + 1, 3, device_mesh=mesh, placements=placements), torch.zeros(size + 1, 3)),
                (
                    dtensor.ones(3, 5, device_mesh=mesh, placements=placements, dtype=torch.int64),
                    torch.ones(3, 5, dtype=torch.int64),
                ),
                (dtensor.full((4, 4), 2.5, device_mesh=mesh, placements=placements), torch.full((4, 4), 2.5)),
            )
            for tensor, full in made:
                if not (
                    torch.equal(tensor.to_local(), share_of(full, grid, place, placements))
                    and torch.equal(tensor.full_tensor(), full)
                ):
                    wrong.append((grid, placements, tensor))
            if (
                dtensor.empty(5, 4, device_mesh=mesh, placements=placements).to_local().shape
                != share_of(torch.empty(5, 4), grid, place, placements).shape
            ):
                wrong.append((grid, placements, "empty"))
    agree(not wrong, wrong[:3])


@pytest.mark.feature("random numbers in DTensors, as on Gloo")
def test_random_numbers_are_those_on_gloo(rank: int, size: int) -> None:
    """On the CPU torch draws with each rank's own generator; the same seeds give the same numbers on either backend."""
    said = []
    for group in (dist.group.WORLD, dist.new_group(backend="gloo")):
        mesh = DeviceMesh.from_group(group, "cpu")
        torch.manual_seed(11 + rank)
        ones = dtensor.ones(2 * size, 4, device_mesh=mesh, placements=[Shard(0)])
        zeros = dtensor.zeros(size, 3, device_mesh=mesh, placements=[Shard(0)])
        tensors = [nn.functional.dropout(ones, 0.5), zeros.clone().uniform_(2, 3), torch.rand_like(zeros), zeros.normal_()]
        said.append([tensor.full_tensor() for tensor in tensors])
    dropped, moved, uniform, _ = said[0]
    right = all(torch.equal(a, b) for a, b in zip(*said, strict=True))
    sane = bool(
        (uniform >= 0).all() and (uniform < 1).all() and (moved >= 2).all() and set(dropped.unique().tolist()) <= {0.0, 2.0}
    )
    agree(right and sane, said)


def test_random_factories(request: pytest.FixtureRequest, size: int) -> None:
    """torch asserts that it has a generator for the mesh's device, which it has for accelerators only."""

    def call(group: dist.ProcessGroup) -> DTensor:
        return dtensor.rand(4, 3, device_mesh=DeviceMesh.from_group(group, "cpu"), placements=[Shard(0)])

    said = refused_alike("DTensor: torch.distributed.tensor.rand and randn on the CPU", call, request.node)
    agree("AssertionError" in said, said)


@pytest.mark.feature("distribute_module")
def test_modules_by_a_function(rank: int, size: int) -> None:
    """partition_fn shards the parameters, input_fn and output_fn turn tensors into DTensors and back: one process's training."""
    torch.manual_seed(5)
    reference = nn.Sequential(nn.Linear(4, 2 * size), nn.Tanh(), nn.Linear(2 * size, 2 * size)).double()
    torch.manual_seed(5 + rank)  # distribute_module broadcasts rank 0's
    model = nn.Sequential(nn.Linear(4, 2 * size), nn.Tanh(), nn.Linear(2 * size, 2 * size)).double()
    mesh = init_device_mesh("cpu", (size,))

    def cut(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        if isinstance(module, nn.Linear):
            for key, parameter in dict(module.named_parameters()).items():
                module.register_parameter(key, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))

    def whole_input(module: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> DTensor:
        return DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False)

    def local_output(module: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
        return output.full_tensor()

    model = distribute_module(model, mesh, cut, whole_input, local_output)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, reference)]
    for step in range(3):
        for m, optimizer in zip((model, reference), optimizers, strict=True):
            optimizer.zero_grad()
            m(drawn(5, 4, seed=step)).square().mean().backward()
            optimizer.step()
    wrong = [
        name
        for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True)
        if not torch.allclose(whole(p), q, rtol=0, atol=1e-12) or p.placements != (Shard(0),)
    ]
    agree(not wrong, wrong)


@pytest.mark.feature("distribute_module")
def test_modules_without_a_function_are_replicated(rank: int, size: int) -> None:
    """Parameters and buffers become rank 0's on every rank."""
    torch.manual_seed(rank)
    model = nn.BatchNorm1d(3)
    with torch.no_grad():
        model.weight.uniform_()
        model.running_mean.uniform_()
    at_0 = everyone((model.weight.detach().clone(), model.running_mean.clone()))[0]
    distribute_module(model, init_device_mesh("cpu", (size,)))
    found = (model.weight.full_tensor(), model.running_mean.full_tensor())
    agree(all(torch.equal(a, b) for a, b in zip(found, at_0, strict=True)), found)


@pytest.mark.feature("optimizers and gradient clipping on DTensors")
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW], ids=lambda kind: kind.__name__)
def test_optimizers_and_clipping(kind: type[torch.optim.Optimizer], rank: int, size: int) -> None:
    """clip_grad_norm_ takes the norm over all ranks' shares; the steps are one process's."""
    mesh = init_device_mesh("cpu", (size,))
    shapes = [(size + 1, 3), (4, 2 * size), (5,)]
    plain = [nn.Parameter(drawn(*shape, seed=i)) for i, shape in enumerate(shapes)]
    sharded = [nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(i % p.ndim)])) for i, p in enumerate(plain)]
    norms = []
    for parameters in (plain, sharded):
        optimizer = kind(parameters, lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            loss = sum((whole(p) * drawn(*p.shape, seed=10 * step + i)).sum() ** 2 for i, p in enumerate(parameters))
            loss.backward()
            norms.append(float(whole(nn.utils.clip_grad_norm_(parameters, 0.5))))
            optimizer.step()
    right = all(torch.allclose(whole(s.detach()), p, rtol=0, atol=1e-12) for s, p in zip(sharded, plain, strict=True))
    agree(right and norms[:3] == pytest.approx(norms[3:], rel=1e-12), norms)

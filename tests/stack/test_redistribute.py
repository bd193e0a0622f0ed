"""DTensor.redistribute between all pairs of placements over MPI, by values, forward and backward, on 1D to 3D meshes."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from tests.stack.meshes import drawn, grids, numbers, share_of
from tests.stack.record import refused_alike
from tests.support import agree, everyone

SECTION = "Meshes and DTensor"
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
WHOLES: list[Placement] = [Shard(0), Shard(1), Replicate()]  # the placements that hold values, not parts of a sum
REDUCE = {"sum": torch.add, "avg": torch.add, "max": torch.maximum, "min": torch.minimum, "product": torch.mul}
LEGAL = {
    torch.float32: ["sum", "avg", "max", "min", "product"],
    torch.bfloat16: ["sum", "avg", "max", "min", "product"],
    torch.float16: ["sum", "avg", "max", "min"],
    torch.float64: ["sum", "avg", "max", "min", "product"],
    torch.int64: ["sum", "max", "min", "product", "band", "bor", "bxor"],
    torch.uint8: ["max", "min", "bor"],
    torch.bool: ["max", "min", "sum"],
    torch.complex64: ["sum"],
}  # fmt: skip
BITWISE = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")


def place(mesh: DeviceMesh) -> tuple[int, ...]:
    return tuple(mesh.get_coordinate() or ())


def reduced(parts: list[Tensor], op: str) -> Tensor:
    """All ranks' parts together, as one process does it."""
    function = {**REDUCE, **BITWISE}[op]
    if parts[0].dtype == torch.bool:
        function = torch.logical_or if op in ("sum", "max") else torch.logical_and
    wide = [part.double() if part.is_floating_point() else part for part in parts]
    total = functools.reduce(function, wide)
    return (total / len(parts) if op == "avg" else total).to(parts[0].dtype)


def same(found: Tensor, expected: Tensor) -> bool:
    return found.dtype == expected.dtype and found.shape == expected.shape and torch.equal(found, expected)


@pytest.mark.feature("redistribute: every pair of Shard, Replicate and Partial, 1D")
@pytest.mark.parametrize("dtype", LEGAL, ids=str)
def test_every_pair(dtype: torch.dtype, rank: int, size: int) -> None:
    """From shards and replicas to each other, from every Partial to them; sizes that the ranks divide and do not."""
    mesh = init_device_mesh("cpu", (size,))
    wrong = []
    for shape in [(2 * size, 3 * size), (size + 1, 5), (1, 2 * size - 1), (3, 0)]:
        full = numbers(*shape, dtype=dtype)
        for source, target in itertools.product(WHOLES, repeat=2):
            found = distribute_tensor(full, mesh, [source]).redistribute(placements=[target])
            if not same(found.to_local(), share_of(full, (size,), (rank,), [target])) or found.placements != (target,):
                wrong.append((shape, source, target, found))
        for op, target in itertools.product(LEGAL[dtype], WHOLES):
            if op in BITWISE and TORCH < (2, 13):
                continue
            parts = [numbers(*shape, dtype=dtype, start=r) for r in range(size)]
            found = DTensor.from_local(parts[rank].clone(), mesh, [Partial(op)], run_check=False).redistribute(
                placements=[target]
            )
            if not same(found.to_local(), share_of(reduced(parts, op), (size,), (rank,), [target])):
                wrong.append((shape, op, target, found.to_local(), reduced(parts, op)))
    agree(not wrong, wrong[:2])


@pytest.mark.feature("redistribute: every pair of Shard, Replicate and Partial, 1D")
def test_partial_keeps_nan(rank: int, size: int) -> None:
    """trap 33: a NaN on any one rank is a NaN in the maximum and in the minimum, replicated or sharded."""
    mesh = init_device_mesh("cpu", (size,))
    wrong = []
    for op, where, target in itertools.product(("max", "min"), range(size), WHOLES):
        mine = torch.zeros(size, 2)
        if rank == where:
            mine[0, 0] = float("nan")
        found = DTensor.from_local(mine, mesh, [Partial(op)], run_check=False).redistribute(placements=[target]).full_tensor()
        if found.isnan().sum() != 1 or not found[0, 0].isnan():
            wrong.append((op, where, target, found))
    agree(not wrong, wrong)


@pytest.mark.feature("redistribute: every pair of Shard, Replicate and Partial, 1D")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_have_the_same_bits_everywhere(dtype: torch.dtype, rank: int, size: int) -> None:
    """trap 32: replicas of a sum that differ in one bit drift apart; whatever way the sum takes, to all or in shards first."""
    mesh = init_device_mesh("cpu", (size,))
    mine = drawn(size + 2, 33, seed=rank, dtype=torch.float64).to(dtype)
    wrong = []
    for op, target in itertools.product(("sum", "avg"), WHOLES):
        parts = DTensor.from_local(mine, mesh, [Partial(op)], run_check=False)
        found = parts.redistribute(placements=[target]).full_tensor()
        bits = everyone(found.view(torch.uint8))
        exact = reduced([drawn(size + 2, 33, seed=r, dtype=torch.float64).to(dtype) for r in range(size)], op)
        if not all(torch.equal(other, bits[0]) for other in bits):
            wrong.append((op, target, "differs between ranks"))
        if not torch.allclose(found.double(), exact.double(), rtol=2 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps):
            wrong.append((op, target, (found.double() - exact.double()).abs().max()))
    agree(not wrong, wrong)


@pytest.mark.feature("redistribute: every pair of Shard, Replicate and Partial, 2D and 3D")
@pytest.mark.parametrize("ndim", [2, 3])
def test_every_pair_on_grids(ndim: int, rank: int, size: int) -> None:
    """Each mesh dimension from any placement to any other, both dimensions on one tensor dimension too."""
    wrong = []
    full = drawn(5, 6)
    placements = list(itertools.product(WHOLES, repeat=ndim))
    if ndim == 3:
        placements = placements[::4]
    for grid in grids(size, ndim):
        mesh = init_device_mesh("cpu", grid)
        for source, target in itertools.product(placements, repeat=2):
            found = distribute_tensor(full, mesh, source).redistribute(placements=target)
            if not same(found.to_local(), share_of(full, grid, place(mesh), target)):
                wrong.append((grid, source, target, found.to_local()))
    agree(not wrong, wrong[:2])


@pytest.mark.feature("redistribute: every pair of Shard, Replicate and Partial, 2D and 3D")
@pytest.mark.parametrize("op", ["sum", "avg", "max", "min"])
def test_partials_on_grids(op: str, rank: int, size: int) -> None:
    """Parts over one dimension of the mesh and shards over the other, or parts over both."""
    wrong = []
    for grid in grids(size, 2):
        mesh = init_device_mesh("cpu", grid)
        parts = [numbers(4, 6, dtype=torch.float64, start=r) for r in range(size)]
        for target in itertools.product(WHOLES, repeat=2):
            both = DTensor.from_local(parts[rank], mesh, [Partial(op)] * 2, run_check=False).redistribute(placements=target)
            expected = reduced(parts, op)
            if not torch.allclose(both.to_local(), share_of(expected, grid, place(mesh), target), rtol=0, atol=1e-12):
                wrong.append((grid, "both", target, both.to_local(), expected))
            # rows over the first dimension; over the second each rank has its part of them
            mine = share_of(numbers(4, 6, dtype=torch.float64, start=place(mesh)[1]), grid, place(mesh), [Shard(0), Replicate()])
            line = [numbers(4, 6, dtype=torch.float64, start=i) for i in range(grid[1])]
            mixed = DTensor.from_local(
                mine, mesh, [Shard(0), Partial(op)], run_check=False, shape=torch.Size([4, 6]), stride=(6, 1)
            ).redistribute(placements=target)
            expected = reduced(line, op)
            if not torch.allclose(mixed.to_local(), share_of(expected, grid, place(mesh), target), rtol=0, atol=1e-12):
                wrong.append((grid, "mixed", target, mixed.to_local(), expected))
    agree(not wrong, wrong[:2])


@pytest.mark.feature("redistribute: flattened meshes merge two collectives into one")
def test_flattened_mesh_is_used(rank: int, size: int) -> None:
    """With mesh["dp", "tp"] flattened, both dimensions' parts are summed, or their shards gathered, at once; same values."""
    wrong = []
    for grid in grids(size, 2):
        mesh = init_device_mesh("cpu", grid, mesh_dim_names=("dp", "tp"))
        mesh["dp", "tp"]._flatten("both")
        full = numbers(2 * size, 3, dtype=torch.float64)
        parts = [full + r for r in range(size)]
        for op in ("sum", "avg", "max"):
            for target in ([Replicate()] * 2, [Shard(0)] * 2):
                found = DTensor.from_local(parts[rank], mesh, [Partial(op)] * 2, run_check=False).redistribute(placements=target)
                expected = share_of(reduced(parts, op), grid, place(mesh), target)
                if not torch.allclose(found.to_local(), expected, rtol=0, atol=1e-12):
                    wrong.append((grid, op, target, found.to_local(), expected))
        gathered = distribute_tensor(full, mesh, [Shard(0)] * 2).full_tensor()
        if not same(gathered, full):
            wrong.append((grid, gathered))
    agree(not wrong, wrong[:2])


@pytest.mark.feature("redistribute: gradients, once and twice; asynchronous; in another dtype")
def test_gradients(rank: int, size: int) -> None:
    """The gradient comes back in the source's placement, with the values of one process."""
    mesh = init_device_mesh("cpu", (size,))
    full, weight = drawn(size + 1, 5), drawn(size + 1, 5, seed=1)
    wrong = []
    for source, target in itertools.product(WHOLES, repeat=2):
        tensor = distribute_tensor(full, mesh, [source]).requires_grad_()
        moved = tensor.redistribute(placements=[target])
        (gradient,) = torch.autograd.grad((moved**3).full_tensor().mul(weight).sum(), tensor, create_graph=True)
        expected = 3 * full**2 * weight
        if gradient.placements != (source,) or not torch.allclose(gradient.full_tensor(), expected, rtol=0, atol=1e-12):
            wrong.append((source, target, gradient, expected))
        if TORCH >= (2, 13):  # torch 2.11 differentiates a redistribution once only
            second = torch.autograd.grad(gradient.full_tensor().sum(), tensor)[0].full_tensor()
            if not torch.allclose(second, 6 * full * weight, rtol=0, atol=1e-12):
                wrong.append((source, target, "twice", second))
    for target in WHOLES:
        mine = (full * (rank + 1)).requires_grad_()
        moved = DTensor.from_local(mine, mesh, [Partial()], run_check=False).redistribute(placements=[target])
        (moved**2).full_tensor().mul(weight).sum().backward()
        total = full * (size * (size + 1) // 2)
        if not torch.allclose(mine.grad, 2 * total * weight, rtol=0, atol=1e-10):
            wrong.append(("Partial", target, mine.grad))
    agree(not wrong, wrong[:2])


@pytest.mark.feature("redistribute: gradients, once and twice; asynchronous; in another dtype")
def test_asynchronous(rank: int, size: int) -> None:
    """async_op=True: several under way at once, waited for by their first use."""
    mesh = init_device_mesh("cpu", (size,))
    fulls = [numbers(size + 1, 3, dtype=torch.float64, start=i) for i in range(4)]
    tensors = [distribute_tensor(full, mesh, [Shard(0)]) for full in fulls]
    moved = [t.redistribute(placements=[Replicate()], async_op=True) for t in tensors]
    parts = [DTensor.from_local(full * (rank + 1), mesh, [Partial()], run_check=False) for full in fulls]
    summed = [t.redistribute(placements=[Shard(1)], async_op=True) for t in parts]
    total = size * (size + 1) // 2
    right = all(torch.equal(m.to_local() + 0, full) for m, full in zip(moved, fulls, strict=True)) and all(
        torch.equal((s * 1).full_tensor(), full * total) for s, full in zip(summed, fulls, strict=True)
    )
    agree(right, (moved, summed))


@pytest.mark.feature("redistribute: gradients, once and twice; asynchronous; in another dtype")
def test_communication_in_another_dtype(rank: int, size: int) -> None:
    """forward_dtype and backward_dtype: gathered as bfloat16, the gradient reduced in float32."""
    mesh = init_device_mesh("cpu", (size,))
    full = numbers(2 * size, 3)
    tensor = distribute_tensor(full, mesh, [Shard(0)]).requires_grad_()
    moved = tensor.redistribute(placements=[Replicate()], forward_dtype=torch.bfloat16, backward_dtype=torch.float32)
    local = moved.to_local(grad_placements=[Partial()])
    (local * (rank + 1)).sum().backward()
    right = same(local.detach(), full.bfloat16()) and tensor.grad.dtype == torch.float32
    agree(right and bool((tensor.grad.full_tensor() == size * (size + 1) // 2).all()), (local, tensor.grad))


@pytest.mark.feature("redistribute: Shard to Partial")
@pytest.mark.skipif(TORCH < (2, 15), reason="needs torch >= 2.15")
def test_shards_become_parts(rank: int, size: int) -> None:
    """Zeros where other ranks' shards are; the sum is the tensor."""
    mesh = init_device_mesh("cpu", (size,))
    full = numbers(size + 1, 3)
    parts = distribute_tensor(full, mesh, [Shard(0)]).redistribute(placements=[Partial()])
    agree(parts.placements == (Partial(),) and same(parts.full_tensor(), full), parts)


def test_redistributing_replicas_to_partial(request: pytest.FixtureRequest, size: int) -> None:
    """torch keeps that for itself."""

    def call(group: dist.ProcessGroup) -> DTensor:
        mesh = DeviceMesh.from_group(group, "cpu")
        return distribute_tensor(numbers(2, 3), mesh, [Replicate()]).redistribute(placements=[Partial()])

    said = refused_alike("DTensor: redistribute from Replicate to Partial", call, request.node)
    agree("Partial" in said, said)


def test_redistributing_to_another_mesh(request: pytest.FixtureRequest, size: int) -> None:
    """Between meshes of the same ranks in another shape."""

    def call(group: dist.ProcessGroup) -> DTensor:
        backend = dist.get_backend(group)
        overrides = [{0: backend}, {0: backend, 1: backend}]
        line, grid = (
            init_device_mesh("cpu", s, backend_override=o) for s, o in zip([(size,), (1, size)], overrides, strict=True)
        )
        return distribute_tensor(numbers(2, 3), line, [Replicate()]).redistribute(grid, [Replicate(), Shard(0)])

    said = refused_alike("DTensor: redistribute to another mesh", call, request.node)
    agree("not supported" in said, said)


@pytest.mark.feature("all_to_all of shards, in torch's own operator")
def test_shard_dimension_all_to_all(rank: int, size: int) -> None:
    """torch.ops._dtensor.shard_dim_alltoall, which torch itself takes on accelerators only, works on MPI's CPU groups."""
    mesh = init_device_mesh("cpu", (size,))
    full = drawn(2 * size, 3, 3 * size)
    wrong = []
    for gather_dim, shard_dim in [(0, 2), (2, 0)]:
        mine = share_of(full, (size,), (rank,), [Shard(gather_dim)]).contiguous()
        found = torch.ops._dtensor.shard_dim_alltoall(mine, gather_dim, shard_dim, mesh.get_group().group_name)
        if not same(found, share_of(full, (size,), (rank,), [Shard(shard_dim)])):
            wrong.append((gather_dim, shard_dim, found))
    agree(not wrong, wrong)

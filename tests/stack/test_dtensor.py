"""DTensor over MPI: how tensors are dealt out, move between every two placements and come together again, with gradients."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as dtensor
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor

from tests.stack.meshes import drawn, grids, line, numbers, place, share_of
from tests.stack.sharded import TORCH
from tests.support import agree, everyone
from tests.support.tensors import reduced
from tests.support.torch_backend import same

WHOLES: list[Placement] = [Shard(0), Shard(1), Replicate()]  # the placements that hold values, not parts of a sum
LEGAL = {  # of each dtype, the reductions that torch and MPI can do
    torch.float32: ["sum", "avg", "max", "min", "product"],
    torch.bfloat16: ["sum", "avg", "max", "min", "product"],
    torch.float16: ["sum", "avg", "max", "min"],
    torch.float64: ["sum", "avg", "max", "min", "product"],
    torch.int64: ["sum", "max", "min", "product", "band", "bor", "bxor"],
    torch.uint8: ["max", "min", "bor"],
    torch.bool: ["max", "min", "sum"],
    torch.complex64: ["sum"],
}

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*not have complete support on cpu:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),
]


def tuples(ndim: int) -> list[tuple[Placement, ...]]:
    return list(itertools.product(WHOLES, repeat=ndim))


def parts_of(local: Tensor, mesh: DeviceMesh, *placements: Placement, **more: Any) -> DTensor:
    return DTensor.from_local(local, mesh, placements, run_check=False, **more)


def near(found: Tensor, expected: Tensor, atol: float = 1e-12) -> bool:
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", [dtype for dtype in LEGAL if dtype != torch.float16], ids=str)
def test_each_rank_gets_its_share(dtype: torch.dtype, rank: int, size: int) -> None:
    """Chunks as torch.chunk makes them, the last smaller or empty; strided tensors by what they mean. Rank 0's data count."""
    fulls = [numbers(*shape, dtype=dtype) for shape in [(2 * size, size), (size + 1, 3), (1, 5), (0, 4), (7, 2 * size - 1)]]
    if dtype == torch.float32:
        base, images = numbers(2 * size, 6), numbers(2, size, 3, 2).contiguous(memory_format=torch.channels_last)
        fulls += [base.t(), base[:, ::2], base[0].expand(size, 6), images]
    wrong = []
    for grid in grids(size, 1) + grids(size, 2):
        mesh = init_device_mesh("cpu", grid)
        for full, placements in itertools.product(fulls, tuples(len(grid))):
            blank = rank > 0 and full.is_contiguous()  # scatter and broadcast come from the group's first rank
            tensor = distribute_tensor(torch.zeros_like(full) if blank else full, mesh, placements)
            pairs = (tensor.to_local(), share_of(full, grid, place(mesh), placements)), (tensor.full_tensor(), full)
            if not all(same(found, expected) for found, expected in pairs):
                wrong.append((grid, placements, full.shape, full.stride(), pairs))
    agree(not wrong, wrong[:2])


@pytest.mark.min_ranks(2)
def test_on_some_of_the_ranks(rank: int, size: int) -> None:
    """The last rank is not in the mesh: its share is empty, it waits for nobody."""
    mesh = DeviceMesh("cpu", torch.arange(size - 1))
    full = numbers(5, 3)
    tensor = distribute_tensor(full, mesh, [Shard(0)])
    if rank < size - 1:
        right = same(tensor.to_local(), share_of(full, (size - 1,), (rank,), [Shard(0)]))
        right = same((tensor + tensor).full_tensor(), 2 * full) and right
    else:
        right = tensor.to_local().numel() == 0 and (tensor + tensor).to_local().numel() == 0
    agree(right, tensor.to_local())


def test_uneven_shares_and_gradient_placements(rank: int, size: int) -> None:
    """from_local with shape and stride given; to_local(grad_placements=Partial) sums the ranks' gradients."""
    full = drawn(2 * size + 1, 3)
    mine = share_of(full, (size,), (rank,), [Shard(0)]).clone().requires_grad_()
    tensor = parts_of(mine, line(size), Shard(0), shape=full.shape, stride=full.stride())
    local = tensor.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    (local * (rank + 1)).sum().backward()  # every rank's own loss; together they have 1 + 2 + ... + size
    total = size * (size + 1) / 2
    agree(torch.equal(local, full) and torch.equal(mine.grad, torch.full_like(mine, total)), (local, mine.grad))


# -- redistribute ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", LEGAL, ids=str)
def test_every_pair(dtype: torch.dtype, rank: int, size: int) -> None:
    """From shards and replicas to each other, from every Partial to them; sizes that the ranks divide and do not."""
    wrong = []
    ops = [op for op in LEGAL[dtype] if not op.startswith("b") or TORCH >= (2, 13)]
    for shape in [(2 * size, 3 * size), (size + 1, 5), (1, 2 * size - 1), (3, 0)]:
        full, parts = numbers(*shape, dtype=dtype), [numbers(*shape, dtype=dtype, start=r) for r in range(size)]
        sources = [(distribute_tensor(full, line(size), [source]), full) for source in WHOLES]
        sources += [(parts_of(parts[rank].clone(), line(size), Partial(op)), reduced(op.upper(), parts)) for op in ops]
        for (source, expected), target in itertools.product(sources, WHOLES):
            found = source.redistribute(placements=[target])
            if not same(found.to_local(), share_of(expected, (size,), (rank,), [target])) or found.placements != (target,):
                wrong.append((shape, source.placements, target, found.to_local(), expected))
    agree(not wrong, wrong[:2])


@pytest.mark.parametrize("ndim", [2, 3])
def test_every_pair_on_grids(ndim: int, size: int) -> None:
    """Each mesh dimension from any placement to any other, both dimensions on one tensor dimension too."""
    wrong, full = [], drawn(5, 6)
    for grid in grids(size, ndim):
        mesh = init_device_mesh("cpu", grid)
        for source, target in itertools.product(tuples(ndim)[:: 1 if ndim == 2 else 4], repeat=2):
            found = distribute_tensor(full, mesh, source).redistribute(placements=target)
            if not same(found.to_local(), share_of(full, grid, place(mesh), target)):
                wrong.append((grid, source, target, found.to_local()))
    agree(not wrong, wrong[:2])


@pytest.mark.parametrize("flattened", [False, True])
def test_partials_on_grids(flattened: bool, rank: int, size: int) -> None:
    """Parts over both dimensions of the mesh, or over one beside shards over the other; with both flattened into one too."""
    wrong = []
    for grid, op in itertools.product(grids(size, 2), ["sum", "avg", "max", "min"]):
        mesh = init_device_mesh("cpu", grid, mesh_dim_names=("dp", "tp"))
        if flattened:
            mesh["dp", "tp"]._flatten("both")
        full = [numbers(4, 6, dtype=torch.float64, start=r) for r in range(size)]
        mine = share_of(full[place(mesh)[1]], grid, place(mesh), [Shard(0), Replicate()])
        mixed = parts_of(mine, mesh, Shard(0), Partial(op), shape=torch.Size([4, 6]), stride=(6, 1))
        both = parts_of(full[rank], mesh, Partial(op), Partial(op))
        cut = distribute_tensor(full[0], mesh, [Partial(op), Shard(1)])
        sources = [(both, reduced(op.upper(), full)), (mixed, reduced(op.upper(), full[: grid[1]])), (cut, full[0])]
        for (source, expected), target in itertools.product(sources, tuples(2)):
            found = source.redistribute(placements=target).to_local()
            if not near(found, share_of(expected, grid, place(mesh), target)):
                wrong.append((grid, source.placements, target, found, expected))
    agree(not wrong, wrong[:2])


def test_gradients_of_redistribute(rank: int, size: int) -> None:
    """The gradient comes back in the source's placement, with the values of one process."""
    full, weight = drawn(size + 1, 5), drawn(size + 1, 5, seed=1)
    wrong: list[Any] = []
    for source, target in itertools.product(WHOLES, repeat=2):
        tensor = distribute_tensor(full, line(size), [source]).requires_grad_()
        moved = tensor.redistribute(placements=[target])
        (gradient,) = torch.autograd.grad((moved**3).full_tensor().mul(weight).sum(), tensor, create_graph=True)
        if gradient.placements != (source,) or not near(gradient.full_tensor(), 3 * full**2 * weight):
            wrong.append((source, target, gradient))
        if TORCH >= (2, 13):  # torch 2.11 differentiates a redistribution once only
            second = torch.autograd.grad(gradient.full_tensor().sum(), tensor)[0].full_tensor()
            wrong += [] if near(second, 6 * full * weight) else [(source, target, "twice", second)]
    for target in WHOLES:
        mine = (full * (rank + 1)).requires_grad_()
        moved = parts_of(mine, line(size), Partial()).redistribute(placements=[target])
        (moved**2).full_tensor().mul(weight).sum().backward()
        total = full * (size * (size + 1) // 2)
        wrong += [] if near(mine.grad, 2 * total * weight, 1e-10) else [("Partial", target, mine.grad)]
    agree(not wrong, wrong[:2])


def test_asynchronous_and_in_another_dtype(rank: int, size: int) -> None:
    """Several under way, waited for by their first use; gathered as bfloat16, the gradient reduced in float32."""
    total, fulls = size * (size + 1) // 2, [numbers(2 * size, 3, start=i) for i in range(4)]
    parts = [parts_of(full * (rank + 1), line(size), Partial()) for full in fulls]
    summed = [t.redistribute(placements=[Shard(1)], async_op=True) for t in parts]
    tensor = distribute_tensor(fulls[0], line(size), [Shard(0)]).requires_grad_()
    moved = tensor.redistribute(placements=[Replicate()], forward_dtype=torch.bfloat16, backward_dtype=torch.float32)
    local = moved.to_local(grad_placements=[Partial()])
    (local * (rank + 1)).sum().backward()
    right = [torch.equal((s * 1).full_tensor(), full * total) for s, full in zip(summed, fulls, strict=True)]
    right += [same(local.detach(), fulls[0].bfloat16()), tensor.grad.dtype == torch.float32]
    agree(all(right) and bool((tensor.grad.full_tensor() == total).all()), (right, local, tensor.grad))


@pytest.mark.skipif(TORCH < (2, 15), reason="needs torch >= 2.15")
def test_shards_become_parts(size: int) -> None:
    """Zeros where other ranks' shards are; the sum is the tensor."""
    full = numbers(size + 1, 3)
    parts = distribute_tensor(full, line(size), [Shard(0)]).redistribute(placements=[Partial()])
    agree(parts.placements == (Partial(),) and same(parts.full_tensor(), full), parts)


def test_shard_dimension_all_to_all(rank: int, size: int) -> None:
    """torch.ops._dtensor.shard_dim_alltoall, which torch itself takes on accelerators only, works on MPI's CPU groups."""
    full, name = drawn(2 * size, 3, 3 * size), line(size).get_group().group_name
    wrong = []
    for gather_dim, shard_dim in [(0, 2), (2, 0)]:
        mine = share_of(full, (size,), (rank,), [Shard(gather_dim)]).contiguous()
        found = torch.ops._dtensor.shard_dim_alltoall(mine, gather_dim, shard_dim, name)
        wrong += [] if same(found, share_of(full, (size,), (rank,), [Shard(shard_dim)])) else [(gather_dim, shard_dim, found)]
    agree(not wrong, wrong)


# -- factories, modules ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["zeros", "ones", "full", "empty"])
def test_factories(name: str, size: int) -> None:
    """dtensor.zeros(...) on each rank makes its share only."""
    args, mesh = ((size + 1, 3), *[2.5] * (name == "full")), line(size)
    tensor = getattr(dtensor, name)(*args, device_mesh=mesh, placements=[Shard(0)])
    share = share_of(getattr(torch, name)(*args), (size,), place(mesh), [Shard(0)])
    agree(tensor.to_local().shape == share.shape and (name == "empty" or same(tensor.to_local(), share)), tensor)


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
    sane = ((uniform >= 0) & (uniform < 1)).all() and (moved >= 2).all() and set(dropped.unique().tolist()) <= {0.0, 2.0}
    agree(sane and all(torch.equal(a, b) for a, b in zip(*said, strict=True)), said)


def test_modules_without_a_function_are_replicated(rank: int, size: int) -> None:
    """Parameters and buffers become rank 0's on every rank."""
    torch.manual_seed(rank)
    model = nn.BatchNorm1d(3)
    with torch.no_grad():
        model.weight.uniform_()
        model.running_mean.uniform_()
    at_0 = everyone((model.weight.detach().clone(), model.running_mean.clone()))[0]
    distribute_module(model, line(size))
    found = (model.weight.full_tensor(), model.running_mean.full_tensor())
    agree(all(torch.equal(a, b) for a, b in zip(found, at_0, strict=True)), found)

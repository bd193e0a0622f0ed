"""mpicoll.nn.functional: each collective's gradient against the numeric one of all ranks together, and what torch gets wrong."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp
from torch.utils.checkpoint import checkpoint

from mpicoll.nn import Grid, halo_exchange
from mpicoll.nn import functional as nnf
from tests.nn.domains import refused_alike
from tests.support import agree
from tests.support.gradients import check, of_ranks

reductions = pytest.mark.parametrize("name", ["SUM", "AVG", "PRODUCT", "MIN", "MAX"])
SCANS = {"scan": nnf.scan, "exscan": nnf.exscan}
scans = pytest.mark.parametrize("name", SCANS)


def last() -> int:
    return dist.get_world_size() - 1


def buffers(*rows: int, like: Tensor) -> list[Tensor]:
    return [like.new_empty(count, *like.shape[1:]) for count in rows]


def all_to_all_uneven(x: Tensor) -> tuple[Tensor, ...]:
    """Rank i sends i + j % 2 rows to rank j."""
    rank, size = dist.get_rank(), dist.get_world_size()
    given = [x[:1].sin().expand(rank + to % 2, *x.shape[1:]) for to in range(size)]
    return nnf.all_to_all(buffers(*(by + rank % 2 for by in range(size)), like=x), given)


def all_to_all_single_uneven(x: Tensor) -> Tensor:
    rank, size = dist.get_rank(), dist.get_world_size()
    sends, comes = [rank + to % 2 for to in range(size)], [by + rank % 2 for by in range(size)]
    return nnf.all_to_all_single(buffers(sum(comes), like=x)[0], x[:1].sin().expand(sum(sends), *x.shape[1:]), comes, sends)


# Each takes a tensor of two rows and gives tensors that all depend on some rank's.
COLLECTIVES: dict[str, Callable[[Tensor], Any]] = {
    "broadcast": lambda x: nnf.broadcast(x.sin(), src=last()),
    "gather": lambda x: nnf.gather(x.sin(), dst=last()),
    "gather uneven": lambda x: nnf.gather(x.sin()[: 1 + dist.get_rank() % 2], dst=last()),
    "scatter": lambda x: nnf.scatter([x.sin() * (r + 1) for r in range(last() + 1)], src=last()),
    "scatter uneven": lambda x: nnf.scatter([x.sin()[: 1 + r % 2] for r in range(last() + 1)]),
    "reduce": lambda x: nnf.reduce(x.sin(), dst=last()),
    "all_reduce": lambda x: nnf.all_reduce(x.sin()),
    "all_gather": lambda x: nnf.all_gather(x.sin()),
    "all_gather uneven": lambda x: nnf.all_gather(x.sin()[: 1 + dist.get_rank() % 2]),
    "_all_gather_base": lambda x: nnf._all_gather_base(*buffers(2 * last() + 2, like=x), x.sin()),
    "_all_gather_base stacked": lambda x: nnf._all_gather_base(x.new_empty(last() + 1, *x.shape), x.sin()),
    "reduce_scatter": lambda x: nnf.reduce_scatter(torch.empty_like(x), [x.sin() * (r + 1) for r in range(last() + 1)]),
    "reduce_scatter uneven": lambda x: nnf.reduce_scatter(
        buffers(1 + dist.get_rank() % 2, like=x)[0], [x.sin()[: 1 + r % 2] for r in range(last() + 1)]
    ),
    "all_to_all": lambda x: nnf.all_to_all([torch.empty_like(x) for _ in range(last() + 1)], [x.sin()] * (last() + 1)),
    "all_to_all uneven": all_to_all_uneven,
    "all_to_all_single": lambda x: nnf.all_to_all_single(*buffers(2 * last() + 2, like=x), torch.cat([x.sin()] * (last() + 1))),
    "all_to_all_single uneven": all_to_all_single_uneven,
    "scan": lambda x: nnf.scan(x.sin()),
    "exscan": lambda x: nnf.exscan(x.sin()),
}
SOME = ["broadcast", "gather", "all_gather uneven", "reduce", "all_reduce", "reduce_scatter", "reduce_scatter uneven"]
some = pytest.mark.parametrize("name", [*SOME, "all_to_all_single", "scan", "exscan"])


@pytest.mark.parametrize("name", COLLECTIVES)
def test_gradients(name: str) -> None:
    """The backward of a collective is another collective: the wrong one, or one that is not there, gives wrong numbers."""
    check(COLLECTIVES[name], of_ranks(2), twice=last() < 2)


@reductions
def test_gradients_of_reductions(name: str) -> None:
    """torch's backward reduces the gradients by the op itself, or ignores it: right for SUM alone."""
    op, size = getattr(ReduceOp, name), last() + 1

    def reduced(x: Tensor) -> tuple[Tensor, ...]:
        shares = nnf.reduce_scatter(x.new_empty(1), [x * (r + 1) for r in range(size)], op)
        return nnf.all_reduce(x, op), nnf.reduce(x.cos(), last(), op), shares

    check(reduced, of_ranks(1), twice=last() < 2)


def test_gradient_of_a_product_with_zeros() -> None:
    """Where one rank has a zero, only its gradient is not zero; product / own value would give NaN there."""
    x = of_ranks(3).abs() + 0.5
    x[0, 0] = x[-1, 0] = x[0, 1] = 0
    check(lambda x: nnf.all_reduce(x, ReduceOp.PRODUCT), x, twice=last() < 2)


@pytest.mark.parametrize("name", ["MIN", "MAX"])
def test_ranks_that_tie_share_the_gradient(name: str, rank: int, size: int) -> None:
    """As torch.amax has it: the sum of the gradients is that of the result, not as many times it as ranks tie."""
    x = torch.tensor([1.0, 2.0, float(rank)], requires_grad=True)
    y = nnf.all_reduce(x, getattr(ReduceOp, name))
    (y * torch.tensor([1.0, 10.0, 100.0])).sum().backward()
    stacked = torch.tensor([[1.0, 2.0, float(r)] for r in range(size)], requires_grad=True)
    extreme = stacked.amin(0) if name == "MIN" else stacked.amax(0)
    (extreme * torch.tensor([1.0, 10.0, 100.0]) * size).sum().backward()
    agree(torch.equal(y, extreme) and torch.equal(x.grad, stacked.grad[rank]), f"{x.grad} {stacked.grad}")


@reductions
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.uint8, torch.bool])
def test_values_of_reductions(name: str, dtype: torch.dtype, rank: int, size: int) -> None:
    """The same numbers as all_reduce in place; integers have values, and no gradients. Zeros where reduce has no result."""
    op = getattr(ReduceOp, name)
    mine = ((torch.arange(15).view(5, 3).t() + rank) % 4 + 1).to(dtype)
    if name == "AVG" and dtype == torch.bool:
        with pytest.raises(TypeError, match="AVG"):
            nnf.all_reduce(mine, op)
        return
    expected = mine.clone()
    dist.all_reduce(expected, op)
    everywhere, at_0 = nnf.all_reduce(mine, op), nnf.reduce(mine, 0, op)
    share = nnf.reduce_scatter(torch.empty_like(mine), [mine] * size, op)
    for result, wanted in ((everywhere, expected), (at_0, expected * (rank == 0)), (share, expected)):
        agree(result.dtype == dtype and torch.equal(result, wanted), f"{result} {wanted}")
    agree(not everywhere.requires_grad)


@scans
@pytest.mark.parametrize("shape", [(), (0,), (3, 2)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64])
def test_values_of_scans(name: str, shape: tuple[int, ...], dtype: torch.dtype, rank: int, size: int) -> None:
    """Small whole numbers, whose sums have no rounding error; integers have no gradients."""
    whole, weights = (torch.randint(-5, 6, (size, *shape)).to(dtype) for _ in range(2))
    x, alone = (tensor.clone().requires_grad_(dtype.is_floating_point) for tensor in (whole[rank], whole))
    y, expected = SCANS[name](x), alone.cumsum(0) - alone * (name == "exscan")
    agree(y.dtype == dtype and torch.equal(y, expected[rank].to(dtype)) and y.requires_grad == x.requires_grad, y)
    if dtype.is_floating_point:
        (y * weights[rank]).sum().backward()
        (expected * weights).sum().backward()
        agree(torch.equal(x.grad, alone.grad[rank]), x.grad)


@scans
def test_the_gradient_of_a_scan_loses_no_digits(name: str, rank: int, size: int) -> None:
    """Rank 0 has a gradient of 1e16. The sum of all gradients minus those of the ranks before would be 0 on the other ranks."""
    x = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    y = SCANS[name](x)
    y.backward(torch.full_like(y, 1e16 if rank == 0 else 1.0))
    ones = size - 1 - rank + (name == "scan")
    agree(x.grad.item() == ones or (name == "scan" and rank == 0 and x.grad.item() >= 1e16), x.grad)


def test_an_average_of_halves_does_not_overflow(size: int) -> None:
    """60000 x 2 is no float16; neither value nor gradient may become infinite."""
    x = torch.full((3,), 60000.0, dtype=torch.float16, requires_grad=True)
    shares = nnf.reduce_scatter(torch.empty(3, dtype=torch.float16), [x] * size, ReduceOp.AVG)
    for y in (nnf.all_reduce(x, ReduceOp.AVG), nnf.reduce(x, 0, ReduceOp.AVG), shares):
        agree(y.tolist() in ([60000.0] * 3, [0.0] * 3) and y.dtype == torch.float16, y)
        (gradient,) = torch.autograd.grad(y, x, torch.full_like(y, 1000.0))
        agree(gradient.isfinite().all() and gradient.dtype == torch.float16, gradient)


@some
def test_complex_and_transposed(name: str) -> None:
    """Conjugates, and strides that are not row-major, on the way there and on the way back."""
    check(lambda x: COLLECTIVES[name](x.t().conj()), of_ranks(1, 2, dtype=torch.complex128))


def test_given_outputs_are_filled_and_returned(rank: int, size: int) -> None:
    """As torch does it: who goes on with the tensor that was passed as output has the values, and the gradient."""
    x = torch.full((size, 2), float(rank), requires_grad=True)
    outputs = [torch.empty(2) for _ in range(size)]
    results = nnf.all_to_all(outputs, list(x))
    agree(isinstance(results, tuple) and all(a is b for a, b in zip(results, outputs, strict=True)))
    agree(torch.stack(outputs).tolist() == [[r, r] for r in range(size)])
    for op in (ReduceOp.SUM, ReduceOp.AVG):
        output = torch.empty(2, 2).t()
        share = nnf.reduce_scatter(output, [x[:2] if size > 1 else x.expand(2, 2)] * size, op)
        agree(share is output and output.requires_grad)
    whole = torch.empty(size * size, 2)
    agree(nnf._all_gather_base(whole, x) is whole and whole[::size, 0].tolist() == list(range(size)))
    flat = torch.empty(size, 2)
    agree(nnf.all_to_all_single(flat, x) is flat and torch.equal(flat, torch.stack(outputs)))
    (flat.sum() + torch.stack(outputs).sum()).backward()
    agree(torch.equal(x.grad, torch.full((size, 2), 2.0)), x.grad)


def test_scatter_where_receivers_have_nothing(rank: int, size: int) -> None:
    """torch documents None for the receivers, and fails on it."""
    tensors = [torch.arange(r + 1, dtype=torch.float64).requires_grad_() for r in range(size)]
    mine = nnf.scatter(tensors if rank == size - 1 else None, src=size - 1)
    agree(torch.equal(mine, torch.arange(rank + 1, dtype=torch.float64)) and mine.requires_grad, mine)
    (mine * (rank + 1)).sum().backward()
    found = [None if tensor.grad is None else tensor.grad.tolist() for tensor in tensors]
    agree(found == [[r + 1.0] * (r + 1) if rank == size - 1 else None for r in range(size)], found)


@pytest.mark.min_ranks(2)
def test_src_and_dst_are_global_ranks(rank: int, size: int) -> None:
    """In the group of all ranks but 0, rank 1 is group rank 0: torch 2.13 throws its gradient away there."""
    group = dist.new_group(list(range(1, size)))
    right = True
    if rank > 0:
        x = torch.full((2,), float(rank), requires_grad=True)
        results = [nnf.broadcast(x, 1, group), nnf.reduce(x, 1, group=group), *nnf.gather(x, 1, group)]
        results += [nnf.scatter([x] * (size - 1), 1, group), nnf.all_reduce(x, group=group)]
        results += [scan(x, group=group) for scan in SCANS.values()]
        torch.cat(results).sum().backward()
        # On rank 1: broadcast, reduce and gather once for each place that has it, scatter and all_reduce for each rank.
        at_1 = (size - 1) * (rank == 1)
        expected = at_1 + 1 + 1 + at_1 + (size - 1) + (size - rank) + (size - rank - 1)  # a scan reaches the ranks behind
        sums = [result.tolist() for result in results[-2:]]
        right = x.grad.tolist() == [expected] * 2 and results[0].tolist() == [1, 1]
        right = right and sums == [[sum(range(1, rank + 1))] * 2, [sum(range(1, rank))] * 2]
    agree(right)
    if rank == 0:
        with pytest.raises(ValueError, match="not in the group"):
            nnf.all_reduce(torch.ones(1), group=group)
    dist.destroy_process_group(group)


@pytest.mark.min_ranks(2)
def test_errors_are_alike(rank: int, size: int) -> None:
    """Without it MPI waits for ever, or takes the bytes for something else; the group must work on afterwards."""
    odd = rank == size - 1
    x = torch.ones(2, 2)
    few = [x] * size if not odd else [x] * (size + 1)
    wrong: list[tuple[Callable[[], object], str]] = [
        (lambda: nnf.all_reduce(x[:1] if odd else x), f"rank {size - 1}: SUM of torch.float32 (1, 2)"),
        (lambda: nnf.all_reduce(x.double() if odd else x), f"rank {size - 1}: SUM of torch.float64 (2, 2)"),
        (lambda: nnf.all_reduce(x, ReduceOp.MAX if odd else ReduceOp.SUM), f"rank {size - 1}: MAX"),
        (lambda: nnf.all_reduce("x" if odd else x), f"TypeError: all_reduce: wrong on some rank\n  rank {size - 1}"),
        (lambda: nnf.all_reduce(x, dist._make_nccl_premul_sum(2.0)), "PREMUL_SUM has no gradient"),
        (lambda: nnf.reduce(x, 0, 0), "must be a torch.distributed.ReduceOp"),
        (lambda: nnf.reduce_scatter(x, [x] * size, dist._make_nccl_premul_sum(2.0)), "PREMUL_SUM has no gradient"),
        (lambda: nnf.broadcast(x, src=int(odd)), "rank 1"),
        (lambda: nnf.broadcast(x, src=size), f"ValueError: broadcast: src: global rank {size}"),
        (lambda: nnf.reduce_scatter(torch.empty(3 if odd else 2, 2), [x] * size), "(3, 2)"),
        (lambda: nnf.reduce_scatter(torch.empty(2, 2), few), f"has {size + 1} tensors"),
        (lambda: nnf.all_gather(x.half() if odd else x), "float16"),
        (lambda: nnf.scatter(few, src=size - 1), f"has {size + 1} tensors"),
        (lambda: nnf.scatter([x if odd else x[:1]] * size, src=0), "own list"),
        (lambda: nnf.all_to_all([x] * size, [x[:1] if odd else x] * size), "sends"),
        (lambda: nnf.all_to_all_single(x.repeat(size, 1), x.repeat(size, 1), None, _shifted(size) if odd else None), "sends"),
    ]  # fmt: skip
    for name, scan in SCANS.items():
        wrong += [
            (partial(scan, x[:1] if odd else x), f"ValueError: {name}: the ranks do not fit together"),
            (partial(scan, x, ReduceOp.AVG if odd else ReduceOp.SUM), f"rank {size - 1}: {name}: AVG has no gradient"),
            (
                partial(scan, x, ReduceOp.MAX),
                f"UnsupportedReduction: {name}: MAX has no gradient here; use SUM, or mpicoll.{name}",
            ),
        ]
    refused_alike(wrong)
    agree(nnf.all_reduce(x).eq(size).all())


def _shifted(size: int) -> list[int]:
    return [1, 3, *[2] * (size - 2)]


@some
def test_one_rank_alone_requires_grad(name: str, rank: int, size: int) -> None:
    """Backward is a collective: if the results of the others did not require grad, that rank would wait for ever."""
    whole = torch.rand(size, 2, 2, dtype=torch.float64)
    gradients = []
    for wanting in ([size - 1], range(size)):
        x = whole[rank].clone().requires_grad_(rank in wanting)
        results = COLLECTIVES[name](x)
        loss = sum(((r + 2) * y).square().sum() for r, y in enumerate([results] if isinstance(results, Tensor) else results))
        loss.backward()
        gradients.append(x.grad)
    agree(rank != size - 1 or torch.equal(*gradients), gradients)


def test_one_rank_alone_has_a_second_derivative(rank: int, size: int) -> None:
    """Elsewhere the loss is linear: the gradient that comes back does not require grad there, and yet must go back again."""
    x = torch.full((2,), rank + 1.0, dtype=torch.float64, requires_grad=True)
    y = nnf.all_reduce(x)
    loss = y.pow(3).sum() if rank == size - 1 else y.sum()
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    total = size * (size + 1) / 2
    agree(torch.allclose(first, torch.tensor(3 * total**2 + size - 1).double()), first)
    agree(torch.allclose(second, torch.tensor(6 * total * size).double()), second)


def test_without_grad_there_is_no_graph(rank: int, size: int) -> None:
    x = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        agree(not nnf.all_reduce(x).requires_grad and not any(y.requires_grad for y in nnf.all_gather(x)))
    with torch.inference_mode():
        agree(nnf.all_reduce(x).tolist() == [size, size] and nnf.sendrecv(x, rank, rank).tolist() == [1, 1])
        grid = Grid((size,))
        agree(halo_exchange(x, grid, 0, 1).tolist() == [float(rank > 0), 1, 1, float(rank < size - 1)])
        grid.close()


def layer(x: Tensor) -> Tensor:
    return nnf.all_reduce(x.sin() * 2, ReduceOp.AVG).cos() * 3


@pytest.mark.parametrize("how", ["checkpoint", "compile"])
def test_recomputed_or_compiled(how: str, rank: int, size: int) -> None:
    """Activation checkpointing runs the forward's collectives again, inside the backward; the compiler must not trace into MPI.

    The compiler breaks its graph at a collective, and the gradient goes through.
    """
    whole = torch.rand(size, 3, dtype=torch.float64)
    expected, x = (whole[rank].clone().requires_grad_() for _ in range(2))
    layer(layer(expected)).sum().backward()
    compiled = torch.compile(layer, backend="eager")
    if how == "compile":
        compiled(compiled(x)).sum().backward()
    else:
        checkpoint(lambda x: layer(layer(x)), x, use_reentrant=False).sum().backward()
    right = torch.equal(x.grad, expected.grad) if how == "checkpoint" else torch.allclose(x.grad, expected.grad, rtol=1e-12)
    agree(right, x.grad)


def test_in_a_gloo_group(size: int) -> None:
    """Door 1 hands other backends on to torch; the gradients are ours there, too."""
    gloo = dist.new_group(backend="gloo")
    grid = Grid((size,), periodic=True, group=gloo)

    def mixed(x: Tensor) -> tuple[Tensor, ...]:
        rank = dist.get_rank()
        y = nnf.broadcast(x.sin(), last(), gloo) * nnf.all_reduce(x, ReduceOp.SUM, gloo) + nnf.all_reduce(x, ReduceOp.AVG, gloo)
        z = torch.stack(nnf.all_gather(y * (rank + 1), gloo)).square()
        around = nnf.sendrecv(x, (rank + 1) % size, (rank - 1) % size, gloo) if size > 1 else x
        return z, halo_exchange(around, grid, 0, 1), nnf.reduce_scatter(torch.empty_like(x), list(z), group=gloo)

    check(mixed, of_ranks(1))
    agree(dist.get_backend(grid.group) == "gloo")
    grid.close()
    dist.destroy_process_group(gloo)


def test_contrastive_loss(rank: int, size: int) -> None:
    """What all_gather with gradients is used for: each rank has its rows of the batch, of uneven numbers, the loss wants all."""
    rows = [2 + r % 2 for r in range(size)]
    images, texts = (torch.randn(sum(rows), 4, dtype=torch.float64) for _ in range(2))
    weight = torch.randn(4, 4, dtype=torch.float64)

    def loss(image: Tensor, text: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(image @ text.t(), torch.arange(len(text)), reduction="sum")

    alone = weight.clone().requires_grad_()
    loss(images @ alone, texts @ alone).backward()

    mine = weight.clone().requires_grad_()
    image, text = images.split(rows)[rank] @ mine, texts.split(rows)[rank] @ mine
    loss(torch.cat(nnf.all_gather(image)), torch.cat(nnf.all_gather(text))).backward()
    dist.all_reduce(mine.grad)
    mine.grad /= size  # every rank computes the loss of the whole batch, and all of them count
    agree(torch.allclose(mine.grad, alone.grad, rtol=1e-10), mine.grad)

"""In place means in place: same storage, views see it, neighbours stay, autograd is told; what has no memory of its own for
each element is read, but not written."""

from collections.abc import Callable

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import mpicoll as dist
from tests.support import agree
from tests.support.tensors import of_rank, reduced, same

pytestmark = pytest.mark.usefixtures("world")


def writers(tensor: Tensor, rank: int, size: int) -> dict[str, Callable[[], object]]:
    """Every call that writes into ``tensor`` on every rank (in reduce, broadcast and gather on some)."""
    like, own = torch.ones(tensor.shape), torch.ones(tensor.shape)
    others = [torch.ones(tensor.shape) for _ in range(size - 1)]
    last = rank == size - 1
    stacked = torch.ones(size, *tensor.shape)
    part = tensor if tensor.dim() == 0 else tensor[: tensor.size(0) // size * size]
    return {
        "all_reduce": lambda: dist.all_reduce(tensor),
        "reduce": lambda: dist.reduce(tensor, 0),
        "broadcast": lambda: dist.broadcast(own if last and size > 1 else tensor, size - 1),
        "all_gather": lambda: dist.all_gather([*others, tensor], like),
        "all_gather_single": lambda: dist.all_gather_single(part, part.clone().flatten()[: part.numel() // size]),
        "gather": lambda: dist.gather(like, [*others, tensor] if rank == 0 else None, 0),
        "scatter": lambda: dist.scatter(tensor, [like, *others] if rank == 0 else None, 0),
        "reduce_scatter": lambda: dist.reduce_scatter(tensor, [like, *others]),
        "reduce_scatter_single": lambda: dist.reduce_scatter_single(tensor, stacked),
        "all_to_all": lambda: dist.all_to_all([*others, tensor], [like, *others]),
        "all_to_all_single": lambda: dist.all_to_all_single(part, part.clone()),
        "recv": lambda: receive(tensor, like, rank, size),
    }


def receive(tensor: Tensor, like: Tensor, rank: int, size: int) -> None:
    work = dist.irecv(tensor, (rank - 1) % size)
    dist.isend(like, (rank + 1) % size)
    work.wait()


def receives(name: str, rank: int, size: int) -> bool:
    return rank == 0 if name in ("reduce", "gather") else name != "broadcast" or rank != size - 1 or size == 1


@pytest.mark.parametrize("kind", ["direct", "staged"])
def test_writes_are_counted(kind: str, rank: int, size: int) -> None:  # trap 27
    """A result that autograd had saved is no longer what it was: backward says so, on the direct and the staged path."""
    wrong = []
    for name in writers(torch.zeros(12, 2), rank, size):
        leaf = torch.ones(12, 2, requires_grad=True)
        tensor = leaf.exp() if kind == "direct" else torch.stack([leaf, leaf]).exp()[0].t().contiguous().t().exp()
        before, place = tensor._version, tensor.data_ptr()
        loss = (tensor * tensor).sum()
        writers(tensor, rank, size)[name]()
        written = tensor._version > before and tensor.data_ptr() == place
        try:
            loss.backward()
            noticed = False
        except RuntimeError as error:
            noticed = "modified by an inplace operation" in str(error)
        expected = receives(name, rank, size) and not (name == "broadcast" and size == 1)
        if (written, noticed) != (expected, expected):
            wrong.append(f"{name}: written {written}, noticed {noticed}, expected {expected}")
    agree(not wrong, wrong)


def test_refused_is_no_write(rank: int, size: int) -> None:
    tensor = torch.ones(3)
    before = tensor._version
    with pytest.raises(TypeError):
        dist.all_reduce(tensor, dist.ReduceOp.BOR)
    with pytest.raises(ValueError, match="src"):
        dist.broadcast(tensor, size)
    agree(tensor._version == before)


def test_expanded_tensors_are_read(rank: int, size: int) -> None:  # trap 28
    row = of_rank(rank, torch.float32, (5,))
    wide = row.expand(4, 5)
    rows = [of_rank(r, torch.float32, (5,)).expand(4, 5).contiguous() for r in range(size)]
    found = [torch.empty(4, 5) for _ in range(size)]
    dist.all_gather(found, wide)
    assert all(map(same, found, rows))
    other = torch.empty(4, 5)
    dist.isend(wide, (rank + 1) % size)
    dist.irecv(other, (rank - 1) % size).wait()
    assert same(other, rows[(rank - 1) % size])
    mine = wide if rank == 0 else torch.empty(4, 5)
    dist.broadcast(mine, 0)
    assert same(mine, rows[0])
    output = torch.empty(4, 5)
    dist.reduce_scatter(output, [wide] * size)
    assert same(output, reduced("SUM", rows))
    dist.scatter(output, [wide] * size if rank == 0 else None, 0)
    assert same(output, rows[0])
    dist.reduce(wide if rank else rows[0].clone(), 0)
    agree(same(row, of_rank(rank, torch.float32, (5,))))


def overlapping() -> dict[str, Tensor]:
    return {
        "expanded": torch.zeros(1, 5).expand(12, 5),
        "windows": torch.zeros(16).unfold(0, 5, 1),
        "as_strided": torch.zeros(40).as_strided((12, 4), (2, 3)),
    }


@pytest.mark.parametrize("kind", ["expanded", "windows", "as_strided"])
def test_shared_memory_is_not_written(kind: str, rank: int, size: int) -> None:  # trap 28
    """Several elements in one place have no one result: refused on every rank, the message says what to do."""
    for name in writers(torch.zeros(12, 5), rank, size):
        tensor = overlapping()[kind]
        call = writers(tensor, rank, size)[name]
        if receives(name, rank, size) and not (name == "broadcast" and size == 1):
            with pytest.raises(ValueError, match=r"share memory, so it cannot be overwritten; pass tensor.contiguous\(\)"):
                call()
        elif size > 1:  # this rank may call it; here it refuses, too
            with pytest.raises(TypeError, match=name):
                getattr(dist, name)(None, *([] if name == "gather" else [0]))
        assert bool((tensor == 0).all())
    total = torch.ones(1)
    dist.all_reduce(total)
    agree(total.item() == size)


def test_interleaved_is_not_shared(rank: int, size: int) -> None:
    """Strides that look as if they overlapped: every element has a place of its own."""
    memory = torch.zeros(11)
    tensor = memory.as_strided((3, 3), (2, 3))  # 0 3 6 / 2 5 8 / 4 7 10
    dist.all_reduce(tensor.fill_(1.0))
    agree(memory.tolist() == [float(size) if i not in (1, 9) else 0.0 for i in range(11)], memory)


def test_leaves_and_inference_tensors(rank: int, size: int) -> None:  # trap 30
    """A leaf stays a leaf without a history; inside and outside inference_mode, sync and async."""
    for async_op in (False, True):
        leaf, outside = torch.nn.Parameter(torch.full((4, 6), float(rank))), torch.ones(2)
        with torch.inference_mode():
            inside = torch.full((4, 6), float(rank))
            works = [dist.all_reduce(tensor, async_op=async_op) for tensor in (inside, outside)]
        works.append(dist.all_reduce(leaf, async_op=async_op))
        for work in works:
            assert (work is None) is not async_op
            assert work is None or work.wait()
        total = torch.full((4, 6), size * (size - 1) / 2)
        right = leaf.is_leaf and leaf.grad_fn is None and leaf.requires_grad and inside.is_inference()
        right = right and same(leaf, total) and same(inside, total) and outside.tolist() == [size, size]
        agree(right, (leaf, inside, outside))


@settings(max_examples=40)
@given(
    shape=st.lists(st.integers(0, 4), max_size=4),
    steps=st.lists(st.integers(1, 3), min_size=4, max_size=4),
    order=st.permutations(range(4)),
    op=st.sampled_from(["SUM", "MAX", "AVG"]),
    turn=st.integers(0, 3),
)
def test_any_strides(rank: int, size: int, shape: list[int], steps: list[int], order: list[int], op: str, turn: int) -> None:
    """Any permutation and step of any shape, another one on each rank: reduced as one process would, gaps untouched.

    The tensor is a view, and the memory that it looks at has the result (traps 27, 28).
    """
    dims = [d for d in [(o + turn * rank) % 4 for o in order] if d < len(shape)]
    wide = torch.full([shape[d] * steps[d] for d in dims], -99.0)
    view = wide[tuple(slice(None, None, steps[d]) for d in dims)].permute([dims.index(d) for d in range(len(shape))])
    parts = [of_rank(r, torch.float32, shape) for r in range(size)]
    gaps = torch.ones_like(wide, dtype=torch.bool)
    gaps[tuple(slice(None, None, steps[d]) for d in dims)] = False
    view.copy_(parts[rank])
    dist.all_reduce(view, getattr(dist.ReduceOp, op))
    inside = wide[tuple(slice(None, None, steps[d]) for d in dims)].permute([dims.index(d) for d in range(len(shape))])
    right = same(view, reduced(op, parts)) and same(inside, view) and bool((wide[gaps] == -99).all())
    agree(right, f"{shape} {steps} {dims}: {view}")

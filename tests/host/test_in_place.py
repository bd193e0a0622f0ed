"""all_reduce of memory that all ranks of a node map: tensors of empty_shared."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import mpicoll as dist
from mpicoll._algorithms import shared_memory
from mpicoll._c10d import torch_world
from tests.support import agree, everyone

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.min_ranks(2), pytest.mark.one_node]
NBYTES = 2_000_016
STEPS = 5
REDUCTIONS = [
    (torch.float32, "SUM"), (torch.float32, "MAX"), (torch.bfloat16, "AVG"),
    (torch.int64, "AVG"), (torch.bool, "SUM"), (torch.complex64, "SUM"),
]  # fmt: skip


@pytest.fixture
def in_place(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each all_reduce in place."""
    took: list[int] = []
    original = shared_memory.all_reduce_in_place

    def counted(window: Any, parts: Any, nbytes: int, *rest: Any) -> None:
        took.append(nbytes)
        original(window, parts, nbytes, *rest)

    monkeypatch.setattr(shared_memory, "all_reduce_in_place", counted)
    return took


def of_rank(rank: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    values = torch.randint(0, 2 if dtype == torch.bool else 100, (NBYTES // dtype.itemsize,), generator=generator)
    return (values / 7).to(dtype) if dtype.is_floating_point or dtype.is_complex else values.to(dtype)


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(("dtype", "op"), REDUCTIONS)
def test_the_result_has_the_same_bits(dtype: torch.dtype, op: str, async_op: bool, in_place: list[int], rank: int) -> None:
    values = of_rank(rank, dtype)
    tensor = dist.empty_shared(values.numel(), dtype=dtype).copy_(values)
    version = tensor._version
    for reduced in (values, tensor):
        work = dist.all_reduce(reduced, getattr(dist.ReduceOp, op), async_op=async_op)
        if work is not None:
            work.wait()
    agree(torch.equal(tensor, values) and in_place == [NBYTES] and tensor._version > version, (in_place, tensor, values))


def test_parts_at_another_place_on_each_rank(in_place: list[int], rank: int, size: int) -> None:
    count = NBYTES // 4
    whole = dist.empty_shared(count + 100 * size).fill_(-1)
    part = whole[100 * rank : 100 * rank + count]
    for turn in range(3):
        part.fill_(rank + turn)
        dist.all_reduce(part)
        outside = torch.cat([whole[: 100 * rank], whole[100 * rank + count :]])
        expected = size * (size - 1) / 2 + turn * size
        agree(bool((part == expected).all() and (outside == -1).all()), f"turn {turn}: {part}, {outside}")
    agree(in_place == [4 * count] * 3, in_place)


def plain(tensor: Tensor) -> Tensor:
    return tensor.clone()


def moved(tensor: Tensor) -> Tensor:
    return tensor.share_memory_()


@pytest.mark.parametrize("other", [plain, moved])
@pytest.mark.parametrize("where", ["first rank", "last rank", "every rank"])
def test_other_memory_is_reduced_too(
    where: str, other: Callable[[Tensor], Tensor], in_place: list[int], rank: int, size: int
) -> None:
    tensor = dist.empty_shared(NBYTES // 4).fill_(rank + 1)
    if where == "every rank" or rank == {"first rank": 0, "last rank": size - 1}[where]:
        tensor = other(tensor)
    dist.all_reduce(tensor)
    agree(bool((tensor == size * (size + 1) / 2).all()) and not in_place, (tensor, in_place))


def test_two_tensors_that_the_ranks_mix_up(in_place: list[int], rank: int, size: int) -> None:
    tensors = [dist.empty_shared(NBYTES // 4).fill_(value) for value in (1, 2)]
    dist.all_reduce(tensors[rank == 0])
    agree(bool((tensors[rank == 0] == size + 1).all()) and not in_place, (tensors, in_place))
    agree(bool((tensors[rank != 0] == 1 + (rank != 0)).all()), tensors)


def test_a_tensor_belongs_to_its_group(in_place: list[int], rank: int, size: int) -> None:
    """Other groups reduce it, too."""
    group = dist.new_group(list(range(2)))
    tensor = torch.ones(NBYTES // 4)
    if rank < 2:
        tensor = dist.empty_shared(NBYTES // 4, group=group).fill_(1)
        dist.all_reduce(tensor, group=group)
    counts = everyone(len(in_place))
    dist.all_reduce(tensor)
    agree(counts == [1, 1] + [0] * (size - 2) and bool((tensor == size + 2).all()), (counts, tensor))
    agree(len(in_place) == counts[rank], in_place)


def test_memory_goes_with_the_tensor(rank: int) -> None:
    mapped = torch_world.communicator("test", None).host.storages._mapped
    gc.collect()
    before, tensor = len(mapped), dist.empty_shared(NBYTES // 4)
    view = tensor[10:]
    del tensor
    agree(len(mapped) == before + 1)
    del view
    gc.collect()
    agree(len(mapped) == before, list(mapped.items()))

"""Every operation x dtype x layout on a GPU's tensors, through both doors, against what one process computes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor

import mpicoll
from mpicoll._api import groups
from tests.support import agree
from tests.support.tensors import MOVABLE, bits_of_rank, layouts, of_rank, raw, reduced, same
from tests.tensors.test_reductions import CASES, FACTOR, op_of

pytestmark = [
    pytest.mark.usefixtures("world"),
    pytest.mark.filterwarnings("ignore:B?Complex(Half|32)"),
    pytest.mark.timeout(300),
]
COUNTS = (1, 1000, (1 << 20) + 3)  # elements: what goes at once, what is packed, what goes by chunks


@pytest.fixture(params=["door 1", "door 2"])
def dist(request: pytest.FixtureRequest) -> Any:
    return mpicoll if request.param == "door 1" else torch.distributed


def possible(dist: Any, dtype: torch.dtype) -> dict[str, Any]:
    """The layouts; torch's own functions refuse conjugated views."""
    return {name: layout for name, layout in layouts(dtype).items() if dist is mpicoll or "conj" not in name}


def laid_out(values: Tensor, layout: Callable[[Tensor], Tensor], device: torch.device) -> Tensor:
    return layout(values.to(device))


def unlike(came: Tensor, expected: Tensor) -> bool:
    return not same(came.detach().cpu(), expected)


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_all_reduce(dist: Any, async_op: bool, device: torch.device, rank: int, size: int) -> None:
    wrong = []
    for dtype, op in CASES:
        for name, (shape, layout) in possible(dist, dtype).items():
            given = [of_rank(r, dtype, shape) for r in range(size)]
            mine = laid_out(given[rank], layout, device)
            work = dist.all_reduce(mine, op_of(op), async_op=async_op)
            if async_op:
                work.wait()
            if unlike(mine, reduced(op, given, FACTOR)):
                wrong.append((dtype, op, name))
    agree(not wrong, wrong[:5])


@pytest.mark.parametrize("count", COUNTS)
def test_large_ones(dist: Any, count: int, device: torch.device, rank: int, size: int) -> None:
    wrong = []
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        given = [of_rank(r, dtype, (count,)) for r in range(size)]
        mine = given[rank].to(device, copy=True)
        dist.all_reduce(mine)
        wrong += [f"all_reduce {dtype}"] * unlike(mine, reduced("SUM", given, FACTOR))
        output = torch.empty(count * size, dtype=dtype, device=device)
        dist.all_gather_into_tensor(output, given[rank].to(device))
        wrong += [f"all_gather {dtype}"] * unlike(output, torch.cat(given))
        shares = [of_rank(r, dtype, (count * size,)) for r in range(size)]
        output = torch.empty(count, dtype=dtype, device=device)
        dist.reduce_scatter_tensor(output, shares[rank].to(device))
        wrong += [f"reduce_scatter {dtype}"] * unlike(output, reduced("SUM", shares, FACTOR).view(size, count)[rank])
    agree(not wrong, wrong)


Move = Callable[[Any, Callable[[int], Tensor], int, int], "tuple[Tensor, Tensor]"]


def broadcast(dist: Any, make: Callable[[int], Tensor], rank: int, size: int) -> tuple[Tensor, Tensor]:
    x = make(rank)
    dist.broadcast(x, size - 1)
    return x, make(size - 1)


def all_gather(dist: Any, make: Callable[[int], Tensor], rank: int, size: int) -> tuple[Tensor, Tensor]:
    outputs = [make(9) for _ in range(size)]
    dist.all_gather(outputs, make(rank))
    return torch.stack([x.detach().resolve_conj() for x in outputs]), torch.stack([make(r).detach() for r in range(size)])


def gather(dist: Any, make: Callable[[int], Tensor], rank: int, size: int) -> tuple[Tensor, Tensor]:
    outputs = [make(9) for _ in range(size)]
    dist.gather(make(rank), outputs if rank == 0 else None, 0)
    expected = [make(r if rank == 0 else 9).detach() for r in range(size)]
    return torch.stack([x.detach().resolve_conj() for x in outputs]), torch.stack(expected)


def scatter(dist: Any, make: Callable[[int], Tensor], rank: int, size: int) -> tuple[Tensor, Tensor]:
    x = make(9)
    dist.scatter(x, [make(r) for r in range(size)] if rank == 0 else None, 0)
    return x, make(rank)


def all_to_all(dist: Any, make: Callable[[int], Tensor], rank: int, size: int) -> tuple[Tensor, Tensor]:
    outputs = [make(9) for _ in range(size)]
    dist.all_to_all(outputs, [make(10 * rank + r) for r in range(size)])
    expected = [make(10 * r + rank).detach() for r in range(size)]
    return torch.stack([x.detach().resolve_conj() for x in outputs]), torch.stack(expected)


def ring(dist: Any, make: Callable[[int], Tensor], rank: int, size: int) -> tuple[Tensor, Tensor]:
    x = make(9)
    request = dist.irecv(x, (rank - 1) % size)
    dist.send(make(rank), (rank + 1) % size)
    request.wait()
    return x, make((rank - 1) % size)


@pytest.mark.parametrize("move", [broadcast, all_gather, gather, scatter, all_to_all, ring], ids=lambda move: move.__name__)
def test_moves(dist: Any, move: Move, device: torch.device, rank: int, size: int) -> None:
    """Any bits, NaNs of all kinds among them."""
    wrong = []
    for dtype in MOVABLE:
        for name, (shape, layout) in possible(dist, dtype).items():
            if "inference" in name and move is not broadcast:
                continue  # torch.stack of them, in this test, is what fails

            def make(r: int, dtype: Any = dtype, shape: Any = shape, layout: Any = layout) -> Tensor:
                return laid_out(bits_of_rank(r, dtype, shape), layout, device)

            came, expected = move(dist, make, rank, size)
            if raw(came.cpu()) != raw(expected.cpu()):
                wrong.append((dtype, name))
    agree(not wrong, wrong[:5])


def test_objects(dist: Any, device: torch.device, rank: int, size: int) -> None:
    """With a GPU's tensor, a CPU's and none in them."""
    found: list[Any] = [None] * size
    dist.all_gather_object(found, {"on gpu": torch.full((3,), rank + 1.0, device=device), "on cpu": torch.ones(2), "rank": rank})
    right = all(
        it["rank"] == r and it["on gpu"].device.type == device.type and it["on gpu"].eq(r + 1).all() for r, it in enumerate(found)
    )
    agree(right, found)


def test_futures(dist: Any, device: torch.device, rank: int, size: int) -> None:
    """A callback sees the result; torch refuses a value on a device that the Future does not know."""
    x = torch.full((1 << 16,), float(rank), device=device)
    future = dist.all_reduce(x, async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2).wait()
    agree(doubled.cpu().eq(size * (size - 1)).all(), doubled[:3])


def test_the_way_that_was_asked_for_is_taken(request: pytest.FixtureRequest, device: torch.device, rank: int, size: int) -> None:
    """By collectives and by messages; a way that could not be had would otherwise pass as the one that was asked for."""
    way = request.config.getoption("--way")
    if way is None or device.type != "cuda":
        pytest.skip("--way names one, of a GPU")
    x = torch.ones(1 << 20, device=device)
    mpicoll.all_reduce(x)
    request_ = mpicoll.irecv(torch.empty_like(x), (rank - 1) % size)
    mpicoll.send(x, (rank + 1) % size)
    assert request_ is not None
    request_.wait()
    group = groups.of(None)
    assert group is not None
    assert group.devices is not None
    collectives, messages = group.devices.taken, group.devices.messages.taken
    agree(collectives[way] > 0 and messages[way] > 0, (collectives, messages))

"""What the collectives of torch.distributed return, and what is special, through init_process_group("mpi").

Their results, of all dtypes, operations, layouts and groups, are compared by tests/behaviour/test_random_operations.py.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from tests.support import agree
from tests.support.torch_backend import NEW_NAMES, both, ended, of_rank, same


@pytest.fixture(autouse=True)
def mpi_world(_end_of_world: None) -> None:
    if not dist.is_initialized():
        dist.init_process_group("mpi")


@contextlib.contextmanager
def _ignored() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


GATHER = dist.all_gather_single if NEW_NAMES else dist.all_gather_into_tensor
SCATTER = dist.reduce_scatter_single if NEW_NAMES else dist.reduce_scatter_tensor


def collectives(rank: int, size: int) -> dict[str, tuple[Callable[..., Any], Any, Any]]:
    """For each collective: the call, the tensors that it changes on this rank, and what they hold then."""
    everybody = [of_rank(r, 2, 3) for r in range(size)]
    total, last = sum(everybody), size - 1
    mine, one = of_rank(rank, 2, 3), torch.full((2, 3), -1.0)
    blocks = [torch.full((2, 3), -1.0) for _ in range(size)]
    flat, stacked = torch.full((2 * size, 3), -1.0), torch.full((size, 2, 3), -1.0)
    on_last = (blocks, everybody) if rank == last else ([], [])
    found: dict[str, tuple[Callable[..., Any], Any, Any]] = {
        "all_reduce": (lambda **how: dist.all_reduce(mine, **how), [mine], [total]),
        "broadcast": (lambda **how: dist.broadcast(mine, last, **how), [mine], [everybody[last]]),
        "reduce": (lambda **how: dist.reduce(mine, last, **how), [mine], [total if rank == last else everybody[rank]]),
        "all_gather": (lambda **how: dist.all_gather(blocks, mine, **how), blocks, everybody),
        "all_gather_single": (lambda **how: GATHER(flat, mine, **how), [flat], [torch.cat(everybody)]),
        "all_gather_single, stacked": (lambda **how: GATHER(stacked, mine, **how), [stacked], [torch.stack(everybody)]),
        "gather": (lambda **how: dist.gather(mine, blocks if rank == last else None, last, **how), *on_last),
        "scatter": (lambda **how: dist.scatter(one, everybody if rank == last else None, last, **how), [one], [mine]),
        "reduce_scatter": (lambda **how: dist.reduce_scatter(one, [mine] * size, **how), [one], [total]),
        "reduce_scatter_single": (lambda **how: SCATTER(one, torch.cat([mine] * size), **how), [one], [total]),
        "all_to_all": (lambda **how: dist.all_to_all(blocks, [mine] * size, **how), blocks, everybody),
        "all_to_all_single": (
            lambda **how: dist.all_to_all_single(flat, torch.cat([mine] * size), **how),
            [flat],
            [torch.cat(everybody)],
        ),
        "barrier": (lambda **how: dist.barrier(**how), [], []),
        "barrier of devices": (lambda **how: dist.barrier(device_ids=[0], **how), [], []),  # trap 8
    }
    if "timeout" in inspect.signature(dist.barrier).parameters:
        found["barrier with a timeout"] = (lambda **how: dist.barrier(timeout=timedelta(seconds=20), **how), [], [])
    if hasattr(dist, "gather_single"):  # torch >= 2.14
        output, expected = ([flat], [torch.cat(everybody)]) if rank == last else ([], [])
        root_only = flat if rank == last else None
        found["gather_single"] = (lambda **how: dist.gather_single(mine, root_only, dst=last, **how), output, expected)
    return found


@both
def test_collectives(async_op: bool, rank: int, size: int) -> None:
    """None, or a Work that ends (trap 1); and the tensors of other ranks are left alone (trap 26)."""
    wrong = []
    for name in collectives(rank, size):
        call, outputs, expected = collectives(rank, size)[name]
        addresses = [tensor.data_ptr() for tensor in outputs]
        done = ended(call(async_op=async_op), async_op)
        kept = addresses == [tensor.data_ptr() for tensor in outputs]
        if not (done and kept and all(map(same, outputs, expected))):
            wrong.append((name, done, outputs))
    agree(not wrong, wrong)


@both
def test_coalesced_collectives(async_op: bool, rank: int, size: int) -> None:
    """trap 4: a Future, not a Work."""
    tensors = [of_rank(rank, 3), of_rank(rank, 2, 2)]
    outputs = [[torch.full((2,), -1.0), torch.full((3, 2), -1.0)] for _ in range(size)]
    answers = []
    for function, arguments in (
        (dist.all_reduce_coalesced, (tensors,)),
        (dist.all_gather_coalesced, (outputs, [of_rank(rank, 2), of_rank(rank, 3, 2)])),
    ):
        with pytest.warns(FutureWarning) if hasattr(function, "__deprecated__") else contextlib.nullcontext():
            answers.append(function(*arguments, async_op=async_op))
    for answer in answers:
        assert isinstance(answer, torch.futures.Future) if async_op else answer is None
        if async_op:
            answer.wait()
    reduced = [sum(of_rank(r, 3) for r in range(size)), sum(of_rank(r, 2, 2) for r in range(size))]
    gathered = all(same(a, of_rank(r, 2)) and same(b, of_rank(r, 3, 2)) for r, (a, b) in enumerate(outputs))
    agree(all(map(same, tensors, reduced)) and gathered, (tensors, outputs))


def test_premultiplied_sum(rank: int, size: int) -> None:
    """PREMUL_SUM travels as an object with a factor, not as a name (traps 3 and 33a: FSDP2 uses it)."""
    mine = of_rank(rank, 5)
    dist.all_reduce(mine, dist._make_nccl_premul_sum(0.5))
    agree(torch.allclose(mine, sum(of_rank(r, 5) * 0.5 for r in range(size))), mine)


def test_strided_all_reduce_is_in_place(rank: int, size: int) -> None:
    """trap 28: a strided view is reduced where it lies, and its neighbours stay."""
    whole = of_rank(rank, 4, 6)
    dist.all_reduce(whole[:, ::2])
    expected = of_rank(rank, 4, 6)
    expected[:, ::2] = sum(of_rank(r, 4, 6) for r in range(size))[:, ::2]
    agree(same(whole, expected), whole)


def test_refusals_come_before_any_byte(rank: int, size: int) -> None:
    """traps 3, 5, 7, 22, 25: on every rank alike, so that nobody waits."""
    one, several = torch.ones(1), [torch.empty(1) for _ in range(size)]
    given: list[Tensor] | None = None if rank == 0 else several  # the list is missing on the root, and given elsewhere
    for error, words, call in (
        (TypeError, None, lambda: dist.all_reduce(torch.ones(3, dtype=torch.bool), dist.ReduceOp.AVG)),
        (TypeError, None, lambda: dist.all_reduce(one, dist.ReduceOp.BAND)),
        ((TypeError, ValueError), None, lambda: dist.all_reduce(one, "sum")),
        (ValueError, "rank", lambda: dist.broadcast(one)),
        (ValueError, "rank", lambda: dist.broadcast(one, src=0, group_src=0)),
        (ValueError, "gather_list", lambda: dist.gather(one, given, dst=0)),
        (ValueError, "scatter_list", lambda: dist.scatter(one, given, src=0)),
    ):
        with pytest.raises(error, match=words):
            call()
    dist.broadcast(one, group_src=size - 1)
    agree(True)


def test_old_names_of_the_flat_collectives(rank: int, size: int) -> None:
    with _ignored():
        output = torch.empty(size * 2)
        dist.all_gather_into_tensor(output, of_rank(rank, 2))
        mine = torch.empty(2)
        dist.reduce_scatter_tensor(mine, output)
        c10d._all_gather_base(output, of_rank(rank, 2))
        c10d._reduce_scatter_base(mine, output)
    agree(same(mine, of_rank(rank, 2) * size), mine)


def test_all_gather_single_in_place(rank: int, size: int) -> None:
    """trap 35: FSDP hands in a slice of the output."""
    output = torch.full((size, 4), -1.0)
    output[rank] = of_rank(rank, 4)
    GATHER(output.view(-1), output[rank])
    agree(same(output, torch.stack([of_rank(r, 4) for r in range(size)])), output)


def test_monitored_barrier(rank: int) -> None:
    """trap 61: torch <= 2.13 lets it through for gloo only; from 2.14 on it reaches us."""
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14):
        dist.monitored_barrier(timeout=timedelta(seconds=20))
    else:
        with pytest.raises(ValueError, match="GLOO"):
            dist.monitored_barrier()
        dist.group.WORLD.monitored_barrier(timedelta(seconds=20))  # type: ignore[union-attr]
    agree(True)


def test_coalescing_manager(rank: int, size: int) -> None:
    """trap 47: several calls arrive as one coalesced call; other calls between start and end."""
    reduced = [of_rank(rank, 3), of_rank(rank, 4)]
    with c10d._coalescing_manager():
        for tensor in reduced:
            dist.all_reduce(tensor)
    outputs = [torch.empty(size * 2), torch.empty(size)]
    with c10d._coalescing_manager(async_ops=True) as manager:
        for output, k in zip(outputs, (2, 1), strict=True):
            GATHER(output, of_rank(rank, k))
    manager.wait()
    pieces = [torch.empty(2), torch.empty(1)]
    with c10d._coalescing_manager():
        for piece, k in zip(pieces, (2, 1), strict=True):
            SCATTER(piece, of_rank(rank, size * k))
    plain = of_rank(rank, 2)
    with c10d._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        dist.broadcast(plain, 0, async_op=True)
    manager.wait()
    agree(
        all(same(t, sum(of_rank(r, k) for r in range(size))) for t, k in zip(reduced, (3, 4), strict=True))
        and all(same(t, torch.cat([of_rank(r, k) for r in range(size)])) for t, k in zip(outputs, (2, 1), strict=True))
        and all(
            same(t, sum(of_rank(r, size * k) for r in range(size))[rank * k : (rank + 1) * k])
            for t, k in zip(pieces, (2, 1), strict=True)
        )
        and same(plain, of_rank(0, 2)),
        (reduced, outputs, pieces, plain),
    )

"""What the collectives of both doors return, and what is special at torch's, through init_process_group("mpi").

Their results, of all dtypes, operations, layouts and groups, are compared by tests/behaviour/test_random_operations.py.
"""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from mpicoll._c10d import operations
from mpicoll._tensors.reductions import OPS
from tests.support import agree
from tests.support.doors import collectives, doors
from tests.support.torch_backend import NEW_NAMES, both, of_rank, same

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.filterwarnings("ignore:.*deprecated.*:FutureWarning")]

GATHER = dist.all_gather_single if NEW_NAMES else dist.all_gather_into_tensor
SCATTER = dist.reduce_scatter_single if NEW_NAMES else dist.reduce_scatter_tensor


def ended(answer: Any, async_op: bool, coalesced: bool) -> bool:
    """Whether the call returned what torch promises: None, a Work that ends, or a Future (traps 1, 4, 6)."""
    if not async_op:
        return answer is None
    if coalesced:
        return isinstance(answer, torch.futures.Future) and answer.wait() is not None
    return isinstance(answer, dist.Work) and (answer.wait(), answer.wait(), answer.is_completed()) == (True, True, True)


@doors
@both
def test_collectives(async_op: bool, door: Any, rank: int, size: int) -> None:
    """The tensors of other ranks are left alone (trap 26)."""
    wrong = []
    for name in collectives(door, rank, size, root=size - 1):
        start, outputs, expected = collectives(door, rank, size, root=size - 1)[name]
        addresses = [tensor.data_ptr() for tensor in outputs]
        done = ended(start(async_op=async_op), async_op, "coalesced" in name)
        kept = addresses == [tensor.data_ptr() for tensor in outputs]
        if not (done and kept and all(map(same, outputs, expected))):
            wrong.append((name, done, outputs))
    agree(not wrong, wrong)


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


@pytest.mark.parametrize("name", OPS)
def test_an_operation_of_torch_becomes_the_key_of_our_tables(name: str) -> None:
    """The key itself, and not an equal object: the engine compares by identity. PREMUL_SUM keeps its factor."""
    options = dist.AllreduceOptions()
    options.reduceOp = dist._make_nccl_premul_sum(2.0) if name == "PREMUL_SUM" else dist.ReduceOp(OPS[name])
    kind, _ = operations._how(options)
    assert kind is OPS[name] if name != "PREMUL_SUM" else (kind == OPS[name] and "2.0" in str(kind.__getstate__()))

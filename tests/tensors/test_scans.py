"""scan and exscan: the reduction of the ranks up to this one, for each dtype and reduction."""

from __future__ import annotations

import pytest
import torch
from torch.distributed import ReduceOp

import mpicoll as dist
from mpicoll._algorithms import native
from tests.support import agree
from tests.support.tensors import layouts, of_rank, reduced
from tests.tensors.test_reductions import CASES, FACTOR, Verdict, contributions, op_of

pytestmark = pytest.mark.usefixtures("world")


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("exclusive", [False, True], ids=["scan", "exscan"])
def test_every_reduction(exclusive: bool, async_op: bool, rank: int, size: int) -> None:
    """Each layout, each dtype, each op; in place; counted as a write. Rank 0 of exscan keeps every bit."""
    verdict, function = Verdict(), dist.exscan if exclusive else dist.scan
    for dtype, op in CASES:
        for name, (shape, layout) in layouts(dtype).items():
            given = contributions(dtype, shape, size)
            mine = layout(given[rank])
            before = None if mine.is_inference() else mine._version
            place = (mine.data_ptr(), mine.stride())
            work = function(mine, op_of(op), async_op=async_op)
            assert (work is not None and work.wait()) if async_op else work is None
            before_here = given[: rank + (not exclusive)]
            expected = reduced(op, before_here, FACTOR) if before_here else given[0]
            verdict.check((dtype, op, name), mine, expected, shared=False)
            assert place == (mine.data_ptr(), mine.stride())
            assert before is None or mine._version > before, (dtype, op, name)
    verdict.agree()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("exclusive", [False, True], ids=["scan", "exscan"])
def test_large_ones_go_in_chunks(
    exclusive: bool, dtype: torch.dtype, rank: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "CHUNK", 1000)  # elements
    given = [of_rank(r, dtype, (3501,)) for r in range(size)]
    mine = given[rank].clone()
    (dist.exscan if exclusive else dist.scan)(mine)
    before_here = given[: rank + (not exclusive)]
    expected = reduced("SUM", before_here) if before_here else given[0]
    agree(torch.equal(mine, expected), (mine, expected))


def test_empty_tensors_and_no_dimension(rank: int) -> None:
    empty, number = torch.zeros(0, 3), torch.tensor(rank)
    dist.scan(empty)
    dist.scan(number)
    agree(empty.shape == (0, 3) and number == rank * (rank + 1) // 2, number)


def test_the_order_is_that_of_the_group(rank: int, size: int) -> None:
    members = list(range(1, size)) or [0]
    group = dist.new_group(members)
    number = torch.tensor(1)
    if rank in members:
        dist.scan(number, group=group)
        agree(number == members.index(rank) + 1, number)
    else:
        with pytest.warns(UserWarning, match="scan"):
            dist.scan(number, group=group)
        agree(number == 1)


def test_what_has_no_answer_is_refused() -> None:
    with pytest.raises(dist.UnsupportedReduction, match=r"scan: AVG on torch\.bool"):
        dist.scan(torch.ones(2, dtype=torch.bool), ReduceOp.AVG)
    with pytest.raises(ValueError, match=r"exscan: .*sparse"):
        dist.exscan(torch.ones(2).to_sparse())
    with pytest.raises(TypeError, match="exscan"):
        dist.exscan([1.0])
    dist.barrier()


def test_other_backends_have_none() -> None:
    gloo = dist.new_group(backend="gloo")
    with pytest.raises(ValueError, match="scan: the group's backend is 'gloo'"):
        dist.scan(torch.ones(1), group=gloo)
    dist.destroy_process_group(gloo)


def test_torch_compile_breaks_its_graph_there(rank: int) -> None:
    @torch.compile(backend="eager")
    def function(x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        dist.scan(x)
        return x + 1

    agree(function(torch.ones(2)).tolist() == [2.0 * (rank + 1) + 1] * 2)

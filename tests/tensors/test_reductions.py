"""Every dtype x every reduction x every memory layout, against what one process computes; what has no right answer is
refused on every rank before a byte moves."""

import hashlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed import ReduceOp

import mpicoll as dist
from mpicoll._tensors import reductions
from tests.support import agree, everyone
from tests.support.tensors import COMPLEX, EVERY_DTYPE, FLOATS, INTEGERS, layouts, of_rank, raw, reduced, same

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.filterwarnings("ignore:B?Complex(Half|32)")]
FACTOR = 0.5

# What has a right answer, written down a second time: an entry that comes or goes must come or go here too.
BITS = ("BAND", "BOR", "BXOR")
LEGAL = {
    torch.bool: ("SUM", "PRODUCT", "MIN", "MAX", *BITS),
    **dict.fromkeys(INTEGERS, ("SUM", "AVG", "PRODUCT", "MIN", "MAX", *BITS)),
    **dict.fromkeys(FLOATS, ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "PREMUL_SUM")),
    **dict.fromkeys(COMPLEX, ("SUM", "AVG", "PREMUL_SUM")),
}
CASES = [(dtype, op) for dtype, ops in LEGAL.items() for op in ops]


def op_of(name: str, dtype: torch.dtype = torch.float32) -> ReduceOp:
    return dist._make_nccl_premul_sum(FACTOR) if name == "PREMUL_SUM" else getattr(ReduceOp, name)


class Verdict:
    """Collects what was wrong in a long loop, and the bits of all results, for one ``agree`` at its end."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.digest = hashlib.sha256()

    def check(self, case: object, result: Tensor, expected: Tensor, shared: bool = True) -> None:
        """``shared``: every rank has this result, so its bits must be the same everywhere."""
        if shared:
            self.digest.update(raw(result))
        if not same(result, expected):
            self.wrong.append(f"{case}: {result.detach().tolist()} is not {expected.tolist()}")

    def agree(self) -> None:
        digests = everyone(self.digest.hexdigest())
        agree(not self.wrong, "\n".join(self.wrong[:5]))
        agree(len(set(digests)) == 1, "the ranks have different bits")


def test_the_table_is_what_is_tested_here() -> None:
    assert set(reductions.TABLE) == {(dtype, reductions.OPS[op]) for dtype, op in CASES}
    assert set(reductions.OPS.values()) == set(ReduceOp.RedOpType.__members__.values()) - {
        getattr(ReduceOp.RedOpType, "UNUSED", None)
    }


def contributions(dtype: torch.dtype, shape: tuple[int, ...], size: int, salt: int = 0) -> list[Tensor]:
    return [of_rank(r, dtype, shape, salt) for r in range(size)]


class Case(NamedTuple):
    number: int  # of dtype and op, for what only has to vary
    dtype: torch.dtype
    op: str
    name: str  # of the layout
    shape: tuple[int, ...]
    layout: Callable[[Tensor], Tensor]

    @property
    def async_op(self) -> bool:
        return self.number % 2 == 0

    def contributions(self, size: int) -> list[Tensor]:
        return contributions(self.dtype, self.shape, size)


def cases() -> Iterator[Case]:
    """Each dtype, each op, each layout."""
    for number, (dtype, op) in enumerate(CASES):
        for name, (shape, layout) in layouts(dtype).items():
            yield Case(number, dtype, op, name, shape, layout)


def ended(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", ["all_reduce", "scan", "exscan"])
def test_in_place(name: str, async_op: bool, rank: int, size: int) -> None:
    """traps 22-25, 27-32: bits equal on all ranks; in place; counted as a write. Rank 0 of exscan keeps every bit."""
    verdict, until = Verdict(), {"all_reduce": size, "scan": rank + 1, "exscan": rank}[name]
    for case in cases():
        given = case.contributions(size)
        mine = case.layout(given[rank])
        before = None if mine.is_inference() else mine._version
        place = (mine.data_ptr(), mine.stride())
        work = getattr(dist, name)(mine, op_of(case.op), async_op=async_op)
        assert isinstance(work, dist.Work) and work.wait() if async_op else work is None  # trap 1
        expected = reduced(case.op, given[:until], FACTOR) if until else given[0]
        verdict.check(case, mine, expected, shared=name == "all_reduce")
        assert place == (mine.data_ptr(), mine.stride())
        assert before is None or mine._version > before, case
    verdict.agree()


def test_reduce(rank: int, size: int) -> None:
    """trap 26: every rank is dst in turn; the others keep every bit of theirs."""
    verdict = Verdict()
    for case in cases():
        dst = case.number % size
        given = case.contributions(size)
        mine = case.layout(given[rank])
        ended(dist.reduce(mine, dst, op_of(case.op), async_op=case.async_op))
        expected = reduced(case.op, given, FACTOR) if rank == dst else given[rank]
        verdict.check((case, dst), mine, expected, shared=False)
    verdict.agree()


def test_reduce_scatter(rank: int, size: int) -> None:
    """trap 38: rank i's block has i more rows than rank 0's; inputs and output in every layout."""
    verdict = Verdict()
    for case in cases():
        shapes = [(case.shape[0] + r, *case.shape[1:]) if case.shape else () for r in range(size)]
        inputs = [[of_rank(source, case.dtype, shapes[r], salt=r) for r in range(size)] for source in range(size)]
        output = case.layout(torch.zeros(shapes[rank], dtype=case.dtype))
        mine = [case.layout(tensor) for tensor in inputs[rank]]
        ended(dist.reduce_scatter(output, mine, op_of(case.op), async_op=case.async_op))
        expected = reduced(case.op, [inputs[source][rank] for source in range(size)], FACTOR)
        verdict.check(case, output, expected, shared=False)
        for tensor, was in zip(mine, inputs[rank], strict=True):
            verdict.check((case, "input"), tensor, was, shared=False)
    verdict.agree()


@pytest.mark.parametrize("form", ["concat", "stack"])
def test_reduce_scatter_single(form: str, rank: int, size: int) -> None:
    """traps 33a, 35, 36: both forms of the input, AVG and PREMUL_SUM among the ops."""
    verdict = Verdict()
    for case in cases():
        shape = case.shape
        whole = (size, *shape) if form == "stack" or not shape else (size * shape[0], *shape[1:])
        given = contributions(case.dtype, whole, size)
        mine, output = given[rank].clone(), case.layout(torch.zeros(shape, dtype=case.dtype))
        if case.name == "strided":
            mine = case.layout(mine)
        ended(dist.reduce_scatter_single(output, mine, op_of(case.op), async_op=case.async_op))
        blocks = [tensor.view(size, *shape)[rank].contiguous() for tensor in given]
        verdict.check(case, output, reduced(case.op, blocks, FACTOR), shared=False)
        verdict.check((case, "input"), mine, given[rank], shared=False)
    verdict.agree()


def test_reduce_scatter_single_into_a_slice_of_its_input(rank: int, size: int) -> None:
    """trap 36: as FSDP does it."""
    verdict = Verdict()
    for dtype, op in [(torch.float32, "SUM"), (torch.float32, "AVG"), (torch.bfloat16, "AVG"), (torch.int64, "MAX")]:
        given = contributions(dtype, (size, 5), size)
        mine = given[rank].clone()
        dist.reduce_scatter_single(mine[rank], mine, op_of(op))
        verdict.check((dtype, op), mine[rank], reduced(op, [tensor[rank] for tensor in given]), shared=False)
        others = torch.arange(size) != rank
        verdict.check((dtype, op, "rest"), mine[others], given[rank][others], shared=False)
    verdict.agree()


def test_coalesced(rank: int, size: int) -> None:
    """trap 4: a Future, not a Work; one op for tensors of any layout."""
    verdict = Verdict()
    for async_op in (False, True):
        names = {name: kind for name, kind in layouts(torch.float32).items() if name != "inference"}
        given = {name: contributions(torch.float32, shape, size) for name, (shape, _) in names.items()}
        mine = [layout(given[name][rank]) for name, (_, layout) in names.items()]
        answer = dist.all_reduce_coalesced(mine, ReduceOp.AVG, async_op=async_op)
        if async_op:
            assert isinstance(answer, torch.futures.Future)
            assert all(a is b for a, b in zip(answer.wait(), mine, strict=True))
        else:
            assert answer is None
        for name, tensor in zip(names, mine, strict=True):
            verdict.check(name, tensor, reduced("AVG", given[name]))
    verdict.agree()


@pytest.mark.parametrize("async_op", [False, True])
def test_many_small_and_large_tensors_of_several_dtypes_as_one(async_op: bool, rank: int, size: int) -> None:
    """Small ones of one dtype travel packed; each ends where it was, whatever its layout."""
    verdict = Verdict()
    shapes = [(3,), (), (20_000,), (0,), (7, 5), (1,), (40_000,)]
    dtypes = [torch.float32, torch.int64, torch.bfloat16, torch.float32]
    given = [contributions(dtype, shape, size) for shape in shapes for dtype in dtypes]
    mine = [of_all[rank].clone() for of_all in given]
    # another layout on rank 0 only: the order in which they are packed must not depend on it
    mine = [tensor.t().contiguous().t() if tensor.dim() == 2 and rank == 0 else tensor for tensor in mine]
    answer = dist.all_reduce_coalesced(mine, ReduceOp.SUM, async_op=async_op)
    if answer is not None:
        answer.wait()
    for index, (tensor, of_all) in enumerate(zip(mine, given, strict=True)):
        verdict.check(index, tensor, reduced("SUM", of_all))
    verdict.agree()


# -- refused -----------------------------------------------------------------------------------------------------------


def tensor_of(dtype: torch.dtype) -> Tensor | None:
    """A tensor of any dtype at all; None where this torch cannot make one."""
    try:
        return torch.zeros(16 * max(dtype.itemsize, 1), dtype=torch.uint8).view(dtype)
    except (RuntimeError, TypeError):
        return None


def calls(tensor: Tensor, op: object, rank: int, size: int) -> dict[str, Callable[[], object]]:
    return {
        "all_reduce": lambda: dist.all_reduce(tensor, op),
        "scan": lambda: dist.scan(tensor, op),
        "exscan": lambda: dist.exscan(tensor, op),
        "reduce": lambda: dist.reduce(tensor, 0, op),
        "reduce_scatter": lambda: dist.reduce_scatter(tensor, [tensor] * size, op),
        "reduce_scatter_single": lambda: dist.reduce_scatter_single(tensor[: 16 // size], tensor[: 16 // size * size], op),
        "all_reduce_coalesced": lambda: dist.all_reduce_coalesced([tensor], op),
    }


def test_what_has_no_right_answer_is_refused(rank: int, size: int) -> None:
    """traps 22, 25: every dtype of this torch either reduces or is refused, alike on all ranks; the group still works."""
    wrong, refused = [], 0
    for dtype in EVERY_DTYPE:
        tensor = tensor_of(dtype)
        if tensor is None:
            continue
        for op in reductions.OPS:
            if op in LEGAL.get(dtype, ()):
                continue
            before = raw(tensor)
            for name, call in calls(tensor, op_of(op), rank, size).items():
                try:
                    call()
                    wrong.append(f"{name} of {dtype} by {op} was not refused")
                except TypeError as error:
                    refused += 1
                    told = str(dtype) in str(error) and name in str(error)
                    if not told or not (isinstance(error, ValueError) or "quantized" in str(error)):
                        wrong.append(f"{name} of {dtype} by {op}: {error!r}")
            assert raw(tensor) == before
    survivor = torch.ones(3)
    dist.all_reduce(survivor)
    agree(not wrong and refused > 100 and same(survivor, torch.full((3,), float(size))), "\n".join(wrong[:10]))


def test_op_must_be_a_reduce_op(rank: int, size: int) -> None:
    """trap 3: not a string, not a number, nothing unhashable."""
    for op in ("sum", "SUM", 0, None, [], torch.ones(1), max):
        for name, call in calls(torch.ones(16), op, rank, size).items():
            with pytest.raises(TypeError, match=f"{name}: op must be a torch.distributed.ReduceOp"):
                call()
    agree(True)


def test_ops_compare_by_value(rank: int, size: int) -> None:
    """trap 3: ReduceOp.SUM is a RedOpType, ReduceOp(ReduceOp.SUM) a ReduceOp; both are the same op."""
    tensor, other = torch.ones(3) * rank, torch.ones(3) * rank
    dist.all_reduce(tensor, ReduceOp(ReduceOp.MAX))
    dist.all_reduce(other, op=dist.ReduceOp.MAX, async_op=True).wait()
    agree(same(tensor, torch.full((3,), size - 1.0)) and same(tensor, other), tensor)

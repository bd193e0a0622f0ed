"""Reductions of values that go wrong easily: NaN, infinities, signed zeros, overflow, rounding, bits; and of many chunks."""

import math

import pytest
import torch
from torch.distributed import ReduceOp

import mpicoll as dist
from mpicoll._algorithms import native
from tests.support import agree, everyone
from tests.support.tensors import COMPLEX, FLOATS, HALVES, INTEGERS, of_rank, raw, reduced, same

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.filterwarnings("ignore:B?Complex(Half|32)")]


def identical(*tensors: torch.Tensor) -> bool:
    """The same bits as on rank 0 (collective)."""
    mine = [raw(tensor) for tensor in tensors]
    return mine == everyone(mine)[0]


@pytest.mark.parametrize("op", ["MIN", "MAX"])
def test_nan_wins_wherever_it_is(op: str, rank: int, size: int) -> None:
    """trap 33: NaN of either sign on each rank in turn, beside every other value, as torch.amin and amax have it."""
    others = [-math.inf, -1.0, -0.0, 0.0, 2.0, math.inf, math.nan]
    results, wrong = [], []
    for dtype in FLOATS:
        for holder in range(size):
            for nan in (math.nan, -math.nan):
                mine = torch.tensor(others, dtype=dtype)
                if rank == holder:
                    mine = torch.full_like(mine, nan)
                dist.all_reduce(mine, getattr(ReduceOp, op))
                results.append(mine)
                if not mine.isnan().all():
                    wrong.append(f"{dtype}, NaN on {holder}: {mine.tolist()}")
                single = torch.full((3,), nan if rank == holder else 1.0, dtype=dtype)
                block, blocks = torch.empty(3, dtype=dtype), single.repeat(size)
                dist.reduce(single, 0, getattr(ReduceOp, op))
                dist.reduce_scatter_single(block, blocks, getattr(ReduceOp, op))
                if not block.isnan().all() or (rank == 0 and not single.isnan().all()):
                    wrong.append(f"{dtype}, reduce or reduce_scatter, NaN on {holder}: {single.tolist()} {block.tolist()}")
    agree(not wrong, wrong[:3])
    agree(identical(*results), "other bits than rank 0")


@pytest.mark.parametrize("op", ["MIN", "MAX"])
def test_order_of_infinities_and_zeros(op: str, rank: int, size: int) -> None:
    """-0.0 comes before 0.0, denormals between them and the rest, on whatever rank each value is."""
    wrong = []
    for dtype in FLOATS:
        tiny = torch.finfo(dtype).smallest_normal / 2
        ladder = [-math.inf, torch.finfo(dtype).min, -1.0, -tiny, -0.0, 0.0, tiny, 1.0, torch.finfo(dtype).max, math.inf]
        for turn in range(size):
            # value i meets value i + distance of it: each pair of the ladder at some distance
            for distance in range(len(ladder)):
                pairs = [(i, (i + distance) % len(ladder)) for i in range(len(ladder))]
                mine = torch.tensor([ladder[a if rank == turn else b] for a, b in pairs], dtype=dtype)
                dist.all_reduce(mine, getattr(ReduceOp, op))
                pick = min if op == "MIN" else max
                expected = torch.tensor([ladder[pick(a, b) if size > 1 else a] for a, b in pairs], dtype=dtype)
                if not same(mine, expected):
                    wrong.append(f"{dtype} {turn} {distance}: {mine.tolist()} is not {expected.tolist()}")
    agree(not wrong, wrong[:3])


@pytest.mark.parametrize("op", ["SUM", "AVG", "PRODUCT", "PREMUL_SUM"])
def test_infinities_and_nan_in_sums(op: str, rank: int, size: int) -> None:
    reduce_op = dist._make_nccl_premul_sum(2.0) if op == "PREMUL_SUM" else getattr(ReduceOp, op)
    good = True
    for dtype in FLOATS:
        last = rank == size - 1
        mine = torch.tensor([math.inf if last else 1.0, math.nan if last else 1.0, -math.inf if last else 3.0], dtype=dtype)
        dist.all_reduce(mine, reduce_op)
        good &= mine[0].item() == math.inf and math.isnan(mine[1].item()) and mine[2].item() == -math.inf
    agree(good)


def test_average_does_not_overflow_on_its_way(rank: int, size: int) -> None:
    """trap 22: the largest fp16 of all ranks has itself as its average; a sum does overflow."""
    for dtype in [*HALVES, torch.complex32]:
        part = torch.float16 if dtype == torch.complex32 else dtype
        largest = torch.finfo(part).max if part == torch.float16 else 3.0e38 / 8
        mine = torch.full((3,), largest, dtype=part)
        whole = torch.view_as_complex(torch.stack([mine, mine], -1)) if dtype == torch.complex32 else mine
        average, total = whole.clone(), whole.clone()
        dist.all_reduce(average, ReduceOp.AVG)
        agree(same(average, whole), f"{dtype}: {average}")
        dist.all_reduce(total)
        if part == torch.float16 and size > 1:
            reals = torch.view_as_real(total) if dtype == torch.complex32 else total
            agree(bool(reals.isinf().all()), f"{dtype}: {total}")


@pytest.mark.parametrize("op", ["SUM", "PRODUCT", "AVG", "MIN", "MAX", "BAND", "BOR", "BXOR"])
def test_integers_at_their_limits(op: str, rank: int, size: int) -> None:
    """trap 22: sums wrap around, an average is the wrapped sum's, towards zero; above the signed range nothing is negative.

    Open MPI's sums of 8 and 16 bits saturate where the processor has AVX, and only in whole vectors.
    """
    reduce_op, wrong = getattr(ReduceOp, op), []
    for dtype in INTEGERS:
        low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        pattern = 0xA5A5_A5A5_A5A5_A5A5 >> (65 - torch.iinfo(dtype).bits)
        values = [0, 1, 7, -1 if low else 2, -7 if low else 8, low, high, high - 1, high // 2 + 1, high // 3, pattern, 3]
        for count in (1, 100, 75_000):  # by MPI, and by torch's kernels in shared memory
            given = [torch.tensor(values[r:] + values[:r], dtype=dtype).repeat(count) for r in range(size)]
            expected = reduced(op, [tensor[: len(values)] for tensor in given]).repeat(count)
            everywhere, root, own = given[rank].clone(), given[rank].clone(), torch.empty_like(given[rank])
            dist.all_reduce(everywhere, reduce_op)
            dist.reduce(root, 0, reduce_op)
            dist.reduce_scatter_single(own, given[rank].repeat(size), reduce_op)
            pairs = {
                "all_reduce": (everywhere, expected),
                "reduce": (root, expected if rank == 0 else given[rank]),
                "reduce_scatter_single": (own, expected),
            }
            for name, (found, right) in pairs.items():
                if not same(found, right):
                    wrong.append(f"{name} of {dtype} x {count}: {found[:12].tolist()} is not {right[:12].tolist()}")
    agree(not wrong, wrong[:3])


@pytest.mark.min_ranks(2)
def test_halves_round_once(rank: int, size: int) -> None:
    """trap 32: a large number and small ones, each of which a sum in bf16 or fp16 would lose."""
    for dtype in HALVES:
        large = 2.0 / torch.finfo(dtype).eps  # its neighbour is 2 away from it on each side or more
        share = 2.0 / (size - 1)  # together they reach the neighbour, one by one they do not
        small = torch.tensor(share, dtype=dtype).item()
        mine = torch.tensor([large if rank == 0 else small, large if rank == size - 1 else small], dtype=dtype)
        dist.all_reduce(mine)
        expected = torch.tensor(large + small * (size - 1), dtype=torch.float32).to(dtype).item()
        agree(mine.tolist() == [expected, expected], f"{dtype}: {mine.tolist()} is not {expected}")


def test_bits_are_equal_on_all_ranks(seed: int, rank: int, size: int) -> None:
    """trap 32: sums of numbers that are not exact anywhere, at sizes where MPI changes its algorithm."""
    generator = torch.Generator().manual_seed(seed + rank)
    results = []
    for dtype in [*FLOATS, *COMPLEX]:
        for count in (1, 7, 1000, 70_001):
            part = torch.view_as_real(torch.empty(0, dtype=dtype)).dtype if dtype in COMPLEX else dtype
            values = torch.randn(count, 2, generator=generator).to(part)
            mine = torch.view_as_complex(values) if dtype in COMPLEX else values[:, 0]
            for op in (ReduceOp.SUM, ReduceOp.AVG, dist._make_nccl_premul_sum(1 / 3)):
                result = mine.clone()
                dist.all_reduce(result, op)
                results.append(result)
    agree(identical(*results), "other bits than rank 0")


def test_premultiplied_sums(rank: int, size: int) -> None:
    """trap 25: the factor is a number or a tensor of one element, of any dtype; each rank's own."""
    wrong = []
    for dtype in [*FLOATS, *COMPLEX]:
        given = [of_rank(r, dtype) for r in range(size)]
        for factor in (0.25, torch.tensor(2.0), torch.tensor([2], dtype=torch.int64), torch.tensor(0.5).double()):
            mine = given[rank].clone()
            dist.all_reduce(mine, dist._make_nccl_premul_sum(factor))
            expected = reduced("PREMUL_SUM", given, float(factor))
            if not same(mine, expected):
                wrong.append(f"{dtype} {factor}: {mine.tolist()} is not {expected.tolist()}")
        mine = torch.ones(2, dtype=dtype)
        dist.all_reduce(mine, dist._make_nccl_premul_sum(float(rank + 1)))
        if not same(mine, torch.full((2,), size * (size + 1) / 2, dtype=dtype)):
            wrong.append(f"{dtype} own factors: {mine.tolist()}")
    agree(not wrong, wrong[:3])


def test_factors_that_are_complex_or_missing(rank: int, size: int) -> None:
    """A complex one turns complex numbers, and is refused elsewhere."""
    factor = torch.tensor([0.0 + 2.0j])
    wrong = []
    for dtype in COMPLEX:
        mine = torch.full((3,), 1.0 + 1.0j, dtype=dtype)
        dist.all_reduce(mine, dist._make_nccl_premul_sum(factor))
        if mine.tolist() != [size * (-2.0 + 2.0j)] * 3:
            wrong.append(f"{dtype}: {mine.tolist()}")
    for dtype in FLOATS:
        with pytest.raises(TypeError, match="all_reduce: PREMUL_SUM"):
            dist.all_reduce(torch.ones(3, dtype=dtype), dist._make_nccl_premul_sum(factor))
    with pytest.raises(ValueError, match="PREMUL_SUM carries no factor"):
        dist.all_reduce(torch.ones(3), ReduceOp.PREMUL_SUM)
    agree(not wrong, wrong)


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_many_chunks(chunk: int, rank: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """trap 20: what is above 2^31 - 1 elements goes in chunks; the same with chunks of a few elements."""
    monkeypatch.setattr(native, "CHUNK", chunk)
    monkeypatch.setattr(native, "INT_MAX", chunk)
    wrong = []
    for dtype, op in [
        (torch.float32, "SUM"), (torch.uint8, "MAX"), (torch.bfloat16, "AVG"), (torch.bool, "SUM"),
        (torch.float64, "MIN"), (torch.complex64, "SUM"), (torch.int64, "BXOR"), (torch.complex32, "AVG"),
    ]:  # fmt: skip
        for leaf in (False, True) if dtype.is_floating_point else (False,):
            given = [of_rank(r, dtype, (size, 13)) for r in range(size)]
            mine, root = given[rank].clone(), given[rank].clone()
            dist.all_reduce(mine, getattr(ReduceOp, op))
            dist.reduce(root, size - 1, getattr(ReduceOp, op))
            scanned, before = given[rank].clone(), given[rank].clone()
            dist.scan(scanned, getattr(ReduceOp, op))
            dist.exscan(before, getattr(ReduceOp, op))
            good = same(scanned, reduced(op, given[: rank + 1])) and same(before, reduced(op, given[:rank] or given[:1]))
            expected = reduced(op, given)
            block, part = torch.zeros(13, dtype=dtype), torch.zeros(13, dtype=dtype)
            if leaf:
                block, part = block.requires_grad_(), part.requires_grad_()
            dist.reduce_scatter_single(block, given[rank], getattr(ReduceOp, op))
            dist.reduce_scatter(part, list(given[rank]), getattr(ReduceOp, op), async_op=True).wait()
            with torch.inference_mode():
                inference = torch.zeros(13, dtype=dtype)
                work = dist.reduce_scatter_single(inference, given[rank], getattr(ReduceOp, op), async_op=True)
            work.wait()
            good &= same(mine, expected) and same(root, expected if rank == size - 1 else given[rank])
            if not good or not all(same(output, expected[rank]) for output in (block, part, inference)):
                wrong.append(f"{dtype} {op}: {mine.tolist()}, {block.tolist()} is not {expected.tolist()}")
    agree(not wrong, wrong[:2])

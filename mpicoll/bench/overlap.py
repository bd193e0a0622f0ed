"""How much of an all_reduce overlaps with a matmul of the same duration.

For each implementation, in the same rounds: [1] all_reduce alone, [2] a loop of matmuls that takes as long, alone, [3] both:
all_reduce(async_op=True), the loop, wait(). The ratio [3] / ([1] + [2]) is 0.5 for full overlap and 1 for none. If no rank has a
spare core ("full"), the thread that moves bytes takes time from the loop, and 1 is the best possible ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed

import mpicoll
from mpicoll.bench.formulas import spell
from mpicoll.bench.harness import Harness
from mpicoll.bench.operations import Memory, all_reduce
from mpicoll.bench.output import Output
from mpicoll.bench.row import API, BACKEND, GLOO, Row
from mpicoll.bench.table import micro, times

SIDE = 192  # of the matrices, which stay in the cache of a core; a product takes about 0.2 ms
ALONE, MATMUL, BOTH = "all_reduce", "matmul", "both"


def _matmuls(count: int) -> None:
    for _ in range(count):
        torch.mm(_A, _B, out=_C)


_A, _B, _C = torch.rand(SIDE, SIDE), torch.rand(SIDE, SIDE), torch.empty(SIDE, SIDE)


def name(way: str, part: str) -> str:
    return f"{way}: {part}"


def ratio(row: Row, way: str) -> float:
    """Median over the rounds of [3] / ([1] + [2])."""
    return row.ratio_to_sum(name(way, BOTH), (name(way, ALONE), name(way, MATMUL)))


def run(harness: Harness, output: Output, sizes: Sequence[int]) -> list[Row]:
    """Measures and prints (collective)."""
    machine = output.machine
    full = ", full" if machine.full else ""
    output.say("", f"all_reduce beside a matmul, float32; {machine.cores_per_rank:g} cores per rank{full}")
    output.say(f"{'bytes':>9}  {'':13}{'all_reduce us':>15}{'matmul us':>12}{'both us':>12}{'x sum':>8}")
    rows = []
    for nbytes in output.progress(sizes, lambda nbytes: f"overlap {spell(nbytes)}"):
        row = output.add(_row(harness, nbytes))
        rows.append(row)
        for way in (API, BACKEND, GLOO):
            alone, matmul, both = (micro(row.seconds(name(way, part))) for part in (ALONE, MATMUL, BOTH))
            output.say(f"{spell(nbytes):>9}  {way:13}{alone:>15}{matmul:>12}{both:>12}{times(ratio(row, way)):>8}")
    return rows


def _row(harness: Harness, nbytes: int) -> Row:
    operation = all_reduce(harness.shape(nbytes, torch.float32))
    x, memory = operation.memory.sent[0][0], operation.memory
    one = min(harness.rounds.times({MATMUL: partial(_matmuls, 10)})[MATMUL]) / 10
    calls: dict[str, Callable[[], object]] = {}
    apis: dict[str, tuple[Any, Any]] = {
        API: (mpicoll, None),
        BACKEND: (torch.distributed, None),
        GLOO: (torch.distributed, harness.gloo),
    }
    for way, (dist, group) in apis.items():
        alone = operation.call_through(dist, group)
        assert alone is not None
        seconds = min(harness.rounds.times({way: alone})[way])
        matmuls = partial(_matmuls, max(1, round(seconds / one)))
        both = _both(dist, group, x, matmuls)
        _check(harness, f"{way}: asynchronous all_reduce of {spell(nbytes)}", memory, both)
        calls |= {name(way, ALONE): alone, name(way, MATMUL): matmuls, name(way, BOTH): both}
    return Row("overlap", nbytes, harness.size, harness.rounds.times(calls), "float32", "SUM")


def _both(dist: Any, group: Any, x: torch.Tensor, matmuls: Callable[[], None]) -> Callable[[], None]:
    def call() -> None:
        work = dist.all_reduce(x, group=group, async_op=True)
        matmuls()
        work.wait()

    return call


def _check(harness: Harness, label: str, memory: Memory, call: Callable[[], None]) -> None:
    memory.prepare()
    call()
    if not memory.right():
        raise AssertionError(f"{label}: wrong result on rank {harness.rank} of {harness.size}")
    memory.clear()
    harness.control.arrive()

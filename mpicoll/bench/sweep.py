"""Collectives and messages over sizes, dtypes and ops: one table for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from mpicoll.bench.formulas import EMPTY, IN_PARTS, REDUCTIONS, spell
from mpicoll.bench.harness import WAYS, Harness, Maker, Skipped, has_twin
from mpicoll.bench.messages import MESSAGES
from mpicoll.bench.operations import COLLECTIVES
from mpicoll.bench.output import Output
from mpicoll.bench.row import FLOAT32, Row
from mpicoll.bench.table import Table

KNOWN: dict[str, Maker] = {**COLLECTIVES, **MESSAGES}


@dataclass(frozen=True)
class Sweep:
    """The rows of one collective: its sizes, dtypes, ops and implementations."""

    what: str
    sizes: Sequence[int]
    dtypes: Sequence[str] = ("float32",)
    ops: Sequence[str] = ("SUM",)
    ways: Sequence[str] = WAYS

    def cases(self) -> Iterator[tuple[str, str]]:
        """(dtype, op)"""
        for dtype in self.dtypes if self.what not in EMPTY else self.dtypes[:1]:
            yield from ((dtype, op) for op in (self.ops if self.what in REDUCTIONS else ("SUM",)))

    def rows(self, dtype: str, ranks: int) -> list[int]:
        """Sizes in bytes; multiples of the number of ranks where tensors are split among them."""
        if self.what in EMPTY:
            return [0]
        unit = getattr(torch, dtype).itemsize * (ranks if self.what in IN_PARTS else 1)
        return list(dict.fromkeys(max(unit, nbytes // unit * unit) for nbytes in self.sizes))

    def steps(self, ranks: int) -> int:
        return sum(len(self.rows(dtype, ranks)) for dtype, _ in self.cases())


def run(harness: Harness, output: Output, sweeps: Sequence[Sweep]) -> list[Row]:
    """Measures and prints (collective)."""
    with output.progress(sum(sweep.steps(harness.size) for sweep in sweeps)) as step:
        return [row for sweep in sweeps for dtype, op in sweep.cases() for row in _rows(harness, output, step, sweep, dtype, op)]


def _rows(harness: Harness, output: Output, step: Callable[[str], None], sweep: Sweep, dtype: str, op: str) -> Iterator[Row]:
    table = _table(sweep, dtype, op)
    for i, nbytes in enumerate(sweep.rows(dtype, harness.size)):
        step(f"{sweep.what} {dtype} {spell(nbytes)}")
        try:
            row = output.add(harness.row(sweep.what, KNOWN[sweep.what], nbytes, getattr(torch, dtype), op, sweep.ways))
        except Skipped as skipped:
            output.say("", f"skipped: {skipped}")
            return
        output.say(*(table.head() if i == 0 else []), table.line(row))
        if i == 0:
            output.say(*(f"          {way} left out: {why}" for way, why in (row.missing or {}).items()))
        yield row


def _table(sweep: Sweep, dtype: str, op: str) -> Table:
    words = [sweep.what, *([] if sweep.what in EMPTY else [dtype]), *([op] if sweep.what in REDUCTIONS else [])]
    return Table(", ".join(words), [*sweep.ways, *([FLOAT32] if has_twin(sweep.what, getattr(torch, dtype)) else [])])

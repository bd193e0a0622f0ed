"""Collectives and messages over sizes, dtypes and ops: one table for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from mpicoll.bench.exchanges import COLLECTIVES
from mpicoll.bench.formulas import EMPTY, IN_PARTS, REDUCTIONS, spell
from mpicoll.bench.messages import MESSAGES
from mpicoll.bench.report import Report
from mpicoll.bench.row import FLOAT32, Row
from mpicoll.bench.stage import WAYS, Maker, Skipped, Stage, has_twin
from mpicoll.bench.table import Table

KNOWN: dict[str, Maker] = {**COLLECTIVES, **MESSAGES}


@dataclass(frozen=True)
class Plan:
    """Rows of one collective."""

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
        """Bytes; multiples of the ranks' number where they are shared out."""
        if self.what in EMPTY:
            return [0]
        unit = getattr(torch, dtype).itemsize * (ranks if self.what in IN_PARTS else 1)
        return list(dict.fromkeys(max(unit, nbytes // unit * unit) for nbytes in self.sizes))

    def steps(self, ranks: int) -> int:
        return sum(len(self.rows(dtype, ranks)) for dtype, _ in self.cases())


def run(stage: Stage, report: Report, plans: Sequence[Plan]) -> list[Row]:
    """Measures and prints (collective)."""
    with report.progress(sum(plan.steps(stage.size) for plan in plans)) as step:
        return [row for plan in plans for dtype, op in plan.cases() for row in _rows(stage, report, step, plan, dtype, op)]


def _rows(stage: Stage, report: Report, step: Callable[[str], None], plan: Plan, dtype: str, op: str) -> Iterator[Row]:
    table = _table(plan, dtype, op)
    for i, nbytes in enumerate(plan.rows(dtype, stage.size)):
        step(f"{plan.what} {dtype} {spell(nbytes)}")
        try:
            row = report.add(stage.row(plan.what, KNOWN[plan.what], nbytes, getattr(torch, dtype), op, plan.ways))
        except Skipped as skipped:
            report.say("", f"skipped: {skipped}")
            return
        report.say(*(table.head() if i == 0 else []), table.line(row))
        if i == 0:
            report.say(*(f"          {way} left out: {why}" for way, why in (row.missing or {}).items()))
        yield row


def _table(plan: Plan, dtype: str, op: str) -> Table:
    words = [plan.what, *([] if plan.what in EMPTY else [dtype]), *([op] if plan.what in REDUCTIONS else [])]
    return Table(", ".join(words), [*plan.ways, *([FLOAT32] if has_twin(plan.what, getattr(torch, dtype)) else [])])

"""Collectives and messages over sizes, dtypes and ops: one table for each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from typing import NamedTuple

import torch

from mpicoll.bench.formulas import EMPTY, IN_PARTS, REDUCTIONS
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

    def cases(self, ranks: int) -> Iterator[Case]:
        """The rows. Sizes are multiples of the number of ranks where tensors are split among them."""
        empty = self.what in EMPTY
        ops = self.ops if self.what in REDUCTIONS else ("SUM",)
        for dtype, op in product(self.dtypes[:1] if empty else self.dtypes, ops):
            unit = getattr(torch, dtype).itemsize * (ranks if self.what in IN_PARTS else 1)
            sizes = [0] if empty else dict.fromkeys(max(unit, nbytes // unit * unit) for nbytes in self.sizes)
            yield from (Case(dtype, op, nbytes) for nbytes in sizes)


class Case(NamedTuple):
    dtype: str
    op: str
    nbytes: int


def run(harness: Harness, output: Output, sweep: Sweep) -> list[Row]:
    """Measures and prints (collective)."""
    return [
        row
        for (dtype, op), rows in groupby(sweep.cases(harness.size), lambda case: case[:2])
        for row in _rows(harness, output, sweep, _table(sweep, dtype, op), rows)
    ]


def _rows(harness: Harness, output: Output, sweep: Sweep, table: Table, cases: Iterable[Case]) -> Iterator[Row]:
    for i, (dtype, op, nbytes) in enumerate(cases):
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
    ways = [*sweep.ways, *([FLOAT32] if has_twin(sweep.what, getattr(torch, dtype)) else [])]
    return Table(", ".join(words), ways)

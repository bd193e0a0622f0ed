"""The targets of mpicoll as ratios within one run, compared with measurements. Two ranks unless a line says otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mpicoll.bench import overlap
from mpicoll.bench.formulas import spell
from mpicoll.bench.operations import COLLECTIVES
from mpicoll.bench.row import API, BACKEND, COPIES, COPY, FLOAT32, GLOO, RAW, Row
from mpicoll.bench.startup import Startup
from mpicoll.bench.table import times

KIB, MIB = 1 << 10, 1 << 20
EVER, MOST = 1 << 62, 64 * MIB  # bytes
SHORT = ("all_reduce", "broadcast", "latency", "barrier")  # of 8 B
MOVED = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "broadcast")
DDP = f"DDP MLP {spell(64 * MIB)}"
SPARE, FULL = 0.65, 1.05  # overlap: where each rank has a spare core, and where not

Figure = Callable[[Row], "float | None"]
Value = tuple["float | None", str]  # and the row, or the reason why there is none


@dataclass
class Measured:
    """All measurements that targets are compared with."""

    rows: Sequence[Row]
    full: bool  # no rank has a spare core
    startup: Startup | None = None
    crowded: Sequence[Row] = ()  # on 4 ranks
    reasons: dict[str, str] = field(default_factory=dict)  # why "startup" or "crowded" is missing

    def worst(self, figure: Figure, whats: Sequence[str], dtypes: Sequence[str], low: int, high: int = EVER) -> Value:
        """The largest figure among rows of these operations, dtypes and sizes."""
        pairs = [(value, row) for row in self.chosen(whats, dtypes, low, high) if (value := figure(row)) is not None]
        if not pairs:
            return None, "not among what was measured"
        value, row = max(pairs, key=lambda pair: pair[0])
        return value, f"{row.what} {row.dtype} {spell(row.nbytes)}" if row.nbytes else row.what

    def chosen(self, whats: Sequence[str], dtypes: Sequence[str], low: int, high: int) -> list[Row]:
        return [
            row
            for row in self.rows
            if row.what in whats and (row.what == "barrier" or (row.dtype in dtypes and low <= row.nbytes <= high))
        ]


@dataclass(frozen=True)
class Target:
    number: str
    what: str
    against: str
    at_most: float
    unit: str  # "x", "us", "ms"
    find: Callable[[Measured], Value]

    def judge(self, measured: Measured) -> Outcome:
        value, note = self.find(measured)
        return Outcome(self, FULL if self.number == "10" and measured.full else self.at_most, value, note)


@dataclass(frozen=True)
class Outcome:
    target: Target
    at_most: float
    value: float | None
    note: str

    @property
    def verdict(self) -> str:
        return "-" if self.value is None else "met" if self.value <= self.at_most else "MISSED"

    def cells(self) -> list[str]:
        target = self.target
        value = "-" if self.value is None else spelled(self.value, target.unit)
        return [target.number, target.what, target.against, spelled(self.at_most, target.unit), value, self.verdict, self.note]

    def facts(self) -> dict[str, Any]:
        names = ("number", "what", "against", "at_most", "measured", "verdict", "note")
        return dict(zip(names, self.cells(), strict=True), value=self.value, limit=self.at_most, unit=self.target.unit)


def spelled(value: float, unit: str) -> str:
    """1.2, "x" -> "1.20x"; 8.04, "us" -> "8.0 us"."""
    return f"{times(value)}x" if unit == "x" else f"{value:.1f} {unit}"


def to(way: str) -> Figure:
    """The ratio of the mpicoll API to ``way``."""
    return lambda row: row.ratio(API, way)


def to_better(row: Row) -> float | None:
    """The ratio of the mpicoll API to the faster of Gloo and MPI."""
    return row.best_ratio(API, (GLOO, RAW))


def ddp_ratio(row: Row) -> float | None:
    return row.ratio(BACKEND, GLOO)


def added(row: Row) -> float | None:
    """Microseconds that the torch backend adds to the mpicoll API."""
    seconds = row.difference(BACKEND, API)
    return None if seconds is None else seconds * 1e6


def us(way: str) -> Figure:
    """Microseconds of a call; of a message, one way."""
    return lambda row: row.seconds(way) * 1e6 if way in row.times else None


def _over(figure: Figure, whats: Sequence[str], dtypes: Sequence[str], low: int, high: int = EVER) -> Callable[[Measured], Value]:
    return lambda measured: measured.worst(figure, whats, dtypes, low, high)


def _beside(measured: Measured) -> Value:
    row = next((row for row in measured.rows if row.what == "overlap" and row.nbytes == 16 * MIB), None)
    if row is None:
        return None, "not among what was measured"
    return overlap.ratio(row, API), "full: no core to spare" if measured.full else "a spare core for each rank"


def _copies(measured: Measured) -> Value:
    value, note = measured.worst(to(COPY), ("all_reduce",), ("float32",), 16 * MIB)
    together, _ = measured.worst(to(COPIES), ("all_reduce",), ("float32",), 16 * MIB)
    return value, note if together is None else f"{note}; at worst {times(together)}x of copies by all ranks at once"


def _apart(name: str, figure: Callable[[Any], float | None], note: str = "") -> Callable[[Measured], Value]:
    """A figure of `Measured.startup` or of `Measured.crowded`, which may be missing."""

    def found(measured: Measured) -> Value:
        value = getattr(measured, name)
        return (figure(value), note) if value else (None, measured.reasons.get(name, "not measured"))

    return found


F32, HALVES, ALL = ("float32",), ("bfloat16", "float16"), tuple(COLLECTIVES)
NAMES = {"latency": "send + recv, 8 B", "exchange": "isend + irecv + wait, 8 B", "barrier": "barrier"}
REDUCED = ("all_reduce",)
_SHORT = [Target("1", NAMES.get(what, f"{what}, 8 B"), RAW, 1.5, "x", _over(to(RAW), (what,), F32, 8, 8)) for what in SHORT]
_CROWDED = _apart("crowded", lambda rows: rows[0].ratio(API, GLOO), "a job of its own")
_CROWDED_HALVES = _apart("crowded", lambda rows: rows[1].ratio(API, GLOO), "a job of its own")


def _call(what: str, at_most: float, way: str = API, dtypes: Sequence[str] = F32) -> Target:
    """The time of a call with 8 bytes."""
    words = [
        f"time of {NAMES.get(what, f'{what}, 8 B')}",
        *(dtypes if dtypes is not F32 else []),
        *(["torch"] if way == BACKEND else []),
    ]
    return Target("15", ", ".join(words), "-", at_most, "us", _over(us(way), (what,), dtypes, 8, 8))


def _large(what: str, mib: int, against: str, at_most: float, way: str = API) -> Target:
    words = f"{'send + recv' if what == 'latency' else what}, {mib} MiB{', torch' if way == BACKEND else ''}"
    return Target(
        "16", words, against, at_most, "x", _over(lambda row: row.ratio(way, against), (what,), F32, mib * MIB, mib * MIB)
    )


HALF = ("bfloat16",)
TARGETS = [
    *_SHORT,
    Target("2", "the same through torch.distributed", API, 12, "us", _over(added, SHORT, F32, 8, 8)),
    Target("3", "every collective, 8 B ... 64 KiB", GLOO, 0.1, "x", _over(to(GLOO), ALL, F32, 8, 64 * KIB)),
    Target("4", "all_reduce, 1 MiB ... 256 MiB", GLOO, 0.5, "x", _over(to(GLOO), REDUCED, F32, MIB)),
    Target("5", "all_reduce, 16 MiB ... 256 MiB", RAW, 0.75, "x", _over(to(RAW), REDUCED, F32, 16 * MIB)),
    Target("6", "all_reduce of bfloat16, float16, 1 MiB and up", GLOO, 0.3, "x", _over(to(GLOO), REDUCED, HALVES, MIB)),
    Target("7", "the same", "our float32", 1.2, "x", _over(to(FLOAT32), REDUCED, HALVES, MIB)),
    Target("8", "*_tensor, *_single, broadcast, 1 ... 64 MiB", "Gloo or MPI", 0.8, "x", _over(to_better, MOVED, F32, MIB, MOST)),
    Target("9", "all_reduce, 16 MiB and up", "memory copy", 1.3, "x", _copies),
    Target("10", "async all_reduce of 16 MiB beside a matmul", "sum of both", SPARE, "x", _beside),
    Target("11", "DDP step, 64 MiB of gradients", "DDP on Gloo", 0.6, "x", _over(ddp_ratio, (DDP,), F32, 0)),
    Target("12", "4 ranks, all_reduce, 8 B", GLOO, 0.2, "x", _CROWDED),
    Target("13", "import mpicoll, after torch", "-", 30, "ms", _apart("startup", lambda startup: startup.import_s() * 1e3)),
    Target("14", "4 ranks, init_process_group", GLOO, 1.0, "x", _apart("startup", Startup.init_ratio, "jobs of their own")),
    Target("14", "the same without MPI_Init", "-", 50, "ms", _apart("startup", lambda startup: startup.own_s() * 1e3)),
    *(_call("all_reduce", *aim) for aim in ((4, API), (12, BACKEND))),
    _call("broadcast", 3.5),
    _call("barrier", 3.5),
    *(_call("latency", *aim) for aim in ((3.5, API), (10, BACKEND))),
    *(_call("exchange", 30, way) for way in (API, BACKEND)),
    _call("all_reduce", 8, dtypes=HALF),
    _call("reduce_scatter_tensor", 15, dtypes=HALF),
    _call("all_to_all", 8),
    *(_large("latency", mib, RAW, 1.05, way) for mib in (1, 16, 64) for way in (API, BACKEND)),
    _large("broadcast", 16, RAW, 1.0),
    _large("all_reduce", 64, COPY, 1.5),
    _large("all_gather_into_tensor", 64, COPY, 1.5),
    Target("17", "4 ranks, all_reduce of bfloat16, 16 MiB", GLOO, 0.35, "x", _CROWDED_HALVES),
]
HEAD = ["", "what", "against", "at most", "measured", "", "worst, or why not"]


def judge(measured: Measured) -> list[Outcome]:
    return [target.judge(measured) for target in TARGETS]


def text(cells: Sequence[Sequence[str]], head: Sequence[str] = HEAD) -> list[str]:
    """The table as text."""
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in (head, *cells)]


def by_collective(measured: Measured) -> list[str]:
    """Target 3: the worst ratio of each collective."""
    lines = ["", "8 B ... 64 KiB, mpicoll / Gloo, the worst of each collective"]
    for what in ALL:
        value, where = measured.worst(to(GLOO), (what,), F32, 8, 64 * KIB)
        lines.append(f"{what:>24}{times(value):>8}  {where.removeprefix(what).strip()}")
    return lines

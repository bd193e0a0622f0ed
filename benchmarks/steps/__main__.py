"""Checks and measures training steps, and prints their table; see steps/__init__.py."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # noqa: F401  # registers backend "fake"

from benchmarks import steps
from benchmarks.session import difference, make_parser, milli, opened
from benchmarks.steps import data_parallel, model_parallel, models
from benchmarks.steps.step import Means, Step, Workload, compare, reference, weight_bytes
from mpicoll.bench.harness import Harness
from mpicoll.bench.rounds import Call, Pace
from mpicoll.bench.row import BACKEND, COPIES, GLOO, Row
from mpicoll.bench.table import Output, spread, times

MIB = 1 << 20
ALONE = "computation alone"  # the step with nothing communicated
LEGEND = (
    "training steps, float32: milliseconds, median [least, most] of the rounds; exposed: exposed communication, the median of",
    "step - computation alone; x Gloo, exposed x: ratios to Gloo; copies: the collectives' bytes copied, by all ranks at once",
)
HEADS = f"{'':64}{'step':>24}{'per second':>16}{'exposed':>12}{'x Gloo':>9}{'exposed x':>12}"


def rows(size: int, small: bool) -> dict[str, Workload]:
    """The rows by the names of the option ``--rows``. size: ranks."""

    def transformer(features: int = 512, depth: int = 2) -> models.Task:
        return models.transformer(features // 4, depth, tokens=8) if small else models.transformer(features, depth)

    mlp = models.mlp(512, 4) if small else models.mlp(1024, 16)
    return {
        "mlp": data_parallel.ddp(mlp),
        "transformer": data_parallel.ddp(transformer()),
        "buckets": data_parallel.ddp(transformer(), 4 * MIB),
        "bf16": data_parallel.ddp(transformer(), hook=data_parallel.HALF),
        "large": data_parallel.ddp(transformer(1024)),
        "fsdp": data_parallel.fsdp(transformer()),
        "1f1b": model_parallel.pipeline("1F1B", transformer(depth=size)),
        "gpipe": model_parallel.pipeline("GPipe", transformer(depth=size)),
        "tensor": model_parallel.tensor(transformer()),
    }


@dataclass(frozen=True)
class StepRow:
    """A row, and what its figures count."""

    row: Row
    unit: str
    samples: int

    def exposed(self, way: str) -> float | None:
        """Seconds of exposed communication: the median over the rounds of the step minus computation alone."""
        return difference(self.row, way, ALONE)

    @property
    def exposed_ratio(self) -> float | None:
        """Exposed communication of backend "mpi" / that of Gloo; None if Gloo's is less than the spread of computation alone."""
        ours, gloo = self.exposed(BACKEND), self.exposed(GLOO)
        alone = self.row.times[ALONE]
        deviation = statistics.median(abs(seconds - statistics.median(alone)) for seconds in alone)
        return None if ours is None or gloo is None or gloo <= 2 * deviation else ours / gloo

    def per_second(self, way: str) -> float:
        return self.samples / self.row.seconds(way)

    def lines(self) -> list[str]:
        row, lines = self.row, []
        for way in (BACKEND, GLOO, ALONE, COPIES):
            name = row.what if way == BACKEND else ""
            rate = f"{self.per_second(way):.0f} {self.unit}" if way != COPIES else ""
            exposed = milli(self.exposed(way) or 0.0) if way in (BACKEND, GLOO) else ""
            ratios = (times(row.ratio(way, GLOO)), times(self.exposed_ratio)) if way == BACKEND else ("", "")
            cells = f"{spread(row.times[way], milli):>24}{rate:>16}{exposed:>12}{ratios[0]:>9}{ratios[1]:>12}"
            lines.append(f"{name:46}{way:18}{cells}".rstrip())
        return lines


def run(harness: Harness, output: Output, workloads: Sequence[Workload]) -> None:
    """Measures and prints (collective)."""
    output.say("", *LEGEND, HEADS)
    nothing = dist.new_group(backend="fake")
    for workload in workloads:
        reason = workload.why_not(harness.size)
        if reason:
            output.say(f"{workload.name:46}left out: {reason}")
            continue
        step_row = _row(harness, workload, nothing)
        output.add(step_row.row)
        output.say(*step_row.lines())


def _row(harness: Harness, workload: Workload, nothing: Any) -> StepRow:
    task, size = workload.task, harness.size
    groups = {BACKEND: dist.group.WORLD, GLOO: harness.gloo, ALONE: None}
    steps = {way: workload.make(task, Means(harness.rank, size, group, nothing)) for way, group in groups.items()}
    _check(harness, workload, steps)
    calls: dict[str, Call] = {**steps, COPIES: _copies(harness, workload)}
    seconds = harness.rounds.times(calls)
    seconds[ALONE] = [each * workload.alone(size) for each in seconds[ALONE]]
    row = Row(workload.name, weight_bytes(task), size, seconds, "float32", "AVG")
    return StepRow(row, task.unit, workload.samples(size))


def _check(harness: Harness, workload: Workload, steps: dict[str, Step]) -> None:
    """Raises AssertionError if an implementation's gradients differ from those of one process."""
    expected = reference(workload.task, workload.batches(harness.size))
    for _ in range(2):  # DDP forms its final buckets after the first
        for way in (BACKEND, GLOO):
            steps[way].backward()
            compare(f"{workload.name}: {way}", steps[way].gradients(), expected, workload.tolerance)
    harness.control.arrive()  # a rank with a wrong result has ended the job by now


def _copies(harness: Harness, workload: Workload) -> Callable[[], None]:
    """The floor of all operations of a step, one after the other."""
    copies = [harness.copies(what, nbytes).get(COPIES) for what, nbytes in workload.traffic(workload.task, harness.size)]

    def call() -> None:
        for copy in copies:
            if copy is not None:
                copy()

    return call


def main() -> None:
    names = list(rows(2, small=True))
    parser = make_parser(steps.__doc__)
    parser.add_argument("--rows", nargs="+", choices=names, default=names, metavar="ROW", help=" ".join(names))
    args = parser.parse_args()
    with opened(args, Pace(rounds=15, round_s=0.2, row_s=10.0)) as (harness, output):
        found = rows(harness.size, args.quick)
        run(harness, output, [found[name] for name in args.rows])


if __name__ == "__main__":
    main()

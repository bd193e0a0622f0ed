"""`bench all`: measures the figures of the table of targets, and prints the table."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from mpicoll.bench import jobs, overlap, startup, sweep, table, targets
from mpicoll.bench.harness import WAYS, Harness
from mpicoll.bench.operations import COLLECTIVES
from mpicoll.bench.output import Output
from mpicoll.bench.row import API, BACKEND, GLOO, RAW, Row
from mpicoll.bench.steps import catalog, measure
from mpicoll.bench.steps.models import SIDES
from mpicoll.bench.sweep import Sweep
from mpicoll.bench.targets import KIB, MIB, MOVED, SHORT, Measured

RANKS = 4  # in the jobs that rank 0 starts
SMALL = [8, 512, 4 * KIB, 64 * KIB]
LARGE = [MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB]
OURS_AND_OTHERS = (API, GLOO, RAW)
CROWDED = (("--sizes", "8"), ("--sizes", "16M", "--dtypes", "bfloat16"))  # options of all_reduce with more ranks than cores


def sweeps(quick: bool) -> list[Sweep]:
    small, large = ([8, 64 * KIB], [MIB, 16 * MIB]) if quick else (SMALL, LARGE)
    names = [*COLLECTIVES, "latency"]
    short = [Sweep(what, small, ways=WAYS if what in SHORT else OURS_AND_OTHERS) for what in names]
    reduced = Sweep("all_reduce", large, ["float32", "bfloat16", "float16"], ways=OURS_AND_OTHERS)
    moved = [Sweep(what, [size for size in large if size <= 64 * MIB], ways=OURS_AND_OTHERS) for what in MOVED]
    halves = [Sweep(what, [8], ["bfloat16"], ways=OURS_AND_OTHERS) for what in ("all_reduce", "reduce_scatter_tensor")]
    messages = Sweep("latency", [size for size in large if size in (MIB, 16 * MIB, 64 * MIB)], ways=(API, BACKEND, RAW))
    exchange = Sweep("exchange", [8], ways=(API, BACKEND, RAW))
    return [*short, exchange, *halves, reduced, *moved, messages]


def run(harness: Harness, output: Output, quick: bool, markdown: bool) -> None:
    """Measures and prints (collective)."""
    output.say(*table.LEGEND)
    rows = sweep.run(harness, output, sweeps(quick))
    rows += overlap.run(harness, output, [16 * MIB])
    rows += measure.run(harness, output, catalog.ddp(list(SIDES)[:1] if quick else list(SIDES), resnet=not quick))
    measured = Measured(rows, output.machine.full)
    if quick:
        measured.reasons = dict.fromkeys(("startup", "crowded"), "not with --quick")
    else:
        _in_jobs_of_their_own(harness, output, measured)
    output.say(*table.copy_lines(rows), *targets.by_collective(measured))
    outcomes = targets.judge(measured)
    output.extra["targets"] = [outcome.facts() for outcome in outcomes]
    cells = [outcome.cells() for outcome in outcomes]
    output.say("", *(table.markdown(targets.HEAD, cells) if markdown else targets.text(cells)))
    if harness.size != 2:
        output.say(f"(the targets are those of 2 ranks; these are {harness.size})")


def _in_jobs_of_their_own(harness: Harness, output: Output, measured: Measured) -> None:
    starts = jobs.OnRank0(harness.control, lambda: startup.measure(RANKS, 5))
    crowd = jobs.OnRank0(harness.control, lambda: [crowded(RANKS, *options) for options in CROWDED])
    measured.startup, measured.crowded = starts.value, crowd.value or []
    measured.reasons = {name: each.reason for name, each in (("startup", starts), ("crowded", crowd)) if each.reason}
    if starts.value is not None:
        output.say(*starts.value.lines(RANKS))
        output.extra["startup"] = starts.value.facts()


def crowded(ranks: int, *options: str) -> Row:
    """all_reduce in a job of ``ranks`` ranks (call it on rank 0 only). Raises ChildFailed."""
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "rows.json")
        jobs.job(ranks, "-m", "mpicoll.bench", "all_reduce", "--json", file, *options)
        facts = json.loads(Path(file).read_text())["rows"][0]
    times = {way: [us / 1e6 for us in figures["rounds_us"]] for way, figures in facts["ways"].items()}
    return Row(facts["what"], facts["bytes"], facts["ranks"], times, facts["dtype"], facts["op"])

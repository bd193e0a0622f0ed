"""`bench all`: what the table of targets needs, and the table."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from mpicoll.bench import ddp, jobs, overlap, startup, sweep, targets
from mpicoll.bench.exchanges import COLLECTIVES
from mpicoll.bench.report import Report
from mpicoll.bench.row import API, GLOO, RAW, Row
from mpicoll.bench.stage import WAYS, Stage
from mpicoll.bench.sweep import Plan
from mpicoll.bench.table import LEGEND, copy_lines
from mpicoll.bench.targets import KIB, MIB, MOVED, SHORT, Measured

RANKS = 4  # of the jobs that rank 0 starts
SMALL = [8, 512, 4 * KIB, 64 * KIB]
LARGE = [MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB]
OURS_AND_OTHERS = (API, GLOO, RAW)


def plans(quick: bool) -> list[Plan]:
    small, large = ([8, 64 * KIB], [MIB, 16 * MIB]) if quick else (SMALL, LARGE)
    names = [*COLLECTIVES, "latency"]
    found = [Plan(what, small, ways=WAYS if what in SHORT else OURS_AND_OTHERS) for what in names]
    found.append(Plan("all_reduce", large, ["float32", "bfloat16", "float16"], ways=OURS_AND_OTHERS))
    return found + [Plan(what, [size for size in large if size <= 64 * MIB], ways=OURS_AND_OTHERS) for what in MOVED]


def run(stage: Stage, report: Report, quick: bool, markdown: bool) -> None:
    """Measures and prints (collective)."""
    report.say(*LEGEND)
    rows = sweep.run(stage, report, plans(quick))
    rows += overlap.run(stage, report, [16 * MIB])
    rows += ddp.run(stage, report, list(ddp.SIDES)[:1] if quick else list(ddp.SIDES), resnet=not quick)
    measured = Measured(rows, report.machine.full)
    if quick:
        measured.reasons = dict.fromkeys(("startup", "crowded"), "not with --quick")
    else:
        _in_jobs_of_their_own(stage, report, measured)
    report.say(*copy_lines(rows), *targets.by_collective(measured))
    outcomes = targets.judge(measured)
    report.extra["targets"] = [outcome.facts() for outcome in outcomes]
    report.say("", *(targets.markdown if markdown else targets.text)(outcomes))
    if stage.size != 2:
        report.say(f"(the targets are those of 2 ranks; these are {stage.size})")


def _in_jobs_of_their_own(stage: Stage, report: Report, measured: Measured) -> None:
    starts = jobs.OnRank0(stage.referee, lambda: startup.measure(RANKS, 5))
    crowd = jobs.OnRank0(stage.referee, lambda: crowded(RANKS))
    measured.startup, measured.crowded = starts.value, [crowd.value] if crowd.value is not None else []
    measured.reasons = {name: each.reason for name, each in (("startup", starts), ("crowded", crowd)) if each.reason}
    if starts.value is not None:
        report.say(*starts.value.lines(RANKS))
        report.extra["startup"] = starts.value.facts()


def crowded(ranks: int, *options: str) -> Row:
    """8 B all_reduce in a job of so many ranks (rank 0 alone). Raises ChildFailed."""
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "rows.json")
        jobs.job(ranks, "-m", "mpicoll.bench", "all_reduce", "--sizes", "8", "--json", file, *options)
        facts = json.loads(Path(file).read_text())["rows"][0]
    times = {way: [us / 1e6 for us in found["rounds_us"]] for way, found in facts["ways"].items()}
    return Row(facts["what"], facts["bytes"], facts["ranks"], times, facts["dtype"], facts["op"])

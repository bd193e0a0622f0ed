"""Finds what each pair of mismatches.py ends in, and writes the table of docs/reference/faults.md.

    python -m tests.faults.mismatch_table              prints the table for the MPI of this environment
    python -m tests.faults.mismatch_table --write      writes it to the page, beside that of the other MPI

A pair that ends the job has a job of its own. The counts of each MPI are in docs/reference/mismatches.json.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from mpi4py import MPI

from tests.faults.mismatches import KINDS, Call, kind, pairs
from tests.support import ROOT, launch, pages

SCRIPT = str(ROOT / "tests" / "faults" / "scripts" / "mismatched.py")
PAGE, COUNTS = (ROOT / "docs" / "reference" / name for name in ("faults.md", "mismatches.json"))
NAME = "mismatches"  # of the table in the page

ALL_RAISE, NAMED, SOME_RAISE = "all ranks raise", "the job ends, both calls named", "some ranks raise"
BY_MPI, SILENT, OTHER = "MPI ends the job", "nothing said", "another end"
OUTCOMES = (ALL_RAISE, NAMED, SOME_RAISE, BY_MPI, SILENT)

# How the pairs are called: (size of the tensors, MPICOLL_CHECK).
MODES = {
    "small tensors": ("small", ""),
    "large tensors": ("large", ""),
    "small, `MPICOLL_CHECK=1`": ("small", "1"),
}
NAMES = re.compile(r"the ranks do not call the same\. Rank \d+: (\w+).*?\. Rank \d+: (\w+)")
NEW_NAMES = {"all_gather_into_tensor": "all_gather_single", "reduce_scatter_tensor": "reduce_scatter_single"}  # of torch


def outcome(pair: tuple[Call, Call], ranks: Sequence[str], stderr: str) -> str:
    """Returns what the ranks of a job have seen: ``ranks`` are their words, ``stderr`` is the job's, empty if it went on."""
    raised = [what.startswith("raised") for what in ranks]
    if all(raised):
        return ALL_RAISE
    named = {frozenset(found) for found in NAMES.findall(stderr)}
    if frozenset(NEW_NAMES.get(call.operation, call.operation) for call in pair) in named:
        return NAMED
    if any(raised):
        return SOME_RAISE
    if "Fatal error in internal_" in stderr:
        return BY_MPI
    return SILENT if all(what == "returned, went on" for what in ranks) else OTHER


def find(mode: str, indices: Sequence[int], ranks: int, door: str, **environ: str) -> dict[int, tuple[str, str]]:
    """Makes these pairs of calls. Returns the outcome of each one, and what was seen. ``environ``: of the jobs."""
    size, check = MODES[mode]
    all_pairs, found, left = pairs(large=size == "large"), dict[int, tuple[str, str]](), list(indices)
    while left:
        with tempfile.TemporaryDirectory() as name:
            command = [SCRIPT, door, size, name, *map(str, left)]
            try:
                done = launch(ranks, *command, env={**environ, **({"MPICOLL_CHECK": check} if check else {})}, timeout_s=100)
                stderr = done.stderr
            except pytest.fail.Exception as hang:
                stderr = str(hang)
            words = {
                index: [path.read_text() for rank in range(ranks) if (path := Path(name) / f"{index}-{rank}").exists()]
                for index in left
            }
        last = max((index for index in left if words[index]), default=None, key=left.index)
        if last is None:
            raise RuntimeError(f"the job did not begin:\n{stderr}")
        while left and (index := left.pop(0)) is not None:
            ends = outcome(all_pairs[index], words[index], stderr if index == last else "")
            found[index] = ends, "; ".join([*words[index], *stderr.splitlines()[:3]])
            if index == last:
                break
    return found


def find_all(mode: str, ranks: int = 2, door: str = "mpicoll", jobs: int = 3) -> dict[int, tuple[str, str]]:
    """The same for all pairs, in several jobs at a time, since they often wait."""
    indices = range(len(pairs()))
    with ThreadPoolExecutor(jobs) as pool:
        parts = list(pool.map(lambda start: find(mode, indices[start::jobs], ranks, door), range(jobs)))
    return {index: ends for part in parts for index, ends in part.items()}


def count(found: dict[int, tuple[str, str]]) -> dict[str, Counter[str]]:
    """Counts the outcomes of each kind of difference."""
    counts: dict[str, Counter[str]] = {name: Counter() for name in KINDS}
    for index, (ends, _) in found.items():
        counts[kind(*pairs()[index])][ends] += 1
    return counts


Counts = dict[str, dict[str, dict[str, dict[str, int]]]]  # MPI -> mode -> kind -> outcome -> pairs


def table(counts: Counts) -> str:
    """The counts in Markdown. A cell has the number of each MPI if they differ."""

    def cell(mode: str, name: str, ends: str) -> str:
        numbers = [str(counts[mpi][mode][name].get(ends, 0)) for mpi in sorted(counts, reverse=True)]
        return numbers[0] if len(set(numbers)) == 1 else " / ".join(numbers)

    others = sorted({e for modes in counts.values() for kinds in modes.values() for c in kinds.values() for e in c} - {*OUTCOMES})
    columns = [*OUTCOMES, *others]
    rows = [f"| calls | differ in | pairs | {' | '.join(columns)} |", "|---" * (3 + len(columns)) + "|"]
    sizes = Counter(kind(*pair) for pair in pairs())
    for mode in MODES:
        for name in KINDS:
            rows.append(f"| {mode} | {name} | {sizes[name]} | {' | '.join(cell(mode, name, ends) for ends in columns)} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="What every pair of mismatched collectives ends in.")
    parser.add_argument("--write", action="store_true", help="put the table into docs/reference/faults.md")
    options = parser.parse_args()
    vendor, version = MPI.get_vendor()
    mpi, modes = f"{vendor} {'.'.join(map(str, version))}", {}
    for mode in MODES:
        found = find_all(mode)
        modes[mode] = {name: dict(counter) for name, counter in count(found).items()}
        for index, (ends, seen) in sorted(found.items()):
            if ends not in (ALL_RAISE, NAMED):
                print(f"{mode}: {' / '.join(map(str, pairs()[index]))}: {ends}: {seen}", flush=True)
    if options.write:
        counts = {**pages.figures(COUNTS), mpi: modes}
        pages.publish(PAGE, NAME, table(counts), COUNTS, counts)
    print(table({mpi: modes}), end="")


if __name__ == "__main__":
    main()

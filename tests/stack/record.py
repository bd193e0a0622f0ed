"""Keeps what the tests of tests/stack and tests/nn have shown, and makes docs/reference/compatibility.md and docs/stack.md of it.

    python -m mpicoll.run -n 2 -m pytest tests/stack tests/nn --record     writes docs/stack/<torch>-<MPI>-<ranks>.json
                                                                  (adds to that file: remove it to begin anew)
    python -m tests.stack.record                                  prints the tables; --write puts them where they belong

A line of the table is a `feature` mark, of which a test may have several; its section is the mark's, or the test file's
``SECTION``. A line has passed if each of its tests that ran has. What torch cannot do on the CPU, whatever the backend, is a
test that calls `refused_alike`: the error, equal on Gloo, stands in a table of its own.
"""

import argparse
import json
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.support import ROOT

FOLDER = ROOT / "docs" / "stack"
SUMMARY = ROOT / "docs" / "reference" / "compatibility.md"
PASSED, FAILED = "passed", "failed"


def refused_alike(what: str, call: Callable[[Any], Any], node: Any, error: type[Exception] = Exception) -> str:
    """Calls ``call(group)`` with the MPI world and with a Gloo group of the same ranks; both must raise the same (collective).

    Args:   what: what torch cannot do, for the table. node: the pytest item (``request.node``), which keeps the record.
            error: the type that both must raise.
    Returns: the error's first line. Raises: AssertionError: one of them works, or they say different things.
    """
    said = {}
    for backend, group in (("mpi", dist.group.WORLD), ("gloo", dist.new_group(backend="gloo"))):
        try:
            call(group)
        except error as refusal:
            said[backend] = ": ".join([type(refusal).__name__, *str(refusal).strip().splitlines()[:1]])
        else:
            said[backend] = "no error"
    assert "no error" not in said.values(), said
    plain = {re.sub(r"\bmpicoll\b|\bmpi\b|\bgloo\b", "<backend>", text, flags=re.IGNORECASE) for text in said.values()}
    assert len(plain) == 1, said
    node.user_properties.append(("limit", (what, said["mpi"])))
    return said["mpi"]


class Recorder:
    """A pytest plugin for rank 0: collects, by section and feature, what became of the tests."""

    def __init__(self, mpi: str, ranks: int) -> None:
        self.mpi, self.ranks = mpi, ranks
        self.lines: dict[str, set[tuple[str, str]]] = {}  # test's id -> section, feature
        self.said: dict[str, dict[str, set[str]]] = {}
        self.limits: dict[str, str] = {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        for item in items:
            section = getattr(getattr(item, "module", None), "SECTION", None)
            marks = [(mark.kwargs.get("section", section), mark.args[0]) for mark in item.iter_markers("feature")]
            self.lines[item.nodeid] = {(section, feature) for section, feature in marks if section is not None}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when != "call" and report.passed:
            return
        what = PASSED if report.passed else FAILED
        if report.skipped:
            what = str(report.longrepr[2]).removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else "skipped"
        for section, feature in self.lines.get(report.nodeid, ()):
            self.said.setdefault(section, {}).setdefault(feature, set()).add(what)
        self.limits.update(dict(value for name, value in report.user_properties if name == "limit"))

    def pytest_sessionfinish(self) -> None:
        sections = {
            section: {feature: _sum(said) for feature, said in features.items()} for section, features in self.said.items()
        }
        FOLDER.mkdir(parents=True, exist_ok=True)
        version = torch.__version__.split("+")[0]
        path = FOLDER / f"{version}-{self.mpi.replace(' ', '')}-{self.ranks}.json"
        before = json.loads(path.read_text()) if path.exists() else {"sections": {}, "limits": {}}
        for section, features in before["sections"].items():  # a run of some files only adds to what others have shown
            sections[section] = {**features, **sections.get(section, {})}
        record = {"torch": version, "mpi": self.mpi, "ranks": self.ranks, "sections": sections}
        path.write_text(json.dumps({**record, "limits": {**before["limits"], **self.limits}}, indent=1) + "\n")


def _sum(said: set[str]) -> str:
    if FAILED in said:
        return FAILED
    return PASSED if PASSED in said else "; ".join(sorted(said))


def records() -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))]


# What the summary says of each section, in its own order.
SECTIONS = {
    "Data parallel": "DDP with its options, communication hooks, PowerSGD, join; ZeroRedundancyOptimizer, post-local SGD",
    "Fully sharded": "FSDP2 `fully_shard`, HSDP, mixed precision, CPU offload. Nothing tests FSDP1, which torch has deprecated",
    "Meshes and DTensor": "`init_device_mesh` 1D to 3D, every redistribute, DTensor operations with gradients, `split_group`",
    "Tensor and context parallel": "`parallelize_module`, sequence and loss parallel, ring attention; TP x DP x PP",
    "Pipelines": "GPipe, 1F1B, interleaved, BFS, zero bubble, DualPipeV; the tracer; stages in DDP and FSDP2",
    "Functional collectives and torch.compile": "`_functional_collectives`, `torch.distributed.nn`; inductor, fullgraph",
    "State": "distributed checkpoint (async, resharding), `state_dict`, elastic's `record`, objects of any size",
    "Mixed backends and debugging": "MPI and Gloo groups in one program, `DETAIL`, profiler spans, flight recorder, NaN check",
    "Autograd in the mpicoll API": "`mpicoll.nn`: collectives and messages with gradients, `Grid`, `halo_exchange`",
}


Columns = dict[tuple[str, str], list[dict[str, Any]]]


def columns(found: list[dict[str, Any]]) -> Columns:
    """The records of each torch and MPI, newest torch last, MPICH after Open MPI."""
    by_versions: Columns = {}
    for record in sorted(found, key=lambda r: (_numbers(r["torch"]), r["mpi"].startswith("MPICH"), r["ranks"])):
        by_versions.setdefault((record["torch"], record["mpi"]), []).append(record)
    return by_versions


def features(found: list[dict[str, Any]]) -> dict[str, list[str]]:
    """The lines of each section, in the order of the fullest record."""
    order: dict[str, list[str]] = {section: [] for section in SECTIONS}
    for record in sorted(found, key=lambda r: -sum(map(len, r["sections"].values()))):
        for section, lines in record["sections"].items():
            order[section].extend(line for line in lines if line not in order[section])
    return order


def summary(found: list[dict[str, Any]]) -> str:
    """A row for each section, in Markdown: how many of its lines passed, and on which numbers of ranks."""
    groups, order = columns(found), features(found)
    rows = [_header(groups)]
    for section, words in SECTIONS.items():
        cells = [_sum_cell(group, section, order[section]) for group in groups.values()]
        rows.append(f"| **{section}**: {words} | " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"


def details(found: list[dict[str, Any]]) -> str:
    """A row for each line of each section, in Markdown."""
    groups, order = columns(found), features(found)
    parts = []
    for section in SECTIONS:
        rows = [f"## {section}\n", _header(groups)]
        for feature in order[section]:
            rows.append(f"| {feature} | " + " | ".join(_cell(group, section, feature) for group in groups.values()) + " |")
        parts.append("\n".join(rows) + "\n")
    return "\n".join(parts)


def limits(found: list[dict[str, Any]]) -> str:
    """What torch refused on Gloo, too, with its words, in Markdown."""
    versions: dict[tuple[str, str], list[str]] = {}
    for record in sorted(found, key=lambda r: _numbers(r["torch"])):
        for what, error in record["limits"].items():
            seen = versions.setdefault((what, error), [])
            if record["torch"] not in seen:
                seen.append(record["torch"])
    rows = ["| | torch | its error |", "|---|---|---|"]
    for (what, error), seen in sorted(versions.items()):
        text = error.replace("|", "\\|").replace("`", "'")
        rows.append(f"| {what} | {', '.join(seen)} | `{text[:160]}` |")
    return "\n".join(rows) + "\n"


def _header(groups: Columns) -> str:
    names = " | ".join(f"torch {version}, {mpi}" for version, mpi in groups)
    return f"| | {names} |\n{'|---' * (len(groups) + 1)}|"


def _sum_cell(group: list[dict[str, Any]], section: str, lines: list[str]) -> str:
    said = {r["ranks"]: [r["sections"].get(section, {}).get(line) for line in lines] for r in group}
    failed = [line for line, *answers in zip(lines, *said.values(), strict=True) if FAILED in answers]
    if failed:
        return f"**{len(failed)} fail**"
    passed = sum(PASSED in answers for answers in zip(*said.values(), strict=True))
    ranks = [str(number) for number, answers in said.items() if PASSED in answers]
    return f"{passed} of {len(lines)}, on {', '.join(ranks)}" if passed else "-"


def _cell(group: list[dict[str, Any]], section: str, feature: str) -> str:
    """The numbers of ranks on which it passed; else why not."""
    said = {record["ranks"]: record["sections"].get(section, {}).get(feature) for record in group}
    if FAILED in said.values():
        return "**fails** on " + ", ".join(str(ranks) for ranks, what in said.items() if what == FAILED)
    passed = [str(ranks) for ranks, what in said.items() if what == PASSED]
    return ", ".join(passed) or next((what for what in said.values() if what), "-")


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


BEGIN, END = "<!-- stack -->\n", "<!-- /stack -->"
DETAILS = ROOT / "docs" / "stack.md"
HEAD = """\
# PyTorch features on the `mpi` backend: all checks

Each line is one or more tests of `tests/stack` and `tests/nn`, which compare the result with one process or with Gloo. A cell has
the numbers of ranks on which all of a line's tests passed (1: among them those that start jobs of their own), or why they did not
run. Made by `python -m tests.stack.record --write` of the records in [stack/](stack), which `--record` writes when the tests run.

"""
LIMITS = """
## What PyTorch itself cannot do on the CPU

The error is the same on MPI and on Gloo.

"""


def for_summary(found: list[dict[str, Any]]) -> str:
    """Between the marks of docs/reference/compatibility.md."""
    return summary(found) + LIMITS + limits(found)


def for_docs(found: list[dict[str, Any]]) -> str:
    return HEAD + details(found) + LIMITS + limits(found)


def in_summary() -> str:
    return SUMMARY.read_text().split(BEGIN)[1].split(END)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description="prints the tables of what was tested on MPI, from docs/stack/*.json")
    parser.add_argument(
        "--write",
        action="store_true",
        help="put them between the two marks of docs/reference/compatibility.md, and into docs/stack.md",
    )
    found = records()
    if parser.parse_args().write:
        before, rest = SUMMARY.read_text().split(BEGIN)
        SUMMARY.write_text(before + BEGIN + for_summary(found) + END + rest.split(END)[1])
        DETAILS.write_text(for_docs(found))
    else:
        print(for_docs(found), end="")


if __name__ == "__main__":
    main()

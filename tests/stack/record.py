"""Keeps what the tests of tests/stack have shown, and makes the README's table of it.

    python -m mpicoll.run -n 2 -m pytest tests/stack --record     writes docs/stack/<torch>-<MPI>-<ranks>.json
    python -m tests.stack.record                                  prints the tables; --write puts them into README.md

A line of the table is a `feature` mark; its section is the test file's ``SECTION``. A line has passed if each of its tests
that ran has. What torch cannot do on the CPU, whatever the backend, is a test that calls `refused_alike`: the error, equal
on Gloo, stands in the second table.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.support import ROOT

FOLDER = ROOT / "docs" / "stack"
README = ROOT / "README.md"
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
        self.lines: dict[str, tuple[str, str]] = {}  # test's id -> section, feature
        self.said: dict[str, dict[str, set[str]]] = {}
        self.limits: dict[str, str] = {}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        for item in items:
            mark = item.get_closest_marker("feature")
            section = getattr(getattr(item, "module", None), "SECTION", None)
            if mark is not None and section is not None:
                self.lines[item.nodeid] = (section, mark.args[0])

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.nodeid not in self.lines or (report.when != "call" and report.passed):
            return
        section, feature = self.lines[report.nodeid]
        what = PASSED if report.passed else FAILED
        if report.skipped:
            what = str(report.longrepr[2]).removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else "skipped"
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


def tables(found: list[dict[str, Any]]) -> str:
    """Both tables, in Markdown."""
    columns: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for record in sorted(found, key=lambda r: (_numbers(r["torch"]), r["mpi"].startswith("MPICH"), r["ranks"])):
        columns.setdefault((record["torch"], record["mpi"]), []).append(record)
    order: dict[str, list[str]] = {}
    for record in sorted(found, key=lambda r: -sum(map(len, r["sections"].values()))):
        for section, features in record["sections"].items():
            known = order.setdefault(section, [])
            known.extend(feature for feature in features if feature not in known)
    lines = [
        "| | " + " | ".join(f"torch {version}, {mpi}" for version, mpi in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for section in sorted(order):
        lines.append(f"| **{section}** |" + " |" * len(columns))
        for feature in order[section]:
            cells = [_cell(group, section, feature) for group in columns.values()]
            lines.append(f"| {feature} | " + " | ".join(cells) + " |")
    limits: dict[tuple[str, str], list[str]] = {}
    for record in sorted(found, key=lambda r: _numbers(r["torch"])):
        for what, error in record["limits"].items():
            versions = limits.setdefault((what, error), [])
            if record["torch"] not in versions:
                versions.append(record["torch"])
    lines += [
        "",
        "What torch itself cannot do on the CPU (the same error on Gloo):",
        "",
        "| | torch | its error |",
        "|---|---|---|",
    ]
    for (what, error), versions in sorted(limits.items()):
        text = error.replace("|", "\\|").replace("`", "'")
        lines.append(f"| {what} | {', '.join(versions)} | `{text[:160]}` |")
    return "\n".join(lines) + "\n"


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


def in_readme() -> str:
    return README.read_text().split(BEGIN)[1].split(END)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description="prints the tables of what stands on MPI, from docs/stack/*.json")
    parser.add_argument("--write", action="store_true", help="put them into README.md, between the two marks")
    text = tables(records())
    if parser.parse_args().write:
        before, rest = README.read_text().split(BEGIN)
        README.write_text(before + BEGIN + text + END + rest.split(END)[1])
    else:
        print(text, end="")


if __name__ == "__main__":
    main()

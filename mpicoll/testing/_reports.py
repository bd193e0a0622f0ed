"""What became of a phase of a test on each rank, and the one report that all ranks make of it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from mpicoll._base.facts import ranks_in_words

OUT_OF_STEP = "out of step"
STRICT = "[XPASS(strict)]"  # how pytest begins the report of a test that was expected to fail, and has passed
KEPT = ("$report_type", "nodeid", "location", "outcome", "longrepr", "when")  # of a report, as it travels
MOST = 4  # failures that differ are shown in full; of more, a line each


@dataclass(frozen=True)
class Outcome:
    """What became of one phase on one rank."""

    kind: str  # passed, failed, skipped, xfailed, xpassed, strict (xpassed where that is a failure)
    duration_s: float = 0.0
    reason: str = ""  # of a skip or an expected failure
    crash: str = ""  # place and message of the exception: equal on two ranks means that the failures are the same
    headline: str = ""
    captured: str = ""
    data: dict[str, Any] = field(default_factory=dict)  # the report, for the terminal of rank 0

    @staticmethod
    def of(report: pytest.TestReport, config: pytest.Config) -> Outcome:
        expected = getattr(report, "wasxfail", None)
        if expected is not None and not report.failed:
            return Outcome("xfailed" if report.skipped else "xpassed", report.duration, expected)
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            return Outcome("skipped", report.duration, reason.removeprefix("Skipped: "))
        if not report.failed:
            return Outcome("passed", report.duration)
        text = report.longreprtext
        where = getattr(report.longrepr, "reprcrash", None)
        headline = where.message if where else (text.splitlines() or ["failed"])[-1]
        data = config.hook.pytest_report_to_serializable(config=config, report=report)
        return Outcome(
            "strict" if text.startswith(STRICT) else "failed",
            report.duration,
            crash=f"{where.path}:{where.lineno}: {where.message}" if where else text,
            headline=headline,
            captured=show(report.sections),
            data={name: data[name] for name in KEPT} | {"keywords": {}, "sections": []},
        )

    def longrepr(self, config: pytest.Config) -> Any:
        return config.hook.pytest_report_from_serializable(config=config, data=copy.deepcopy(self.data)).longrepr


def name(item: pytest.Item) -> str:
    """The test, equal on all ranks. Some projects put the rank into ``nodeid``."""
    file, _, function = item.location
    return f"{file}::{function}"


def show(sections: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f"--- {name} ---\n{content}" for name, content in sections)


class JointRepr:
    """The failures of all ranks, as pytest prints one failure; what is the same on several ranks is shown once."""

    def __init__(self, failures: dict[int, Outcome], config: pytest.Config, size: int) -> None:
        groups: dict[str, list[int]] = {}
        for rank, failure in failures.items():
            groups.setdefault(failure.crash, []).append(rank)
        # Those that merely were alone in an `agree` come last: they are a consequence.
        ordered = sorted(groups.values(), key=lambda ranks: (OUT_OF_STEP in failures[ranks[0]].headline, ranks))
        self.parts = [(ranks_in_words(ranks), failures[ranks[0]]) for ranks in ordered]
        self.config = config
        first, failure = self.parts[0]
        self.reprcrash = SimpleNamespace(message=f"{first}: {failure.headline}")  # pytest's short summary and JUnit read it

    def toterminal(self, out: Any) -> None:
        for name, failure in self.parts[:MOST]:
            out.line(f"{name}:", bold=True, red=True)
            shown = failure.longrepr(self.config) if failure.data else failure.headline
            shown.toterminal(out) if hasattr(shown, "toterminal") else out.line(str(shown))
        for name, failure in self.parts[MOST:]:
            out.line(f"{name}: {failure.headline.splitlines()[0]}")

    def __str__(self) -> str:
        parts = [
            f"{name}:\n{failure.longrepr(self.config) if failure.data else failure.headline}" for name, failure in self.parts
        ]
        return "\n".join(parts)


def join(report: pytest.TestReport, outcomes: Sequence[Outcome], rank: int, config: pytest.Config) -> None:
    """Makes this rank's report that of all ranks.

    Failed on one rank is failed on all. Skipped in the setup of one rank is skipped on all. Expected to fail, and failed on one
    rank, is failed as expected. A test that one rank skips in its body, and others do not, has failed.
    """
    report.duration = max(each.duration_s for each in outcomes)
    own = outcomes[rank]
    kinds = {each.kind for each in outcomes}
    if kinds == {own.kind} and own.kind not in ("failed", "strict"):
        return
    failures = {r: each for r, each in enumerate(outcomes) if each.kind == "failed"}
    first = {each.kind: (r, each) for r, each in reversed(list(enumerate(outcomes)))}
    if not failures and "xfailed" in kinds:
        _become(report, "skipped", None, wasxfail=first["xfailed"][1].reason)
        return
    if not failures and "skipped" in kinds and report.when != "call":
        skipped = [r for r, each in enumerate(outcomes) if each.kind == "skipped"]
        location = (report.location[0], (report.location[1] or 0) + 1)
        _become(report, "skipped", (*location, f"Skipped: {ranks_in_words(skipped)}: {first['skipped'][1].reason}"))
        return
    if not failures and "strict" in kinds:
        failures = {r: each for r, each in enumerate(outcomes) if each.kind == "strict"}
    if not failures:
        text = f"{OUT_OF_STEP}: " + _by_kind(outcomes)
        failures = {r: Outcome("failed", crash=text, headline=text) for r in range(len(outcomes))}
    _become(report, "failed", JointRepr(failures, config, len(outcomes)))
    for r, each in enumerate(outcomes):
        if r != rank and each.captured:
            report.sections.append((f"Captured on rank {r}", each.captured))


def _become(report: pytest.TestReport, outcome: str, longrepr: Any, **more: Any) -> None:
    report.outcome = outcome  # type: ignore[assignment]
    report.longrepr = longrepr
    vars(report).pop("wasxfail", None)
    vars(report).update(more)


def _by_kind(outcomes: Sequence[Outcome]) -> str:
    """For example: skipped on rank 1 (no file), passed on ranks 0, 2."""
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, each in enumerate(outcomes):
        ranks.setdefault((each.kind, each.reason), []).append(rank)
    words = [f"{kind} on {ranks_in_words(some)}{f' ({reason})' if reason else ''}" for (kind, reason), some in ranks.items()]
    return f"{', '.join(words)}; the ranks of a test must skip it together"

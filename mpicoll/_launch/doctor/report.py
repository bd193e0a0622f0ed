"""The doctor's report: findings, each one sentence with its evidence and a remedy."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

MARKS = {"ok": "ok  ", "note": "note", "fail": "FAIL"}


@dataclass(frozen=True)
class Finding:
    """One sentence of the report.

    Args:
        state: "ok", "note" (it works, but could be better) or "fail" (something will not work).
        remedy: What to do; empty if ``text`` says it, or for "ok".
    """

    state: str
    topic: str
    text: str
    evidence: tuple[str, ...] = ()
    remedy: str = ""


@dataclass
class Report:
    findings: list[Finding] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def works(self) -> bool:
        return all(finding.state != "fail" for finding in self.findings)

    def as_json(self) -> str:
        return json.dumps({"works": self.works, **asdict(self)}, indent=2)

    def as_text(self, fine: str = "everything needed is here", wrong: str = "will not work") -> str:
        """The findings, and one sentence on all of them: ``fine``, or how many things are ``wrong``."""
        lines = []
        for finding in self.findings:
            lines.append(f"{MARKS[finding.state]}  {finding.topic}: {finding.text}")
            lines += [f"      {line}" for line in finding.evidence]
            lines += [f"      -> {finding.remedy}"] if finding.remedy else []
        failed = sum(finding.state == "fail" for finding in self.findings)
        lines.append(fine if self.works else f"{failed} thing{'s' * (failed > 1)} {wrong}; see FAIL above")
        return "\n".join(lines)


def size_in_words(nbytes: int) -> str:
    """Returns "1.5 GiB", "16 MiB" or "8 bytes"."""
    if nbytes >= 2**30:
        return f"{nbytes / 2**30:.1f} GiB"
    return f"{nbytes / 2**20:.0f} MiB" if nbytes >= 2**20 else f"{nbytes} bytes"

"""docs/reference/semantics.md cites the numbers of docs/traps.md, which names the tests."""

from __future__ import annotations

import re

from tests.support import ROOT

NUMBERS = re.compile(r"\d+a?(?:, \d+a?)*")


def test_the_cited_traps_exist() -> None:
    traps = set(re.findall(r"^\| (\d+a?) \|", (ROOT / "docs/traps.md").read_text(), re.MULTILINE))
    page = (ROOT / "docs/reference/semantics.md").read_text()
    last_cells = (line.rstrip(" |").rpartition("| ")[2] for line in page.splitlines() if line.startswith("| "))
    cited = [number for cell in last_cells if NUMBERS.fullmatch(cell) for number in cell.split(", ")]
    assert len(cited) > 25
    assert set(cited) <= traps

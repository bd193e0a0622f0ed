"""The tables of what stands on MPI say what the records say."""

from __future__ import annotations

from typing import Any

import pytest

from tests.stack import record

FOUND = record.records()


def made(torch: str, mpi: str, ranks: int, limits: dict[str, str] | None = None, **sections: dict[str, str]) -> dict[str, Any]:
    return {"torch": torch, "mpi": mpi, "ranks": ranks, "sections": sections, "limits": limits or {}}


def test_the_summary_shows_the_records() -> None:
    assert record.in_summary() == record.for_summary(FOUND), "run: python -m tests.stack.record --write"


def test_the_lines_show_the_records() -> None:
    assert record.DETAILS.read_text() == record.for_docs(FOUND), "run: python -m tests.stack.record --write"


def test_nothing_on_record_fails() -> None:
    failed = [
        (r["torch"], r["mpi"], r["ranks"], line)
        for r in FOUND
        for lines in r["sections"].values()
        for line, said in lines.items()
        if said == record.FAILED
    ]
    assert not failed


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_is_recorded(ranks: int) -> None:
    """The oldest, the pinned and the newest torch."""
    assert {r["torch"][:4] for r in FOUND if r["ranks"] == ranks and r["mpi"].startswith("Open MPI")} >= {"2.11", "2.13", "2.15"}


def test_cells() -> None:
    """Passed somewhere, not everywhere; failed; never run."""
    old = [
        made("2.9.1", "Open MPI 5", 4, State={"a": "passed", "b": "needs torch >= 2.10"}),
        made("2.9.1", "Open MPI 5", 2, State={"a": "passed"}, limits={"x|y": "TypeError: a|b `c`"}),
    ]
    new = [
        made("2.10.0", "Open MPI 5", 2, State={"a": "passed", "b": "failed"}),
        made("2.10.0", "MPICH 5", 2, State={"b": "passed"}, limits={"x|y": "TypeError: a|b `c`"}),
    ]
    found = [*new, *old]
    assert list(record.columns(found)) == [("2.9.1", "Open MPI 5"), ("2.10.0", "Open MPI 5"), ("2.10.0", "MPICH 5")]
    row = next(line for line in record.summary(found).splitlines() if line.startswith("| **State**"))
    assert [cell.strip() for cell in row.split("|")[2:-1]] == ["1 of 2, on 2, 4", "**1 fail**", "1 of 2, on 2"]
    text = record.details(found)
    assert "| a | 2, 4 | 2 | - |" in text
    assert "| b | needs torch >= 2.10 | **fails** on 2 | 2 |" in text
    assert r"| 2.9.1, 2.10.0 | `TypeError: a\|b 'c'` |" in record.limits(found)

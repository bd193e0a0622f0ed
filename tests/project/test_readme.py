"""The README is short. tests/docs runs its demo, and looks at its commands."""

from __future__ import annotations

from tests.support import ROOT

TEXT = (ROOT / "README.md").read_text()
LONGEST = 130  # lines


def test_it_is_short_and_has_the_text_that_people_search_for() -> None:
    assert TEXT.count("\n") <= LONGEST
    assert "Distributed package doesn't have MPI built in" in TEXT

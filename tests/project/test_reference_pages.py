"""What the pages list is what there is: tables made of the source, tests named beside traps, recipes for srun."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs import reference
from tests.support import ROOT


@pytest.mark.parametrize("page", reference.PAGES, ids=lambda page: page.stem)
def test_the_tables_are_made_of_the_source(page: Path) -> None:
    text = page.read_text()
    assert reference.made(text) == text, "`python -m tests.docs.reference` makes the tables anew"


def test_every_table_is_on_a_page() -> None:
    named = [field for page in reference.PAGES for _, field, _ in reference.FIELD.findall(page.read_text())]
    assert sorted(named) == sorted(reference.FIELDS)


def test_the_tests_that_prove_a_trap_are_there() -> None:
    rows = re.findall(r"^\| \d.*\|(.*)\|$", (ROOT / "docs/traps.md").read_text(), re.MULTILINE)
    named = [test.strip() for cell in rows for test in cell.split(",") if test.strip() != "-"]
    assert len(named) > 100
    assert not [test for test in named if not list((ROOT / "tests").glob(f"{test}*"))]


def test_every_srun_ends_the_step_if_a_rank_fails() -> None:
    """Without -K, ranks that have not met in MPI yet wait for ever for one that has ended."""
    files = [
        *ROOT.glob("README*.md"),
        *(file for folder in ("docs", "examples", "hostfiles") for file in (ROOT / folder).rglob("*")),
    ]
    texts = [file.read_text() for file in files if file.suffix in (".md", ".py", ".sh", ".sbatch")]
    commands = [command for text in texts for command in re.findall(r"srun -[^`|\n]*python[^`|\n]*", text)]
    assert len(commands) >= 8
    assert [command for command in commands if not re.search(r" (-K|--kill-on-bad-exit)\b", command)] == []

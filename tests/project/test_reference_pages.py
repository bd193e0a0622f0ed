"""The tables of options and of settings are those of the parsers and of mpicoll/_config.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpicoll import _config
from tests.docs import reference


@pytest.mark.parametrize("page", reference.PAGES, ids=lambda page: page.stem)
def test_the_tables_are_made_of_the_source(page: Path) -> None:
    text = page.read_text()
    assert reference.made(text) == text, "`python -m tests.docs.reference` makes the tables anew"


def test_every_table_is_on_a_page() -> None:
    named = [field for page in reference.PAGES for _, field, _ in reference.FIELD.findall(page.read_text())]
    assert sorted(named) == sorted(reference.FIELDS)


def test_the_tables_have_what_a_user_types() -> None:
    commands, settings = (page.read_text() for page in reference.PAGES[:2])
    for option in ("`-n`", "`--hostfile`", "`--dry-run`", "`--run`", "`--torch`", "`--impl`", "`tune`"):
        assert option in commands
    assert all(f"`{variable.name}`" in settings for variable in _config.VARIABLES)

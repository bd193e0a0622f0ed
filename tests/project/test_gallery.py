"""docs/examples.md lists every example, and the pages in docs/examples show each with its output and its source."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.docs.programs import PAGES, PROGRAMS
from tests.docs.test_pages import CONSOLES
from tests.support import ROOT

GALLERY = ROOT / "docs" / "examples.md"
SOURCE = re.compile(r"^Source: (.*)$", re.MULTILINE)
LINK = re.compile(r"\[([^]]+)\]\(([^)]+)\)")


def sections(page: Path) -> dict[str, str]:
    """The text of each section of a page, by its heading."""
    _, *parts = re.split(r"^## (.*)\n", page.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def anchor(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


ALL = [(page, heading, text) for page in PAGES for heading, text in sections(page).items()]


def test_the_pages_link_to_every_file() -> None:
    files = {path for path in (ROOT / "examples").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    linked = {(page.parent / target).resolve() for page in PAGES for _, target in LINK.findall(page.read_text())}
    assert not files - linked


@pytest.mark.parametrize(("heading", "text"), [case[1:] for case in ALL], ids=[case[1] for case in ALL])
def test_a_section_has_the_source_of_what_it_runs(heading: str, text: str) -> None:
    run = set(re.findall(r"examples/[\w/]+\.py", "".join(re.findall(r"^\$ .*\n", text, re.MULTILINE))))
    sources = {name for line in SOURCE.findall(text) for name, _ in LINK.findall(line)}
    assert run <= sources


def test_the_gallery_lists_every_section_in_order() -> None:
    rows = re.findall(r"^\| \[([^]]+)\]\(examples/(\S+)\) \|", GALLERY.read_text(), re.MULTILINE)
    listed = [(name, target) for name, target in rows if "#" in target]
    expected = {page.name: [(name, f"{page.name}#{anchor(name)}") for name in sections(page)] for page in PAGES}
    pages = [target for _, target in rows if "#" not in target]
    assert sorted(pages) == sorted(expected)
    assert listed == [row for page in pages for row in expected[page]]


def test_commands_that_run_examples_stand_on_these_pages() -> None:
    """Tests of this folder run them. test_pages.py leaves them out."""
    assert {job.page for console in CONSOLES for job in console if job.runs_example} <= set(PAGES)


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_an_example_leaves_its_output_to_its_page(path: Path) -> None:
    assert "\nOutput" not in (ast.get_docstring(ast.parse(path.read_text())) or "")

"""A translated page has the code of its original, block by block, its headings, links and figures.

The third line of a translation begins with a link to the original, "[English](...)"; other links of that line are its own. Where
a target has a translation, a translated page links to that. Blocks are copied as they are, with their comments. tests/docs runs
those of the original.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from itertools import zip_longest
from pathlib import Path

import pytest

from tests.support import ROOT

BLOCK = re.compile(r"^(?:<!-- numbers vary -->\n)?( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
TO_ORIGINAL = re.compile(r"^\[English\]\(([^)]+)\).*$", re.MULTILINE)
WRITTEN_IN_CHINESE = {"docs/zh/glossary.md"}  # pages without an original


def path(page: Path, target: str) -> str:
    """Where a link of a page leads, from the root of the repository."""
    return target if "://" in target else os.path.relpath(page.parent / target, ROOT)


def originals() -> dict[str, str]:
    """The original of each translation."""
    found = {}
    for page in [*ROOT.glob("README.*.md"), *(ROOT / "docs/zh").rglob("*.md")]:
        if (name := str(page.relative_to(ROOT))) not in WRITTEN_IN_CHINESE:
            link = TO_ORIGINAL.match(page.read_text().split("\n", 2)[2])
            assert link is not None, f"{name}: line 3 is to begin with [English](the original)"
            found[name] = path(page, link[1])
    return dict(sorted(found.items()))


ORIGINALS = originals()
TRANSLATIONS = {original: page for page, original in ORIGINALS.items()}


def blocks(name: str) -> list[str]:
    """The fenced blocks of a page: code, commands with what they print, drawings. Not the contents of the site."""
    found = (match[0] for match in BLOCK.finditer((ROOT / name).read_text()))
    return [block for block in found if not block.startswith("```{toctree}")]


def prose(name: str) -> str:
    return BLOCK.sub("", TO_ORIGINAL.sub("", (ROOT / name).read_text()))


def links(name: str) -> list[str]:
    found = (path(ROOT / name, target) for target in re.findall(r"\]\(([^)\s]+)\)", prose(name)))
    return [TRANSLATIONS.get(target, target) for target in found if TRANSLATIONS.get(name) != target]


def names(name: str) -> set[str]:
    return set(re.findall(r"`[^`\n]+`", prose(name)))


def figures(name: str) -> set[str]:
    return set(re.findall(r"\d+(?:[.,]\d+)*", re.sub(r"`[^`]+`|\]\([^)]*\)", "", prose(name))))


def test_there_are_translations() -> None:
    """In another place none would be found, and all would pass."""
    assert "README.zh-CN.md" in ORIGINALS


@pytest.mark.parametrize(("page", "original"), ORIGINALS.items())
def test_the_blocks_are_those_of_the_original(page: str, original: str) -> None:
    for number, (block, expected) in enumerate(zip_longest(blocks(page), blocks(original)), 1):
        assert block == expected, f"block {number} of {page} is not that of {original}: copy it from there"


@pytest.mark.parametrize(("page", "original"), ORIGINALS.items())
def test_the_text_has_the_shape_of_the_original(page: str, original: str) -> None:
    for what, pattern in {"headings": r"^#+ ", "paragraphs and items": r"\n\n(?=\S)|^ *(?:-|\d\.) ", "rows": r"^\|"}.items():
        here, there = (re.findall(pattern, prose(name), re.MULTILINE) for name in (page, original))
        assert here == there, f"{what} of {page} and {original}"
    for what, collect in {"links": links, "names": names, "figures": figures}.items():
        here, there = Counter(collect(page)), Counter(collect(original))
        lacks, has = sorted(there - here), sorted(here - there)
        assert not lacks + has, f"{what} in the text of {page}, not those of {original}: lacks {lacks}, has {has}"

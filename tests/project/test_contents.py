"""docs/index.md lists every page of the site once. (Sphinx says so as well, but only in `bash .ci/run docs`.)"""

from __future__ import annotations

import re

from tests.support import ROOT

DOCS = ROOT / "docs"
ELSEWHERE = {"README", "index"}  # GitHub's map, and the page itself


def listed() -> list[str]:
    """The pages in the order of the contents. A pattern stands for those that its section has not named before."""
    found: list[str] = []
    for index in (DOCS / "index.md", DOCS / "reference/api/index.md"):
        for section in re.findall(r"^```\{toctree\}\n(.*?)^```$", index.read_text(), re.MULTILINE | re.DOTALL):
            named: list[str] = []
            for entry in re.findall(r"^[\w/*-]+$", section, re.MULTILINE):
                pages = sorted(index.parent.glob(f"{entry}.md"))
                assert pages, f"{index}: there is no page {entry}"
                named += [name for page in pages if (name := str(page.relative_to(DOCS).with_suffix(""))) not in named]
            found += named
    return found


def test_each_page_is_listed_once() -> None:
    pages = {str(page.relative_to(DOCS).with_suffix("")) for page in DOCS.rglob("*.md") if "recipes" not in page.parts}
    contents = listed()
    assert set(contents) == pages - ELSEWHERE
    assert len(contents) == len(set(contents))

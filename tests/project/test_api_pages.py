"""docs/reference/api names every public name that mpicoll defines, once, and no other."""

from __future__ import annotations

import re

import pytest

import mpicoll
import mpicoll.autograd
import mpicoll.nn
import mpicoll.optim
import mpicoll.rpc
from tests.support import ROOT

PAGES = ROOT / "docs/reference/api"
DIRECTIVE = re.compile(r"^\.\. auto(?:function|class|exception):: (\S+)$", re.MULTILINE)


def test_there_are_pages_for_all_packages() -> None:
    assert {path.stem for path in PAGES.glob("*.md")} == {"index", "mpicoll", "nn", "rpc", "autograd", "optim"}


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("mpicoll", {*mpicoll.OURS}),
        ("nn", {*mpicoll.nn.OURS} - {"functional", "_all_gather_base"}),
        ("rpc", {*mpicoll.rpc.__all__} - {"api", "constants", "functions", "options"}),
        ("autograd", {*mpicoll.autograd.__all__}),
        ("optim", {*mpicoll.optim.__all__}),
    ],
)
def test_a_page_has_all_names(page: str, names: set[str]) -> None:
    """In a directive, or in the text where another name, or an object of torch, is all there is to say."""
    text = (PAGES / f"{page}.md").read_text()
    documented = DIRECTIVE.findall(text)
    inner = {name for name in documented if "." in name}  # what public functions return or need
    mentioned = {name for name in names if f"`{name}`" in text}
    assert len(documented) == len(set(documented))
    missing = names - set(documented) - mentioned
    assert not missing, f"add to docs/reference/api/{page}.md: {missing}"
    assert set(documented) - inner <= names

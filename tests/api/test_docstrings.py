"""The examples in the docstrings of our public functions, run on two ranks."""

from __future__ import annotations

import doctest
import inspect

import pytest
import torch

import mpicoll
from tests.support import agree

FUNCTIONS = sorted(name for name, home in mpicoll.OURS.items() if home.startswith("mpicoll._api") and name != "P2POp")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_docstring_is_google_style(name: str) -> None:
    function = getattr(mpicoll, name)
    text = inspect.getdoc(function) or ""
    assert text.splitlines()[0].endswith(".") or text.splitlines()[0].endswith(":"), text.splitlines()[0]
    for parameter, value in inspect.signature(function).parameters.items():
        if value.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY):
            assert f"\n    {parameter}" in text or f", {parameter}: " in text or f"{parameter}, " in text, parameter


@pytest.mark.usefixtures("world")
@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if ">>>" in (getattr(mpicoll, name).__doc__ or "")])
def test_an_example_runs(name: str) -> None:
    tests = doctest.DocTestFinder(recurse=False).find(getattr(mpicoll, name), name, globs={"dist": mpicoll, "torch": torch})
    output: list[str] = []
    failed = sum(doctest.DocTestRunner(verbose=False).run(test, out=output.append).failed for test in tests)
    agree(len(tests) == 1 and not failed, "".join(output))

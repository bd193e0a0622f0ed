"""What tests and examples import from mpicoll exists, in the programs that they keep as text, too."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support import ROOT

IMPORT = re.compile(r"\bfrom (mpicoll[\w.]*) import (\w+(?: as \w+)?(?:, \w+(?: as \w+)?)*)")


def imported(path: Path) -> Iterator[tuple[int, str, str]]:
    """Line, module and name of each import from mpicoll, wherever it is written."""
    for number, line in enumerate(path.read_text().splitlines(), 1):
        for module, names in IMPORT.findall(line):
            yield from ((number, module, name.split(" as ")[0]) for name in names.split(", "))


def exists(module: str, name: str) -> bool:
    try:
        if hasattr(importlib.import_module(module), name):
            return True
        importlib.import_module(f"{module}.{name}")
    except ImportError:
        return False
    return True


def test_names_are_there() -> None:
    """A program in a string is compiled where it runs, in a launch test. (One named a module that had gone.)"""
    paths = [path for folder in ("tests", "examples") for path in sorted((ROOT / folder).rglob("*.py"))]
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {module} has no {name}"
        for path in paths
        for line, module, name in imported(path)
        if not exists(module, name)
    ]
    assert not wrong, "\n".join(wrong)

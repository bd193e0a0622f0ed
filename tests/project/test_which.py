"""Each module of mpicoll has tests that tests/which.py names, and each trap of docs/traps.md names tests that are there."""

from __future__ import annotations

import re

from tests.project.sources import MODULES, name
from tests.support import ROOT
from tests.which import COVERED_BY, which


def test_every_module_has_tests() -> None:
    found = {name(module): which(module) for module in MODULES}
    assert all(found.values())
    assert not [f"{module}: {test}" for module, tests in found.items() for test in tests if not (ROOT / test).exists()]


def test_the_table_names_rooms_that_are_there() -> None:
    rooms = {path.name for path in (ROOT / "mpicoll").iterdir() if path.is_dir()}
    modules = {path.stem for path in (ROOT / "mpicoll").glob("*.py")}
    assert not set(COVERED_BY) - rooms - modules


def test_importers_come_first() -> None:
    tests = which(ROOT / "mpicoll" / "_host" / "thresholds.py")
    assert tests.index("tests/host/test_thresholds.py") < tests.index("tests/host")


def test_traps_name_tests() -> None:
    cells = [line.split("|")[-2] for line in (ROOT / "docs" / "traps.md").read_text().splitlines() if re.match(r"\| \d", line)]
    named = [test.strip() for cell in cells for test in cell.split(",") if test.strip() != "-"]
    assert len(named) > 100
    assert not [test for test in named if not list((ROOT / "tests").glob(f"{test}*"))]

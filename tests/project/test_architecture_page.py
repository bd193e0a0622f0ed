"""docs/architecture.md says what is there: its rooms, paths, functions, threads and locks. docs/glossary.md: its links."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.project.sources import MODULES, PACKAGE, room, tree
from tests.project.test_architecture import ORDER
from tests.support import ROOT

TEXT = (ROOT / "docs/architecture.md").read_text()
LONGEST = 250  # lines
SPANS = re.findall(r"`([^`\n]+)`", TEXT)
PATHS = sorted({span for span in SPANS if re.fullmatch(r"[\w./]+/[\w./]*|[\w./]+\.(py|md)", span)})
FUNCTIONS = sorted({(pair[1], pair[2]) for span in SPANS if (pair := re.fullmatch(r"([\w./]+\.py): ([\w.]+)", span))})
TERMS = re.findall(r"^\| \*\*(.+?)\*\* \|.*\|$", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)


def find(path: str) -> Path | None:
    return next((base / path for base in (PACKAGE, ROOT) if (base / path).exists()), None)


@cache
def defined(path: Path) -> frozenset[str]:
    """The names that a file defines at its top and in its classes, such as ``Group.run``."""
    names = set[str]()
    for node in tree(path).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            names.update(ast.unparse(target) for target in getattr(node, "targets", None) or [node.target])  # type: ignore[union-attr]
        if isinstance(node, ast.ClassDef):
            names.update(f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef))
    return frozenset(names)


def section(title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", TEXT, re.MULTILINE | re.DOTALL)
    assert found is not None, f"docs/architecture.md has no section {title!r}"
    return found[1]


def test_it_is_short() -> None:
    assert TEXT.count("\n") <= LONGEST


@pytest.mark.parametrize("path", PATHS)
def test_paths_exist(path: str) -> None:
    assert find(path) is not None


@pytest.mark.parametrize(("path", "function"), FUNCTIONS)
def test_functions_are_in_their_files(path: str, function: str) -> None:
    file = find(path)
    assert file is not None
    assert function in defined(file), f"mpicoll/{path} defines no {function}: correct docs/architecture.md"


def test_the_page_names_functions_and_tests() -> None:
    """What the patterns above find; a page in another notation would pass them with nothing in it."""
    assert len(PATHS) > 20
    assert len(FUNCTIONS) > 60
    tests = {span for span in SPANS if re.fullmatch(r"test_\w+", span)}
    assert tests
    assert tests <= defined(ROOT / "tests/project/test_architecture.py")


def test_rooms_are_those_of_the_order() -> None:
    rows = [(int(floor), name) for floor, name in re.findall(r"^\| (\d+) \| `(\w+)` \|", section("Rooms"), re.MULTILINE)]
    top = len(ORDER) - 1
    assert sorted(rows) == sorted((top - index, name) for index, names in enumerate(ORDER) for name in names)
    assert [floor for floor, _ in rows] == sorted((floor for floor, _ in rows), reverse=True), "from the top floor down"


@pytest.mark.parametrize(
    ("title", "pattern"),
    [("Threads", r"threading\.Thread\("), ("Locks", r"\b(R?Lock|Condition)(\(\)|\b.*default_factory)")],
)
def test_no_thread_and_no_lock_is_left_out(title: str, pattern: str) -> None:
    """A file of mpicoll that makes one is named in the section. Benchmarks are programs that use mpicoll."""
    modules = [path for path in MODULES if room(path) != "bench"]
    makers = {str(path.relative_to(PACKAGE)) for path in modules if re.search(pattern, path.read_text())}
    missing = {path for path in makers if path not in section(title)}
    assert makers
    assert not missing, f"the section {title} of docs/architecture.md does not mention {missing}"


def test_the_glossary_is_sorted_and_each_term_has_a_link() -> None:
    assert sorted(TERMS, key=str.lower) == TERMS
    assert len(TERMS) == len(set(TERMS)) > 40
    rows = re.findall(r"^\| \*\*.*$", (ROOT / "docs/glossary.md").read_text(), re.MULTILINE)
    assert not [row for row in rows if not re.search(r"\]\((\.\./mpicoll/|architecture\.md#hops)", row)], (
        "each term links to the file that defines it"
    )

"""The rooms: what may import what, read from the source."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import ROOT

PACKAGE = ROOT / "mpicoll"
MODULES = sorted(PACKAGE.rglob("*.py"))
SOURCES = sorted({*MODULES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "examples").rglob("*.py")})
LONGEST = 400  # lines of a file

# Each room with the rooms below it. Words, in mpicoll itself, are modules that all rooms share; tools stand beside the rooms.
WORDS = {"errors", "_errors", "_torch_errors", "_config", "_cpus"}
FOUNDATION = {"_discovery", "_log", "_mpi", "_cuda", "_algorithms"}
ENGINE = {"_engine", "_progress", "_host", "_device", "_tensors"}  # their order is not held yet
BELOW = {
    "_discovery": set(),
    "_launch": {"_discovery"},
    "_doctor": {"_discovery"},
    "_log": {"_discovery"},
    "_mpi": {"_discovery"},
    "_cuda": set(),
    "_algorithms": {"_mpi"},
    **dict.fromkeys(ENGINE, ENGINE | FOUNDATION),
    "_c10d": ENGINE | FOUNDATION,
    "_api": {"_c10d"} | ENGINE | FOUNDATION,
    "nn": {"_api", "_c10d", "rpc"} | ENGINE,
    "autograd": set(),
    "rpc": {"autograd", "_mpi"},
    "optim": {"rpc", "autograd"},
}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def room(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0].removesuffix(".py")


def imports(path: Path, type_checking: bool = False) -> Iterator[tuple[str, int]]:
    """The modules that a file imports, at the top or in functions, with the line; those for type checkers on request."""
    tree = ast.parse(path.read_text())
    skipped: set[ast.AST] = set()
    if not type_checking:
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                skipped.update(inner for statement in node.body for inner in ast.walk(statement))
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(path)}:{node.lineno}: relative import"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def test_imports_point_downward() -> None:
    wrong = []
    for path in MODULES:
        if room(path) not in BELOW:
            continue
        allowed = BELOW[room(path)] | {room(path)} | WORDS
        for module, line in imports(path):
            parts = module.split(".")
            if parts[0] == "mpicoll" and len(parts) > 1 and parts[1] not in allowed:
                wrong.append(f"{name(path)}:{line} imports {module}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    """In a clone, too. (Two pictures were there, and ignored by git.)"""
    links = re.findall(r"\]\(([^)#:]+)[^):]*\)", page.read_text())
    assert not [link for link in links if not (page.parent / link).exists()]
    ignored = ["git", "check-ignore", *(str(page.parent / link) for link in links)]
    if links and (ROOT / ".git").exists() and shutil.which("git"):
        assert subprocess.run(ignored, cwd=ROOT, capture_output=True, text=True).stdout == ""


def test_every_room_is_known() -> None:
    above = {"bench", "_cli", "run", "doctor", "__init__", "__main__"}
    rooms = {room(path) for path in MODULES}
    assert rooms - set(BELOW) - WORDS == above, rooms


def test_words_import_no_room() -> None:
    for path in (PACKAGE / f"{word}.py" for word in WORDS):
        if path.exists():
            assert not [m for m, _ in imports(path) if m.startswith("mpicoll.") and m.split(".")[1] not in WORDS], path


@pytest.mark.parametrize(("library", "home"), [("mpi4py", "_mpi"), ("torch.cuda", "_cuda")])
def test_one_room_for_each_library(library: str, home: str) -> None:
    wrong = [
        f"{name(path)}:{line} imports {module}"
        for path in MODULES
        if room(path) != home and not path.name.startswith("probe")  # scripts that run in a process of their own
        for module, line in imports(path)
        if module == library or module.startswith(library + ".")
    ]
    assert not wrong, "\n".join(wrong)


def test_torch_cuda_is_used_in_its_room_only() -> None:
    wrong = []
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.cuda" and room(path) != "_cuda":
                wrong.append(f"{name(path)}:{node.lineno}")
    assert not wrong, "\n".join(wrong)


def test_algorithms_and_mpi_know_nothing_of_torch_distributed() -> None:
    wrong = [
        f"{name(path)}:{line} imports {module}"
        for path in MODULES
        if room(path) in ("_mpi", "_algorithms")
        for module, line in imports(path, type_checking=True)
        if module.startswith("torch.distributed")
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("path", SOURCES, ids=name)
def test_one_file(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    lines = text.count("\n")
    assert lines <= LONGEST, f"{lines} lines"
    if text.strip():
        assert ast.get_docstring(tree), "a module says what it is for"
    for node in ast.walk(tree):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"line {node.lineno}: a bare except"
            silent = len(node.body) == 1 and isinstance(node.body[0], ast.Pass)
            broad = ast.unparse(node.type) in ("Exception", "BaseException")
            assert not (silent and broad), f"line {node.lineno}: an error of any kind is passed over in silence"
    home = re.search(r"/(home|Users)/[a-z]\w+|/root/", text)
    assert home is None or path == Path(__file__), f"a path of one machine: {home and home.group()}"

"""The package's source, read for the tests of its architecture: files, packages, imports, changes of foreign objects."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.support import ROOT

PACKAGE = ROOT / "mpicoll"
MODULES = sorted(PACKAGE.rglob("*.py"))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def package_of(path: Path) -> str:
    """The folder or the file in mpicoll itself."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """The names that a file imports, with the line: at the top, in functions and for type checkers."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(path)}:{node.lineno}: relative import"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def only_for_types(path: Path) -> set[int]:
    """The lines below ``if TYPE_CHECKING``."""
    blocks = [node for node in ast.walk(tree(path)) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    return {line for block in blocks for node in block.body for line in range(node.lineno, (node.end_lineno or 0) + 1)}


def graph() -> dict[str, set[str]]:
    """The modules that each module imports."""
    known = {dotted(path) for path in MODULES}
    edges: dict[str, set[str]] = {}
    for path in MODULES:
        found = {module if module in known else module.rpartition(".")[0] for module, _ in imports(path)}
        edges[dotted(path)] = found & known - {dotted(path)}
    return edges


def changes(path: Path, libraries: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """The statements that set, delete or fill an attribute of an object of these libraries, with the line.

    Follows a name that is bound to another name or attribute; what a function returns or receives is not followed.
    """
    foreign = _bound(path, libraries)
    for node in ast.walk(tree(path)):
        targets: list[ast.expr] = []
        if isinstance(node, (ast.Assign, ast.Delete)):
            targets = [part for target in node.targets for part in getattr(target, "elts", [target])]
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)) and node.value is not None:
            targets = [node.target]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
            targets = [ast.Attribute(node.args[0], "", ast.Store())]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            targets = [node.func.value]
        for target in targets:
            if isinstance(target, (ast.Attribute, ast.Subscript)) and _root(target) in foreign:
                yield node.lineno, ast.unparse(node)


MUTATORS = {"add", "append", "clear", "discard", "extend", "insert", "pop", "remove", "setdefault", "update"}


def _bound(path: Path, libraries: tuple[str, ...]) -> set[str]:
    names = {
        (alias.asname or alias.name).split(".")[0]
        for node in ast.walk(tree(path))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
        if (getattr(node, "module", None) or alias.name).startswith(libraries)
    }
    pairs = [pair for node in ast.walk(tree(path)) for pair in _bindings(node)]
    before = 0
    while len(names) > before:
        before = len(names)
        names |= {target for target, value in pairs if _root(value) in names}
    return names


def _bindings(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target, value = node.targets[0], node.value
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        target, value = node.target, node.value
    else:
        return
    alike = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
    for left, right in zip(target.elts, value.elts, strict=False) if alike else [(target, value)]:  # type: ignore[attr-defined]
        if isinstance(left, ast.Name):
            yield left.id, right


def _root(node: ast.expr) -> str | None:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None

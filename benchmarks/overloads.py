"""Makes mpicoll/_overloads.pyi from the functions of mpicoll that have ``async_op``.

    python -m benchmarks.overloads && ruff format mpicoll/_overloads.pyi        writes it; tests/project/test_types.py compares

Type checkers choose among the three forms of a function: it returns None, with ``async_op=True`` a Work, and with a bool either.
The functions themselves are written once, without them. Their docstrings too: editors find them through mpicoll/_overloads.py.
"""

import ast
import copy
import importlib
import inspect
from pathlib import Path
from typing import Any

import mpicoll
from tests.support import ROOT

COMMAND = "python -m benchmarks.overloads && ruff format mpicoll/_overloads.pyi"
STUB = ROOT / "mpicoll/_overloads.pyi"
HEAD = '''
"""The functions with ``async_op`` as type checkers see them. Made by ``python -m benchmarks.overloads``; do not edit.

A call without ``async_op`` fits the first two forms, which therefore overlap; checkers take the first one that fits. On a rank
outside the group the result is None, with a warning, whatever ``async_op`` is.
"""

from datetime import timedelta
from typing import Any, Literal, overload

from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Work
from torch.futures import Future

from mpicoll._api.reductions import SUM
from mpicoll._tensors.reductions import Op
'''
SETTINGS = "# pyright: reportOverlappingOverload=false\n"


def with_async_op() -> dict[str, ast.FunctionDef]:
    """The functions of mpicoll that have a parameter ``async_op``, parsed, by name."""
    found = {name: getattr(mpicoll, name) for name in sorted(mpicoll.OURS)}
    return {name: parsed(value) for name, value in found.items() if inspect.isfunction(value) and has_async_op(value)}


def has_async_op(function: Any) -> bool:
    return "async_op" in inspect.signature(function).parameters


def parsed(function: Any) -> ast.FunctionDef:
    path = Path(str(importlib.import_module(function.__module__).__file__))
    nodes = ast.parse(path.read_text()).body
    return next(node for node in nodes if isinstance(node, ast.FunctionDef) and node.name == function.__name__)


def forms(function: ast.FunctionDef) -> list[ast.FunctionDef]:
    """The three forms of a function."""
    assert isinstance(function.returns, ast.BinOp), "it returns a Work or None"
    started = function.returns.left
    cases = ("Literal[False]", ast.Constant(None)), ("Literal[True]", started), ("bool", function.returns)
    return [form(function, kind, returns) for kind, returns in cases]


def form(function: ast.FunctionDef, kind: str, returns: ast.expr) -> ast.FunctionDef:
    arguments = copy.deepcopy(function.args)
    place = [argument.arg for argument in arguments.args].index("async_op") - len(arguments.args)
    arguments.args[place].annotation = ast.parse(kind, mode="eval").body
    if kind == "Literal[True]":
        arguments.defaults[place] = ast.Constant(...)
    made = copy.copy(function)
    made.args, made.returns = arguments, returns
    made.body, made.decorator_list = [ast.Expr(ast.Constant(...))], [ast.Name("overload")]
    return made


def text() -> str:
    stub = ast.parse(HEAD)
    for function in with_async_op().values():
        stub.body += forms(function)
    return SETTINGS + ast.unparse(ast.fix_missing_locations(stub)) + "\n"


if __name__ == "__main__":
    STUB.write_text(text())

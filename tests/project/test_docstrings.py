"""Each public docstring has the sections that help() and editors show. Their examples run in tests/api/test_docstrings.py."""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

from mpicoll._launch.spawn import SpawnContext
from tests.support.public import documented, is_error, methods

PUBLIC = documented()
ERRORS = {name: value for name, value in PUBLIC.items() if is_error(value)}
OTHERS = {name: value for name, value in PUBLIC.items() if name not in ERRORS}
METHODS = {
    method: function
    for name, value in [*OTHERS.items(), ("SpawnContext", SpawnContext)]
    if inspect.isclass(value)
    for method, function in methods(name, value).items()
    if function.__code__.co_name != "refuse"  # of RemoteModule: what it does not support
}
NOT_MADE_BY_PROGRAMS = {"rpc.BackendType", "autograd.DistAutogradContext"}  # an Enum; what `context` makes
HEADINGS = ("Args", "Attributes", "Returns", "Raises", "Example")


def sections(value: Any) -> dict[str, str]:
    """The text of a docstring by heading; the text before all headings under ""."""
    text = inspect.getdoc(value) or ""
    parts = re.split(rf"^({'|'.join(HEADINGS)}):\n", text, flags=re.MULTILINE)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def entries(section: str) -> list[str]:
    """The names that a section describes: of parameters, or of errors."""
    return [name for line in re.findall(r"^    (\w[\w, ]*): ", section, re.MULTILINE) for name in line.split(", ")]


def parameters(value: Any) -> list[str]:
    target = value.__init__ if inspect.isclass(value) and "__init__" in vars(value) else value
    return [name for name in inspect.signature(target).parameters if name != "self" and not name.startswith("_")]


def raised(function: Callable[..., Any]) -> set[str]:
    """The names of the errors that a function raises itself. That of a dataclass is made, and has no source."""
    if function.__code__.co_filename.startswith("<"):
        return set()
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    calls = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)]
    return {call.func.id for call in calls if isinstance(call.func, ast.Name) and call.func.id[0].isupper()}


@pytest.mark.parametrize("name", [*PUBLIC, *METHODS])
def test_the_first_line_is_a_sentence(name: str) -> None:
    first = (inspect.getdoc({**PUBLIC, **METHODS}[name]) or "\n").splitlines()[0]
    assert re.fullmatch(r".{15,}[.:]|[^:]+: .{5,}", first), first
    assert not re.match(r"(The same|As above)\b", first), "a reader of help() has not seen the function above"


@pytest.mark.parametrize("name", [name for name in [*OTHERS, *METHODS] if name not in NOT_MADE_BY_PROGRAMS])
def test_args_are_the_parameters(name: str) -> None:
    value = {**OTHERS, **METHODS}[name]
    assert entries(sections(value).get("Args", "")) == parameters(value)


@pytest.mark.parametrize("name", [*OTHERS, *METHODS])
def test_what_it_returns_is_told(name: str) -> None:
    """In a section, or in the first sentence."""
    value = {**OTHERS, **METHODS}[name]
    parts = sections(value)
    returns = "None" if inspect.isclass(value) else inspect.signature(value).return_annotation
    told = "Returns" in parts or re.search(r"\b[Rr]eturns?\b", parts[""].split("\n\n")[0]) is not None
    assert told or returns in ("None", "NoReturn"), f"it returns {returns}"
    assert not ("Returns" in parts and returns == "None")


@pytest.mark.parametrize("name", [*OTHERS, *METHODS])
def test_what_it_raises_is_told(name: str) -> None:
    value = {**OTHERS, **METHODS}[name]
    function = vars(value).get("__init__") if inspect.isclass(value) else value
    told = set(entries(sections(value).get("Raises", "")))
    assert function is None or raised(function) <= told


@pytest.mark.parametrize("name", OTHERS)
def test_who_must_call_it_is_told(name: str) -> None:
    assert re.search(r"\bcollective\b", sections(OTHERS[name])[""]), "say (collective), (not collective), or over which ranks"


@pytest.mark.parametrize("name", OTHERS)
def test_there_is_an_example_that_runs(name: str) -> None:
    example = sections(OTHERS[name]).get("Example", "")
    assert "    >>> " in example
    assert "+SKIP" not in example

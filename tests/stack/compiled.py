"""What the tests of torch.compile share: the backends, and a clean slate round each test."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters

FILTERS = [
    pytest.mark.filterwarnings("ignore:.*is deprecated"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace"),
    pytest.mark.filterwarnings("ignore:.*combination of ranks:FutureWarning"),
]

DOORS = pytest.mark.parametrize("door", ["torch.distributed", "mpicoll"])
CONFIG: Any = torch._dynamo.config

INDUCTOR = [  # C++ compiled by g++, collectives in place; half a minute each where its cache is cold
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler"),
]


def on(backend: str, feature: str, *values: Any, **options: Any) -> Any:
    """A case on that backend, as a line of the tables of its own."""
    marks = [pytest.mark.feature(feature), *options.pop("marks", ()), *(INDUCTOR if backend == "inductor" else ())]
    return pytest.param(backend, *values, marks=marks, **options)


def backends(feature: str, inductor: str, *names: str) -> Any:
    """``names``: those that need no compiler, aot_eager if none is given."""
    cases = [on(name, feature) for name in names or ("aot_eager",)]
    return pytest.mark.parametrize("backend", [*cases, on("inductor", f"inductor: {inductor}")])


@pytest.fixture
def fresh() -> Iterator[None]:
    """No compiled code and no counts of other tests."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def module(door: str) -> Any:
    """``import mpicoll as dist`` or ``import torch.distributed as dist``."""
    return importlib.import_module(door)


def compiled(function: Callable[..., Any], backend: str, **options: Any) -> Callable[..., Any]:
    """In one graph, unless told otherwise."""
    return torch.compile(function, backend=backend, **{"fullgraph": True, **options})

"""Keeps the tracer of torch.compile (dynamo) out of our code, as it stays out of the C++ of torch's own backends.

    compiled function ──► graph with functional collectives ──► C++ ──► our adapter        no dynamo there
                     └──► graph break: dist.broadcast(...) ──► our adapter, frame by frame    (1)
                     └──► traced: work.wait(), mpicoll.all_reduce(...)                        (2)

(1) Outside its graphs dynamo compiles every Python frame that runs. In an adapter of ours it would compile twenty small frames,
    and raise at the first attribute of a ProcessGroup that it does not know (torch >= 2.13).
(2) While it traces, dynamo traces every Python function that is called. A Work of torch is C++, so dynamo breaks the graph there.
    In ours it would trace locks and guard them.

A mark on the code object, which C reads, prevents (1); it costs nothing without torch.compile. An attribute of the function
prevents (2).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

WHY = "mpicoll communicates here, through MPI"


def disable_package(*packages: str) -> None:
    """Calls `disable` for all functions in the loaded modules of ``packages``."""
    below = tuple(f"{package}." for package in packages)
    for name, module in list(sys.modules.items()):
        if module is not None and (name in packages or name.startswith(below)):
            for function in _functions(module):
                disable(function)


def disable(function: Any) -> None:
    """Dynamo breaks its graph at this function, and runs it without compiling or tracing it."""
    _skip(function)
    function.__dict__.update(_torchdynamo_disable=True, _torchdynamo_disable_msg=WHY)


def skip_frames(module: str) -> None:
    """Dynamo does not compile the functions of a module, but traces them if a function that it traces calls them."""
    for function in _functions(sys.modules[module]):
        _skip(function)


def _skip(function: Any) -> None:
    if (mark := _marking()) is not None:
        mark(function.__code__)


@cache
def _marking() -> Callable[[CodeType], None] | None:
    """The function that marks a code object; None: a torch without dynamo. There are some thousand code objects to mark."""
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if not hasattr(frames, "set_code_exec_strategy"):
        return None
    skip = frames._FrameAction.SKIP
    mark, strategy = frames.set_code_exec_strategy, frames._FrameExecStrategy(skip, skip)  # the second: for frames that it calls
    return lambda code: mark(code, strategy)


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    """Yields the functions of a module and the methods of its classes, without those that it imports."""
    own = (value for value in vars(module).values() if isinstance(value, type) and value.__module__ == module.__name__)
    owners: list[ModuleType | type] = [module, *own]
    for owner in owners:
        for value in list(vars(owner).values()):
            kept: Any = value.fget if isinstance(value, property) else value
            plain = kept.__func__ if isinstance(kept, (classmethod, staticmethod)) else kept
            if isinstance(plain, FunctionType) and plain.__code__.co_filename == module.__file__:
                yield plain

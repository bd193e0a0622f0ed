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
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch

WHY = "mpicoll communicates here, through MPI"


def disable_package(package: str) -> None:
    """Calls `disable` for all functions in the loaded modules of ``package``."""
    for name, module in list(sys.modules.items()):
        if module is not None and (name == package or name.startswith(package + ".")):
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
    dynamo: Any = getattr(torch._C, "_dynamo", None)
    if dynamo is not None and hasattr(dynamo.eval_frame, "set_code_exec_strategy"):  # else a torch without dynamo
        frames = dynamo.eval_frame
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(
            function.__code__, frames._FrameExecStrategy(skip, skip)
        )  # the second for all frames that it calls


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    """Yields the functions of a module and the methods of its classes, without those that it imports."""
    owners = [module, *(value for value in vars(module).values() if isinstance(value, type))]
    for owner in owners:
        for value in list(vars(owner).values()):
            plain = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if isinstance(plain, FunctionType) and plain.__code__.co_filename == module.__file__:
                yield plain

"""Keeps torch.compile's tracer (dynamo) out of our code, which it should find as closed as the C++ of torch's own backends.

    compiled function ──► graph with functional collectives ──► C++ ──► our adapter        no dynamo there
                     └──► graph break: dist.broadcast(...) ──► our adapter, frame by frame    (1)
                     └──► traced: work.wait(), mpicoll.all_reduce(...)                        (2)

(1) Outside its graphs dynamo stands at the door of every Python frame that runs, and compiles it. Of an adapter of ours it
    compiles twenty small frames, and stops at the first attribute of a ProcessGroup that it does not know (torch >= 2.13).
(2) While it traces it looks into every Python function that is called. A Work of torch's is C++, so that it breaks the graph
    there and runs on; of ours it would trace locks, and guard them.

A mark on the code object, in C, answers (1) at no cost for who does not compile; an attribute of the function answers (2).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch

__all__ = ["close", "close_package", "skip_frames"]

WHY = "mpicoll communicates here, through MPI"


def close_package(package: str) -> None:
    """`close` for all functions of the modules of ``package`` that have been loaded."""
    for name, module in list(sys.modules.items()):
        if module is not None and (name == package or name.startswith(package + ".")):
            for function in _functions(module):
                close(function)


def close(function: Any) -> None:
    """Dynamo neither compiles the function nor looks into it: it breaks the graph, and lets it run as it is."""
    _skip(function)
    function.__dict__.update(_torchdynamo_disable=True, _torchdynamo_disable_msg=WHY)


def skip_frames(module: str) -> None:
    """Dynamo lets the functions of a module run as they are, but looks into them where a function that it traces calls them."""
    for function in _functions(sys.modules[module]):
        _skip(function)


def _skip(function: Any) -> None:
    dynamo: Any = getattr(torch._C, "_dynamo", None)
    if dynamo is not None and hasattr(dynamo.eval_frame, "set_code_exec_strategy"):  # else a torch without dynamo
        frames = dynamo.eval_frame
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))  # with all frames beneath


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    """The functions of a module and the methods of its classes, as far as their code is the module's own."""
    owners = [module, *(value for value in vars(module).values() if isinstance(value, type))]
    for owner in owners:
        for value in list(vars(owner).values()):
            plain = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            if isinstance(plain, FunctionType) and plain.__code__.co_filename == module.__file__:
                yield plain

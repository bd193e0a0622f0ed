"""The examples in public docstrings, run on two ranks. tests/project/test_docstrings.py says which there must be."""

import doctest
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import mpicoll
from mpicoll import autograd, rpc
from tests.support import agree, everyone
from tests.support.public import documented

EXAMPLES = {name: value for name, value in documented().items() if ">>>" in (value.__doc__ or "")}
ONE_PROCESS = ["dist.spawn"]  # which no rank may call
MAKE_THEIR_WORKERS = ("rpc.init_rpc", "rpc.shutdown")
NEED_WORKERS = [
    name
    for name in EXAMPLES
    if name.startswith(("rpc.", "autograd.", "optim.", "nn.RemoteModule")) and name not in MAKE_THEIR_WORKERS
]
GLOBALS = {"dist": mpicoll, "torch": torch, "rpc": rpc, "dist_autograd": autograd}


@pytest.fixture
def module() -> Iterator[ModuleType]:
    """Where the examples run: a module, so that functions that they define can be called by RPC."""
    made = ModuleType("examples_of_docstrings")
    sys.modules[made.__name__] = made
    vars(made).update(GLOBALS)
    yield made
    del sys.modules[made.__name__]


def example(name: str, module: ModuleType) -> doctest.DocTest:
    (test,) = doctest.DocTestFinder(recurse=False).find(EXAMPLES[name], name, globs={})
    test.globs = vars(module)  # itself: doctest makes a copy of what it is given
    return test


def failures(name: str, module: ModuleType) -> str:
    """What the examples of one docstring print that differs from what stands there."""
    output: list[str] = []
    doctest.DocTestRunner(verbose=False).run(example(name, module), out=output.append, clear_globs=False)
    return "".join(output)


@pytest.mark.usefixtures("world")
@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in [*ONE_PROCESS, *NEED_WORKERS]])
def test_an_example(name: str, module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    output = failures(name, module)
    agree(not output, output)


@pytest.fixture
def workers(world: Any, module: ModuleType) -> Iterator[ModuleType]:
    """RPC on both ranks, under the names that the examples use."""
    rpc.init_rpc(f"worker{mpicoll.get_rank()}")
    yield module
    everyone(None)
    rpc.shutdown()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", NEED_WORKERS)
def test_an_example_with_workers(name: str, workers: ModuleType) -> None:
    for step in example(name, workers).examples:
        if step.source.startswith(("def ", "@")):  # the other worker needs the function before the first call of it
            exec(step.source, vars(workers))
    everyone(None)
    output = failures(name, workers)
    agree(not output, output)


@pytest.mark.launch
@pytest.mark.parametrize("name", ONE_PROCESS)
def test_an_example_of_one_process(name: str, module: ModuleType) -> None:
    output = failures(name, module)
    assert not output, output

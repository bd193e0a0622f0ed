"""torch.jit: functions and modules that it has compiled can be called elsewhere, passed and returned."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mpicoll import rpc
from tests.support import agree, launch

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")

    @torch.jit.script
    def compiled(x: Tensor, n: int) -> Tensor:
        return x.relu() * n


def same(x: Any) -> Any:
    return x


def unnamed() -> Callable[..., Any]:
    def inner(x: Tensor) -> Tensor:
        return x + 1

    return inner


def test_a_function(right: str) -> None:
    """By its name."""
    found = rpc.rpc_sync(right, compiled, (torch.tensor([-1.0, 2.0]), 3))
    agree(found.tolist() == [0.0, 6.0], found)
    with pytest.raises(pickle.PicklingError, match="by name"):
        rpc.rpc_sync(right, torch.jit.script(unnamed()), (torch.ones(1),))


def test_a_module(right: str) -> None:
    """There and back, and as what is called."""
    x, module = torch.tensor([-1.0, 2.0]), torch.jit.script(torch.nn.Linear(2, 2))
    back, answer = rpc.rpc_sync(right, same, (module,)), rpc.rpc_sync(right, module, (x,))
    agree(torch.equal(back(x), module(x)) and torch.equal(answer, module(x)), (back, answer))


@pytest.mark.launch
def test_a_function_of_the_main_program() -> None:
    """Whose module torch does not name."""
    done = launch(2, "tests/rpc/scripts/compiled.py", timeout_s=60)
    assert done.stdout.count("answer: 2.0") == 2, done.stdout + done.stderr
    assert done.returncode == 0, done.stderr

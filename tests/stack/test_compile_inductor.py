"""The tests of test_compile.py and test_compile_models.py once more, with inductor: C++ compiled by g++, collectives in place.

All slow: half a minute each where inductor's cache is cold.
"""

from __future__ import annotations

import shutil

import pytest

from tests.stack import test_compile as functions
from tests.stack import test_compile_models as models
from tests.stack.compiled import CONFIG, DOORS, FILTERS, fresh  # noqa: F401

SECTION = "Functional collectives and torch.compile"

pytestmark = [
    *FILTERS,
    pytest.mark.usefixtures("fresh"),
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler"),
]


@pytest.mark.feature("inductor: functional collectives, fullgraph, dynamic shapes, gradients")
def test_functional(rank: int, size: int) -> None:
    """inductor makes in-place collectives of them, and decides when to wait."""
    functions.test_functional("inductor", rank, size)


@pytest.mark.feature("inductor: functional collectives, fullgraph, dynamic shapes, gradients")
def test_dynamic_shapes(rank: int, size: int) -> None:
    functions.test_dynamic_shapes("inductor", rank, size)


@pytest.mark.feature("inductor: functional collectives, fullgraph, dynamic shapes, gradients")
def test_gradients(rank: int, size: int) -> None:
    functions.test_gradients("inductor", rank, size)


@pytest.mark.feature("inductor: classic collectives, fullgraph, through both doors")
@DOORS
def test_classic(door: str, rank: int, size: int) -> None:
    functions.test_classic("inductor", door, rank, size)


@pytest.mark.feature("inductor: isend, irecv, batch_isend_irecv, fullgraph")
@pytest.mark.skipif(not hasattr(CONFIG, "enable_p2p_compilation"), reason="needs torch >= 2.13")
@pytest.mark.parametrize("name", ["messages", "batch"])
def test_messages_in_the_graph(name: str, rank: int, size: int) -> None:
    functions.test_messages_in_the_graph("inductor", name, rank, size)


@pytest.mark.feature("inductor: DDP (ddp_optimizer, no_optimization, python_reducer), DDP of a compiled module")
@pytest.mark.parametrize("mode", ["ddp_optimizer", "no_optimization"])
def test_ddp(mode: str, rank: int, size: int) -> None:
    models.test_ddp("inductor", mode, rank, size)


@pytest.mark.feature("inductor: DDP (ddp_optimizer, no_optimization, python_reducer), DDP of a compiled module")
@pytest.mark.parametrize("mode", ["python_reducer", "python_reducer_without_compiled_forward"])
def test_ddp_in_the_graph(mode: str, rank: int, size: int) -> None:
    models.test_ddp_in_the_graph("inductor", mode, rank, size)


@pytest.mark.feature("inductor: DDP (ddp_optimizer, no_optimization, python_reducer), DDP of a compiled module")
def test_ddp_of_a_compiled_module(rank: int, size: int) -> None:
    models.test_ddp_of_a_compiled_module("inductor", rank, size)


@pytest.mark.feature("inductor: FSDP2, DTensor, tensor parallel, compiled autograd")
@pytest.mark.parametrize("how", ["layers", "whole"])
def test_fsdp2(how: str, rank: int, size: int) -> None:
    models.test_fsdp2("inductor", how, rank, size)


@pytest.mark.feature("inductor: FSDP2, DTensor, tensor parallel, compiled autograd")
@pytest.mark.parametrize("what", ["dtensor", "tensor_parallel", "compiled_autograd"])
def test_more_models(what: str, rank: int, size: int) -> None:
    getattr(models, f"test_{what}")("inductor", rank, size)

"""The remote calls that are measured: worker NAME0 calls worker NAME1, which is idle otherwise.

Each answer is checked first. A row of k bytes sends a float32 tensor of that size and gets it back; "in flight": the time per
call of 64 concurrent calls without tensors; "ResNet50": one training step of remote_pipeline.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from mpicoll.bench.remote_pipeline import Pipeline, library

IN_FLIGHT = 64
ROUND_S = 0.2  # seconds for one library in one round
Call = Callable[[], object]
RemoteRow = tuple[Callable[[str], Call], int]  # makes the function for library "ours" or "theirs"; number of remote calls in it


def rows(sizes: Sequence[int], width: int) -> dict[str, RemoteRow]:
    """The rows by name. sizes: bytes; width: of the network, see remote_pipeline.py."""
    by_name: dict[str, RemoteRow] = {"empty call": (_empty, 1)}
    for nbytes in sizes:
        by_name[f"{nbytes} bytes"] = (partial(_echo, torch.rand(nbytes // 4)), 1)
    by_name[f"{IN_FLIGHT} in flight"] = (_flight, IN_FLIGHT)
    network = "ResNet50 step" if width == 64 else f"ResNet step, {width}"
    by_name[network] = (lambda name: Pipeline(name, [f"{name}0", f"{name}1"], width).step, 1)
    return by_name


def microseconds(call: Call, calls: int) -> float:
    """Microseconds per remote call, over as many calls as fit into `ROUND_S`, after a few to warm up."""
    count = max(1, int(ROUND_S / _seconds(call, 1)))
    return _seconds(call, count) * 1e6 / calls


def _seconds(call: Call, count: int) -> float:
    for _ in range(min(count, 3)):
        call()
    began = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - began) / count


def nothing() -> None:
    """The empty call."""


def echo(x: Any) -> Any:
    return x


def _empty(name: str) -> Call:
    rpc, *_ = library(name)
    return lambda: rpc.rpc_sync(f"{name}1", nothing)


def _echo(x: torch.Tensor, name: str) -> Call:
    rpc, *_ = library(name)

    def call() -> Any:
        return rpc.rpc_sync(f"{name}1", echo, args=(x,))

    if not torch.equal(call(), x):
        raise AssertionError(f"{name}: a tensor of {x.nbytes} bytes came back changed")
    return call


def _flight(name: str) -> Call:
    rpc, *_ = library(name)

    def call() -> Any:
        return [future.wait() for future in [rpc.rpc_async(f"{name}1", echo, args=(i,)) for i in range(IN_FLIGHT)]]

    if call() != list(range(IN_FLIGHT)):
        raise AssertionError(f"{name}: wrong answers")
    return call

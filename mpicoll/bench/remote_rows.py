"""What is measured of a library of remote calls: worker NAME0 calls worker NAME1, which does nothing otherwise.

Each answer is checked first. A row of k bytes sends a float32 tensor of that size there and gets it back; "in flight": each of
64 calls that are under way at once, without tensors; "ResNet50": one training step of remote_pipeline.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from mpicoll.bench.remote_pipeline import Pipeline, library

IN_FLIGHT = 64
ROUND_S = 0.2  # seconds that one way is measured for, per round
Call = Callable[[], object]
RemoteRow = tuple[Callable[[str], Call], int]  # makes the way for a library, "ours" or "theirs"; how many calls that is


def rows(sizes: Sequence[int], width: int) -> dict[str, RemoteRow]:
    """By name. Args:   sizes: bytes. width: of the network, see remote_pipeline.py."""
    found: dict[str, RemoteRow] = {"empty call": (_empty, 1)}
    for nbytes in sizes:
        found[f"{nbytes} bytes"] = (partial(_echo, torch.rand(nbytes // 4)), 1)
    found[f"{IN_FLIGHT} in flight"] = (_flight, IN_FLIGHT)
    network = "ResNet50 step" if width == 64 else f"ResNet step, {width}"
    found[network] = (lambda name: Pipeline(name, [f"{name}0", f"{name}1"], width).step, 1)
    return found


def microseconds(way: Call, calls: int) -> float:
    """Of one call, after a few: as many as there is time for."""
    count = max(1, int(ROUND_S / _seconds(way, 1)))
    return _seconds(way, count) * 1e6 / calls


def _seconds(way: Call, count: int) -> float:
    for _ in range(min(count, 3)):
        way()
    began = time.perf_counter()
    for _ in range(count):
        way()
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

    def way() -> Any:
        return rpc.rpc_sync(f"{name}1", echo, args=(x,))

    if not torch.equal(way(), x):
        raise AssertionError(f"{name}: a tensor of {x.nbytes} bytes came back changed")
    return way


def _flight(name: str) -> Call:
    rpc, *_ = library(name)

    def way() -> Any:
        return [future.wait() for future in [rpc.rpc_async(f"{name}1", echo, args=(i,)) for i in range(IN_FLIGHT)]]

    if way() != list(range(IN_FLIGHT)):
        raise AssertionError(f"{name}: wrong answers")
    return way

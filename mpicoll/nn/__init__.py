"""Communication that autograd goes through: torch.distributed.nn over MPI, messages, and halo exchange on a grid of ranks.

    functional   collectives with torch's signatures, and send, recv, sendrecv; the names are here, too
    grid, halo   Grid, halo_exchange
    agreement    what the ranks make sure of before anything moves
    linear       an operation and its adjoint make a differentiable function
    moves        the collectives as such operations; messages: what send and recv are made of

    api         RemoteModule, over mpicoll.rpc

Importing this starts no MPI. What torch.distributed.nn has besides (jit) is torch's own object.
"""
# ruff: noqa: F401  these names are for others; __all__ is made on demand, torch's among them

from __future__ import annotations

import importlib
from typing import Any

from mpicoll._c10d import dynamo
from mpicoll.nn import functional
from mpicoll.nn.functional import (
    _all_gather_base,
    all_gather,
    all_reduce,
    all_to_all,
    all_to_all_single,
    broadcast,
    gather,
    recv,
    reduce,
    reduce_scatter,
    scatter,
    send,
    sendrecv,
)
from mpicoll.nn.grid import Grid
from mpicoll.nn.halo import halo_exchange

OURS = [*functional.__all__, "Grid", "RemoteModule", "functional", "halo_exchange"]
OWN_MODULES = ("api",)


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return __dir__()
    if name in OWN_MODULES:
        return importlib.import_module(f"mpicoll.nn.{name}")
    if name == "RemoteModule":  # it needs mpicoll.rpc, which the functions here do not
        return importlib.import_module("mpicoll.nn.api.remote_module").RemoteModule
    if name.startswith("__"):
        raise AttributeError(f"module 'mpicoll.nn' has no attribute {name!r}")
    import torch.distributed.nn

    return getattr(torch.distributed.nn, name)


def __dir__() -> list[str]:
    import torch.distributed.nn

    theirs = [name for name in dir(torch.distributed.nn) if not name.startswith("_")]
    return sorted({*OURS, *theirs})


dynamo.close_package(__name__)  # torch.compile breaks its graph here, and these functions run as they are

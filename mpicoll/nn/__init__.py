"""Communication that takes part in autograd: torch.distributed.nn over MPI, messages, and halo exchange on a grid of ranks.

    functional           collectives with torch's signatures, scan, exscan, send, recv, sendrecv; all are names of this, too
    reductions           those that reduce, with scan and exscan
    grid, halo           Grid, halo_exchange
    preflight            what the ranks check together before data moves
    linear               makes a linear map and its adjoint differentiable
    linear_collectives   the collectives as linear maps
    messages             send, recv, sendrecv
    api                  RemoteModule, over mpicoll.rpc

Importing this module does not start MPI. Other names of torch.distributed.nn (jit) are torch's own objects.
"""
# ruff: noqa: F403  exported names; __all__ is made on demand because it includes names of torch

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from mpicoll._c10d import dynamo
from mpicoll.nn import functional as functional
from mpicoll.nn.functional import *
from mpicoll.nn.grid import Grid as Grid
from mpicoll.nn.halo import halo_exchange as halo_exchange

OURS = [*functional.__all__, "Grid", "RemoteModule", "functional", "halo_exchange"]

if TYPE_CHECKING:
    from torch.distributed import ReduceOp as ReduceOp
    from torch.distributed import group as group
    from torch.distributed.nn import jit as jit

    from mpicoll.nn import api as api
    from mpicoll.nn.api.remote_module import RemoteModule as RemoteModule
else:  # with this function, a name that is not there would be of type Any to a type checker

    def __getattr__(name: str) -> Any:
        if name == "__all__":
            return __dir__()
        if name == "api":
            return importlib.import_module("mpicoll.nn.api")
        if name == "RemoteModule":  # imports mpicoll.rpc, which the functions do not need
            return importlib.import_module("mpicoll.nn.api.remote_module").RemoteModule
        if name.startswith("__"):
            raise AttributeError(f"module 'mpicoll.nn' has no attribute {name!r}")
        import torch.distributed.nn

        return getattr(torch.distributed.nn, name)


def __dir__() -> list[str]:
    import torch.distributed.nn

    torch_names = [name for name in dir(torch.distributed.nn) if not name.startswith("_")]
    return sorted({*OURS, *torch_names})


dynamo.disable_package(__name__)  # torch.compile breaks its graph here and runs these functions as they are

"""The adapters that torch calls, one for each mpicoll group: made, kept alive, given up.

torch <= 2.13 takes a ProcessGroup subclass (torch213/), torch >= 2.14 a Backend subclass (backend.py); this file picks.
An adapter knows its maker only by the callbacks that it is handed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from mpicoll._base.errors import LaunchError
from mpicoll._c10d import ddp, dynamo, excepthooks, failed_calls, names, torch_world
from mpicoll._engine.registry import registry
from mpicoll._mpi import runtime

if TYPE_CHECKING:
    from mpicoll._engine.communicator import Communicator

# The Python half of each group's adapter, None until it is made. TORCH_DISTRIBUTED_DEBUG=DETAIL wraps the C++ half and drops
# this one, and the methods with it.
alive: dict[Communicator, Any] = {}


def create(options: Any) -> Any:
    """Makes the adapter over a new communicator; torch calls it on members only.

    Raises:
        LaunchError: torch and MPI disagree about this rank's place in the group.
    """
    ranks = list(options.global_ranks_in_group) or None
    runtime.start()
    communicator = registry.create(options.group_id, ranks, options.timeout.total_seconds())
    alive[communicator] = None
    if (communicator.rank, communicator.size) != (options.group_rank, options.group_size):
        raise LaunchError(
            f"group {options.group_id!r}: torch says rank {options.group_rank} of {options.group_size}, MPI says "
            f"{communicator.rank} of {communicator.size}; launch with `python -m mpicoll.run` or mpirun, and let "
            "init_process_group take rank and size from MPI"
        )
    alive[communicator] = _adapt(communicator, options)
    names.serve(communicator.devices is not None)
    ddp.install()
    failed_calls.install()
    _keep_dynamo_out()
    return alive[communicator]


def _split(parent: Communicator, ranks: Sequence[int], name: str, timeout_s: float) -> Any:
    """Makes the adapter over a new communicator of these ranks of ``parent``, in this order (collective over them)."""
    communicator = registry.create(name, [parent.global_ranks[rank] for rank in ranks], timeout_s)
    alive[communicator] = _adapt(communicator, None)
    return alive[communicator]


def _adapt(communicator: Communicator, options: Any) -> Any:
    if names.BACKEND_SUBCLASSES:
        from mpicoll._c10d.backend import MpiBackend

        return MpiBackend(communicator, _on_close, _split)
    from mpicoll._c10d import torch213

    return torch213.adapt(communicator, _on_close, options)


def mixing(translated: str) -> AbstractContextManager[str]:
    """Gives the backend string for torch, which can make a group with several backends by itself from 2.14 on."""
    if names.BACKEND_SUBCLASSES:
        return contextlib.nullcontext(translated)
    from mpicoll._c10d import torch213

    return torch213.mixing(translated)


def _on_close(communicator: Communicator) -> None:
    """Called by an adapter when torch gives its group up. With the default group, the excepthooks go too."""
    alive.pop(communicator, None)
    default = torch_world.default_group()
    if default is not None and torch_world.name_of(default) == communicator.name:
        excepthooks.uninstall()


@functools.cache
def _keep_dynamo_out() -> None:
    """Once, when our modules have been loaded: torch.compile runs them as they are."""
    dynamo.disable_package(*(f"mpicoll.{room}" for room in ("_c10d", "_engine", "_faults", "_host", "_device", "_tensors")))

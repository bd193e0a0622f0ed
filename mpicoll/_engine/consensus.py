"""What all ranks must share: rank 0's configuration, device support as far as every rank has it, and where the ranks run."""

from __future__ import annotations

from typing import NamedTuple

from torch._C._distributed_c10d import DebugLevel, get_debug_level

from mpicoll._base import config
from mpicoll._device import consensus as devices
from mpicoll._device.consensus import DeviceChoices
from mpicoll._engine import torch_threads
from mpicoll._host import algorithm_choice
from mpicoll._host.algorithm_choice import Choices
from mpicoll._mpi.channel import Channel
from mpicoll._mpi.topology import Topology, own_facts, topology_of


class Agreed(NamedTuple):
    """Settings of a world.

    Attributes:
        checks: Ranks compare their calls before each collective (_engine/checked.py).
        compares: The watchdogs of a node compare them once a second (_faults/call_comparison.py).
        topology: Of the ranks of the channel.
    """

    host: Choices
    devices: DeviceChoices | None
    checks: bool
    compares: bool
    topology: Topology


def agree(channel: Channel) -> Agreed:
    """Returns rank 0's choices on all ranks (collective). Ranks with different choices would wait for each other.

    Raises:
        ValueError: A variable of rank 0, or its table, has a value that is not allowed; raised on all ranks.
    """
    error, own, rank = "", None, channel.comm.Get_rank()
    if rank == 0:
        try:
            own = algorithm_choice.choices(channel.runtime.library), devices.settings(), (_checks(), _compares())
        except ValueError as caught:
            error = str(caught)
    with channel.lock:
        # One exchange for all: on a busy machine each takes as long as it takes until every rank has had the processor. Neither
        # bcast nor allreduce of objects, which broadcasts: in MPICH, ranks of different thread levels disagree about how to
        # broadcast, from the third broadcast of a communicator on (5.0.2; mpi4py alone shows it).
        received = channel.comm.allgather((own, error, devices.seen(), own_facts(channel.comm, torch_threads.threads())))
    agreed, error, *_ = received[0]
    if error:
        raise ValueError(error)
    choices, wanted, (checks, compares) = agreed
    assert isinstance(choices, Choices)
    nodes = topology_of([facts for *_, facts in received], rank, choices.node_size)
    return Agreed(choices, devices.agree(channel, wanted, [seen for _, _, seen, _ in received]), checks, compares, nodes)


def _checks() -> bool:
    """True if the environment asks for the full check. Raises ValueError: MPICOLL_CHECK has a value that is not allowed."""
    check: bool | None = config.get("MPICOLL_CHECK")
    return get_debug_level() == DebugLevel.DETAIL if check is None else check


def _compares() -> bool:
    """True if this rank's environment lets the watchdogs compare calls once a second."""
    return config.get("MPICOLL_CHECK") is not False

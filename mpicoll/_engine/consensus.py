"""Settings that all ranks must share: rank 0's configuration, and device support as far as every rank has it."""

from __future__ import annotations

from typing import NamedTuple

from mpicoll._device import consensus as devices
from mpicoll._device.consensus import DeviceChoices
from mpicoll._engine import checked
from mpicoll._host import thresholds
from mpicoll._host.thresholds import Choices
from mpicoll._mpi.channel import Channel


class Agreed(NamedTuple):
    """Settings of a world.

    Attributes:
        checks: Ranks compare their calls before each collective (_engine/checked.py).
        compares: The watchdogs of a node compare them once a second (_progress/ledger.py).
    """

    host: Choices
    devices: DeviceChoices | None
    checks: bool
    compares: bool


def agree(channel: Channel) -> Agreed:
    """Returns rank 0's choices on all ranks (collective). Ranks with different choices would wait for each other.

    Raises:
        ValueError: A variable of rank 0, or its table, has a value that is not allowed; raised on all ranks.
    """
    error, own = "", None
    if channel.comm.Get_rank() == 0:
        try:
            own = thresholds.choices(channel.runtime.library), devices.settings(), (checked.wanted(), checked.compares())
        except ValueError as caught:
            error = str(caught)
    with channel.lock:
        # Not bcast: see topology.discover.
        received = channel.comm.allgather((own, error, devices.seen()))
    agreed, error, _ = received[0]
    if error:
        raise ValueError(error)
    choices, wanted, checks = agreed
    assert isinstance(choices, Choices)
    return Agreed(choices, devices.agree(channel, wanted, [seen for *_, seen in received]), *checks)

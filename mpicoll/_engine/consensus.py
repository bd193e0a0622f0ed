"""Settings that all ranks must share: rank 0's configuration, and what ranks agree on about their devices."""

from __future__ import annotations

from mpicoll._device import consensus as devices
from mpicoll._device.consensus import DeviceChoices
from mpicoll._host import thresholds
from mpicoll._host.thresholds import Choices
from mpicoll._mpi.channel import Channel


def agree(channel: Channel) -> tuple[Choices, DeviceChoices | None]:
    """Rank 0's choices, on all ranks (collective): ranks that chose otherwise would wait for each other.

    Raises:
        ValueError: On all ranks: a variable of rank 0, or its table, holds what is not allowed.
    """
    error, mine = "", None
    if channel.comm.Get_rank() == 0:
        try:
            mine = thresholds.choices(channel.runtime.library), devices.settings()
        except ValueError as caught:
            error = str(caught)
    with channel.lock:
        # Not bcast: see topology.discover.
        received = channel.comm.allgather((mine, error, devices.seen()))
    agreed, error, _ = received[0]
    if error:
        raise ValueError(error)
    choices, wanted = agreed
    assert isinstance(choices, Choices)
    return choices, devices.agree(channel, wanted, [seen for *_, seen in received])

"""Settings that all ranks must share: rank 0's configuration, and device support as far as every rank has it."""

from __future__ import annotations

from mpicoll._device import consensus as devices
from mpicoll._device.consensus import DeviceChoices
from mpicoll._host import thresholds
from mpicoll._host.thresholds import Choices
from mpicoll._mpi.channel import Channel


def agree(channel: Channel) -> tuple[Choices, DeviceChoices | None]:
    """Returns rank 0's choices on all ranks (collective). Ranks with different choices would wait for each other.

    Raises:
        ValueError: A variable of rank 0, or its table, has a value that is not allowed; raised on all ranks.
    """
    error, own = "", None
    if channel.comm.Get_rank() == 0:
        try:
            own = thresholds.choices(channel.runtime.library), devices.settings()
        except ValueError as caught:
            error = str(caught)
    with channel.lock:
        # Not bcast: see topology.discover.
        received = channel.comm.allgather((own, error, devices.seen()))
    agreed, error, _ = received[0]
    if error:
        raise ValueError(error)
    choices, wanted = agreed
    assert isinstance(choices, Choices)
    return choices, devices.agree(channel, wanted, [seen for *_, seen in received])

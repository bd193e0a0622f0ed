"""Operations that are messages between pairs of ranks: gather, scatter and all-to-all of any sizes, straight between tensors.

MPI's own v-variants need one flat buffer, equal datatypes and int displacements. One message per pair needs none of that; the
v-variants do the same inside for large blocks. All ranks must start the operations in the same order: two exchanges of the same
pair match in the order in which both ranks started them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

from mpicoll._algorithms.blocks import Block
from mpicoll._algorithms.window import DifferentCalls
from mpicoll._mpi.channel import Channel, Status
from mpicoll._mpi.datatypes import BYTE, spec
from mpicoll._mpi.errors import truncated

# Bytes between nodes from which messages, and the collectives of rails, are tested instead of waited for, so that the core is
# given away meanwhile: Note [Waiting for large messages] in _mpi/channel.py. Below, the tests would take longer than the message.
# On 2 hosts of 2 ranks that share 2 cores, at 1 Gbit/s, all_reduce over rails of 1, 4 and 16 MiB took 1.31, 3.13 and 2.84 times
# the bandwidth limit with blocking calls, and 1.11, 1.14 and 1.41 times with these (Gloo: 1.6); broadcast 1.8 to 3.3, and 1.05.
# At 10 Gbit/s, two runs each: all_reduce of 4 MiB 6.2 and 6.1, and 3.8 and 4.2; broadcast 25 and 17, and 2.7 and 2.4. All of
# these with the TCP of BBR; docs/reference/bandwidth.md has later figures, with cubic.
TESTED_FROM = 64 << 10
TAG = 0  # below OWN_TAGS; monitored_barrier.py and checked.py have 1 to 4


class Exchange:
    """Messages under way, pairs of (peer, memory). The receives have their memory until `wait` returns.

    Args:
        large: `wait` yields the core between tests.
        comm: Numbers the peers; the channel's communicator by default.
    """

    def __init__(
        self,
        channel: Channel,
        sends: Iterable[tuple[int, Block]],
        receives: Iterable[tuple[int, Block]],
        large: bool = False,
        comm: Any = None,
    ) -> None:
        self._channel, self._large = channel, large
        self._receives = list(receives)
        self._comm = comm = channel.comm if comm is None else comm
        with channel.lock:
            self._requests: list[Any] = []
            if not channel.runtime.overruns:
                self._requests += [comm.Irecv(spec(*memory), peer, TAG) for peer, memory in self._receives]
            self._requests += [comm.Isend(spec(*memory), peer, TAG) for peer, memory in sends]

    def wait(self) -> None:
        """Waits until all messages have ended.

        Raises:
            MPIException: MPI_ERR_TRUNCATE, after all messages have ended: a message was longer than its receive.
            DifferentCalls: The same for a message that was shorter.
        """
        if self._channel.runtime.overruns:
            received = _matched(self._channel, self._comm, self._requests, self._receives, self._large)
        else:
            statuses = [Status() for _ in self._receives]
            self._channel.wait_all(self._requests, statuses, self._large)
            received = [status.Get_elements(BYTE) for status in statuses]
        for (peer, (_, nbytes)), found in zip(self._receives, received, strict=True):
            if found != nbytes:
                raise DifferentCalls(f"Rank {peer} of the group has sent {found} bytes, and this rank expects {nbytes}.")


def exchange(
    channel: Channel, sends: Sequence[tuple[int, Block]], receives: Sequence[tuple[int, Block]], between_nodes: bool = False
) -> None:
    """Sends and receives all messages at once, and waits for them. Raises the errors of `Exchange.wait`."""
    large = between_nodes and any(nbytes >= TESTED_FROM for _, (_, nbytes) in (*sends, *receives))
    Exchange(channel, sends, receives, large).wait()


def _matched(channel: Channel, comm: Any, requests: list[Any], receives: Sequence[tuple[int, Block]], large: bool) -> list[int]:
    """Compares every length before it receives: Note [Messages that are too long] in _mpi/open_mpi.py. Returns the lengths."""
    received, surplus = [], []  # surplus: memory for the messages that are too long
    for peer, (address, nbytes) in receives:
        pause = channel.pause()
        while (arrived := channel.arrived(comm, peer, TAG)) is None:
            pause()
        if arrived.nbytes > nbytes:
            surplus.append(ctypes.create_string_buffer(arrived.nbytes))
            address = ctypes.addressof(surplus[-1])
        with channel.lock:
            requests.append(arrived.message.Irecv(spec(address, arrived.nbytes)))
        received.append(arrived.nbytes)
    channel.wait_all(requests, large=large)
    if surplus:
        raise truncated()
    return received

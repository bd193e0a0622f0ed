"""Operations that are messages between pairs of ranks: gather, scatter and all-to-all of any sizes, straight between tensors.

MPI's own v-variants need one flat buffer, equal datatypes and int displacements; a message per pair needs none of that,
and is what they do inside for large blocks. Nothing here may be reordered between ranks: two exchanges of the same pair
match in the order in which both started them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

from mpicoll._algorithms.blocks import Block
from mpicoll._mpi.channel import Channel
from mpicoll._mpi.datatypes import spec
from mpicoll._mpi.errors import truncated

TAG = 0  # any: the communicator is ours alone


def exchange(channel: Channel, sends: Iterable[tuple[int, Block]], receives: Iterable[tuple[int, Block]]) -> None:
    """Sends and receives, all at once; pairs of (peer, memory), which is held until then by who calls."""
    channel.wait_all(begin(channel, sends, receives))


def begin(channel: Channel, sends: Iterable[tuple[int, Block]], receives: Iterable[tuple[int, Block]]) -> list[Any]:
    """The same, not waited for: its requests."""
    if channel.runtime.overruns:
        _matched(channel, sends, receives)
        return []
    comm = channel.comm
    with channel.lock:
        requests = [comm.Irecv(spec(*memory), peer, TAG) for peer, memory in receives]
        return requests + [comm.Isend(spec(*memory), peer, TAG) for peer, memory in sends]


def _matched(channel: Channel, sends: Iterable[tuple[int, Block]], receives: Iterable[tuple[int, Block]]) -> None:
    """``exchange`` with every length compared first: Note [Messages that are too long] in _mpi/open_mpi.py.

    Raises: MPIException: MPI_ERR_TRUNCATE, after all messages have been received, so that their senders end.
    """
    comm = channel.comm
    with channel.lock:
        requests = [comm.Isend(spec(*memory), peer, TAG) for peer, memory in sends]
    surplus = []  # memory for the messages that are too long
    for peer, (address, nbytes) in receives:
        pause = channel.pause()
        while (arrived := channel.arrived(comm, peer, TAG)) is None:
            pause()
        if arrived.nbytes > nbytes:
            surplus.append(ctypes.create_string_buffer(arrived.nbytes))
            address = ctypes.addressof(surplus[-1])
        with channel.lock:
            requests.append(arrived.message.Irecv(spec(address, arrived.nbytes)))
    channel.wait_all(requests)
    if surplus:
        raise truncated()

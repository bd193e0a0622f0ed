"""Operations that are messages between pairs of ranks: gather, scatter and all-to-all of any sizes, straight between tensors.

MPI's own v-variants need one flat buffer, equal datatypes and int displacements. A message for each pair, in pieces if it is
large and the group has several nodes, needs none of that; the v-variants do the same inside for large blocks. All ranks must
start the operations in the same order: two exchanges of the same pair match in the order in which both ranks started them.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

from mpicoll._algorithms.blocks import Block
from mpicoll._mpi.arrivals import Arrived
from mpicoll._mpi.backoff import Backoff
from mpicoll._mpi.channel import Channel, Status
from mpicoll._mpi.datatypes import BYTE, room, spec
from mpicoll._mpi.errors import MPIException, truncated
from mpicoll._tensors.calls import DifferentCalls

# Bytes between nodes from which messages, and the collectives of rails, are tested instead of waited for, so that the core is
# given away meanwhile: Note [Waiting for large messages] in _mpi/channel.py. Below, the tests would take longer than the message.
# On 2 hosts of 2 ranks that share 2 cores, at 1 Gbit/s, all_reduce over rails of 1, 4 and 16 MiB took 1.31, 3.13 and 2.84 times
# the bandwidth limit with blocking calls, and 1.11, 1.14 and 1.41 times with these (Gloo: 1.6); broadcast 1.8 to 3.3, and 1.05.
# At 10 Gbit/s, two runs each: all_reduce of 4 MiB 6.2 and 6.1, and 3.8 and 4.2; broadcast 25 and 17, and 2.7 and 2.4. All of
# these with the TCP of BBR; benchmarks/bandwidth.json has later figures, with cubic.
TESTED_FROM = 64 << 10
PIECE = 256 << 10  # bytes; see Note [Pieces]
REST_S = 1.0  # seconds; a rank sends all pieces before it waits for any of them
TAG = 0  # below OWN_TAGS; _faults/roll_call.py has 5
T = TypeVar("T")


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
                self._requests += [comm.Irecv(room(*memory), peer, TAG) for peer, memory in self._receives]
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
        _compare(self._receives, received)


def peers(comm: Any) -> list[int]:
    """The other ranks, in the order of the messages to them; theirs come in the reverse order. So no rank is overrun."""
    rank, size = comm.Get_rank(), comm.Get_size()
    return [(rank + step) % size for step in range(1, size)]


def pairs(comm: Any, targets: Sequence[T], sources: Sequence[T]) -> tuple[list[tuple[int, T]], list[tuple[int, T]], tuple[T, T]]:
    """What to send if ``sources[i]`` goes to rank i, what to receive if ``targets[i]`` comes from it, and this rank's own two."""
    rank, others = comm.Get_rank(), peers(comm)
    receives = [(other, targets[other]) for other in reversed(others)]
    return [(other, sources[other]) for other in others], receives, (targets[rank], sources[rank])


def exchange(
    channel: Channel, sends: Sequence[tuple[int, Block]], receives: Sequence[tuple[int, Block]], between_nodes: bool = False
) -> None:
    """Sends and receives all messages at once, at most one from each rank, and waits for them.

    ``between_nodes``: the group has several nodes. Raises the errors of `Exchange.wait`.
    """
    largest = max((nbytes for _, (_, nbytes) in (*sends, *receives)), default=0)
    if between_nodes and largest >= PIECE:
        _exchange_pieces(channel, sends, receives)
        return
    try:
        Exchange(channel, sends, receives, large=between_nodes and largest >= TESTED_FROM).wait()
    except MPIException:
        if between_nodes:
            _receive_rest(channel, [peer for peer, _ in receives])
        raise


# Note [Pieces]
# Between nodes, a message of `PIECE` bytes and more travels in pieces. MPI moves a few messages at a time to their ends, so that
# with one message for each pair of ranks some cards have nothing to do at the end. all_to_all_single of 16 MiB at 1 Gbit/s, on 4
# hosts and on 2 hosts of 2 ranks (Open MPI 5.0.11, 2 cores in all), took 1.67 and 1.28 times the bandwidth limit; with pieces of
# 1 MiB 1.13 and 1.07, of 256 KiB 1.06 and 1.05. 4 MiB with pieces of 1 MiB: 1.3 and 1.3, of 256 KiB 1.05 and 1.03.
#
# All pieces of a message but the last one have the same size, at least `PIECE`. The last one is shorter, and may be empty. So the
# receiver knows where the message of another rank ends, also if it has another size than expected.
#
# A rank whose messages are all short receives them by `Exchange`, which takes 5 us less. If one is the first piece of a message,
# MPI reports that it is too long, and `_receive_rest` receives the others: their sender would wait for ever.
def _pieces(block: Block) -> list[Block]:
    """Cuts a message into at most 17 pieces."""
    address, nbytes = block
    piece = PIECE << max(0, (nbytes // PIECE).bit_length() - 4)
    return [(address + at, min(piece, nbytes - at)) for at in range(0, nbytes + 1, piece)]


def _exchange_pieces(channel: Channel, sends: Sequence[tuple[int, Block]], receives: Sequence[tuple[int, Block]]) -> None:
    """Sends in pieces, and receives from each rank until its message ends. Raises the errors of `Exchange.wait`."""
    rounds = zip_longest(*(_pieces(block) for _, block in sends))
    with channel.lock:
        requests = [
            channel.comm.Isend(spec(*piece), peer, TAG)
            for pieces in rounds
            for (peer, _), piece in zip(sends, pieces, strict=True)
            if piece is not None
        ]
    pause = Backoff(yield_s=Backoff.YIELD_S if channel.in_background() else math.inf).pause
    received = dict.fromkeys((peer for peer, _ in receives), 0)
    piece_of: dict[int, int] = {}  # the size of a message's first piece, by rank
    surplus: list[Any] = []
    waiting = dict(receives)
    while waiting:
        found = False
        for peer, (address, nbytes) in list(waiting.items()):
            arrived = channel.arrived(peer, TAG)
            if arrived is None:
                continue
            found = True
            room = nbytes - received[peer]
            requests.append(_receive(channel, channel.comm, arrived, address + received[peer], room, surplus))
            received[peer] += arrived.nbytes
            if arrived.nbytes < max(PIECE, piece_of.setdefault(peer, arrived.nbytes)):
                del waiting[peer]
        if not found:
            pause()
    channel.wait_all(requests, large=True)
    if surplus:
        raise truncated()
    _compare(receives, list(received.values()))


def _receive_rest(channel: Channel, peers: Sequence[int]) -> None:
    """Receives what comes from these ranks until nothing has come for `REST_S`. Their messages of this group count no more."""
    last, pause = time.monotonic(), Backoff().pause
    while time.monotonic() < last + REST_S:
        for peer in peers:
            if (arrived := channel.arrived(peer, TAG)) is not None:
                surplus: list[Any] = []
                channel.wait_all([_receive(channel, channel.comm, arrived, 0, -1, surplus)])
                last = time.monotonic()
        pause()


def _matched(channel: Channel, comm: Any, requests: list[Any], receives: Sequence[tuple[int, Block]], large: bool) -> list[int]:
    """Compares every length before it receives: Note [Messages that are too long] in _mpi/open_mpi.py. Returns the lengths."""
    received, surplus = list[int](), list[Any]()
    for peer, (address, nbytes) in receives:
        pause = Backoff().pause
        while (arrived := channel.arrived(peer, TAG, comm)) is None:
            pause()
        requests.append(_receive(channel, comm, arrived, address, nbytes, surplus))
        received.append(arrived.nbytes)
    channel.wait_all(requests, large=large)
    if surplus:
        raise truncated()
    return received


def _receive(channel: Channel, comm: Any, arrived: Arrived, address: int, room: int, surplus: list[Any]) -> Any:
    """Starts to receive a message that has arrived; one that is too long into memory that ``surplus`` keeps."""
    if arrived.nbytes > room:
        surplus.append(ctypes.create_string_buffer(arrived.nbytes))
        address = ctypes.addressof(surplus[-1])
    with channel.lock:
        return comm.Irecv(spec(address, arrived.nbytes), arrived.source, TAG)


def _compare(receives: Sequence[tuple[int, Block]], received: Sequence[int]) -> None:
    """Raises DifferentCalls if fewer bytes were received than were expected."""
    for (peer, (_, nbytes)), found in zip(receives, received, strict=True):
        if found != nbytes:
            raise DifferentCalls(f"Rank {peer} of the group has sent {found} bytes, and this rank expects {nbytes}")

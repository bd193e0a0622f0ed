"""Collectives by direct exchange: ranks swap slices in messages, and torch kernels reduce them.

Used between nodes of one rank each, for half precision without a window (MPI could reduce it only as float32), and for memory
that MPI can move but not reduce.

    [1] every rank sends slice i to rank i    [2] rank i reduces all parts of slice i    [3] every rank gets the slices

The tensor is reduced chunk after chunk. The messages of the next chunks move while one is reduced, so that no network card is
idle and a rank needs little scratch memory for a tensor of any length. A rank sends 2 (n - 1) / n of the bytes: the least that
a card can send for one rank on each node; for k ranks about k times the least. One rank reduces an element, in the order of the
ranks, so all ranks end with the same bits, and halves are rounded once. (A ring would round partial sums of halves on each rank.)

``settle`` is called before MPI reads a result. When it returns, the reduction has ended.

# Note [Order of messages]
# All messages have one tag. Two ranks run the same steps, so a rank posts its receives from a peer in the order in which the
# peer sends. It also waits for them in this order, because with `Runtime.overruns` a message is matched when it is waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import memmove
from functools import partial
from typing import Any

from torch import Tensor

from mpicoll._algorithms.blocks import Block, block
from mpicoll._algorithms.pairwise import Exchange, peers
from mpicoll._algorithms.window import LINE
from mpicoll._mpi.channel import Channel
from mpicoll._tensors.combine import Combine

CHUNK = 8 << 20  # bytes of a slice, the parts of all ranks together; far above the latency of a network times its bandwidth
# Bytes of a message between hosts. On 4 hosts of 100 Mbit/s, one all_reduce of 16 MiB took 1.06 times the bandwidth limit with
# 256 KiB, 1.10 with 64 KiB and 1.17 with 1 MiB: all ranks wait for the last message of a chunk.
SLICE = 256 << 10
AHEAD = 4  # chunks whose messages move at a time, if they are small
# Pieces of a broadcast that move at a time to or from each rank. On 4 hosts of 100 Mbit/s, 16 MiB took 1.08 to 1.37 times the
# limit with 2 (three runs), 1.19 with 4 and 1.22 with 1 (one run each).
BROADCAST_AHEAD = 2
# A broadcast to several ranks has at least so many pieces, of at least so many bytes: the last piece is on its way twice. Among
# more than 4 ranks pieces may be shorter, see `broadcast_piece`.
BROADCAST_PIECES, BROADCAST_LEAST = 16, 32 << 10


def nothing() -> None:
    """Ends what has ended; the ``settle`` of reductions that have ended when the kernel returns."""


def all_reduce(
    channel: Channel,
    memory: Tensor,
    combine: Combine,
    root: int | None = None,
    settle: Callable[[], None] = nothing,
    slice_nbytes: int = CHUNK,
) -> None:
    """Reduces one-dimensional ``memory`` in place, on every rank or on the root only. ``settle``: see above."""
    rank, size, total = channel.comm.Get_rank(), channel.comm.Get_size(), memory.numel()
    longest = min(_longest(memory, size, slice_nbytes), -(-total // size))
    chunks = [slices_of(whole, size) for whole in memory.split(longest * size)] if total else []
    ahead = _ahead(longest * size * memory.element_size())
    results = memory.new_empty(min(ahead + 1, len(chunks)), longest)
    receivers = [other for other in peers(channel.comm) if root in (None, other)]
    with _kept_on_error(channel, results):
        gathers = _Unfinished(ahead)
        for number, parts in enumerate(_moved(channel, chunks, longest)):
            slices = chunks[number]
            own = slices[rank]
            reduced = results[number % len(results)].narrow(0, 0, own.numel())
            if own.numel():
                combine(parts, reduced)  # [2]
                if root in (None, rank):
                    own.copy_(reduced)
            settle()
            sends = [(other, block(reduced)) for other in receivers if own.numel()]
            senders = [other for other in reversed(peers(channel.comm)) if root in (None, rank) and slices[other].numel()]
            gathers.add(_exchange(channel, sends, [(other, block(slices[other])) for other in senders]))  # [3]
        gathers.wait()


def reduce_scatter(
    channel: Channel,
    output: Tensor,
    memory: Tensor,
    combine: Combine,
    settle: Callable[[], None] = nothing,
    slice_nbytes: int = CHUNK,
) -> None:
    """Rank i gets the reduction of the i-th block of every rank's ``memory``. Both are one-dimensional and do not overlap."""
    size, block_ = channel.comm.Get_size(), output.numel()
    longest = min(_longest(memory, size, slice_nbytes), block_)
    starts = range(0, block_, longest or 1)
    chunks = [[memory.narrow(0, r * block_ + start, min(longest, block_ - start)) for r in range(size)] for start in starts]
    for start, parts in zip(starts, _moved(channel, chunks, longest), strict=True):
        combine(parts, output.narrow(0, start, parts[0].numel()))
        settle()  # a later chunk overwrites these parts


def all_gather(channel: Channel, targets: Sequence[Block], source: Block) -> None:
    """The source of rank i arrives in ``targets[i]`` of every rank. Sizes may differ; a target may be its rank's source."""
    (target, _), (address, total) = targets[channel.comm.Get_rank()], source
    if target != address:
        memmove(target, address, total)
    others = peers(channel.comm)

    def started(turn: int) -> Exchange:
        sends = [(other, piece) for other in others for piece in _piece(source, turn)]
        return _exchange(channel, sends, [(other, piece) for other in reversed(others) for piece in _piece(targets[other], turn)])

    turns = max(-(-nbytes // SLICE) for _, nbytes in targets)
    for _ in _in_order(started, turns, AHEAD):
        pass


def broadcast(channel: Channel, memory: Block, root: int, comm: Any = None) -> None:
    """The bytes of the root arrive in the memory of every rank.

    The root sends each piece to one of the other ranks, in turn, and this rank sends it to the rest. So the root sends every byte
    once, and of the others none sends more than the root. ``comm`` numbers the ranks; the channel's by default.

    A rank receives its piece of a round before those of the others: it sends at once, while they send to other ranks.
    """
    comm = channel.comm if comm is None else comm
    rank, others = comm.Get_rank(), [other for other in range(comm.Get_size()) if other != root]
    receivers = [other for other in others if other != rank]
    ahead = BROADCAST_AHEAD * len(others)
    length = broadcast_piece(memory[1], len(others))
    sends = _Unfinished(ahead if rank == root else BROADCAST_AHEAD)

    def first(turn: int) -> int:
        return others[turn % len(others)]

    def received(number: int) -> Exchange:
        turn = turns[number]
        sender = root if first(turn) == rank else first(turn)
        return _exchange(channel, [], [(sender, _piece(memory, turn, length)[0])], comm=comm)

    turns = sorted(range(-(-memory[1] // length)), key=lambda turn: (turn // len(others), first(turn) != rank))  # own ones first
    for number in range(len(turns)) if rank == root else _in_order(received, len(turns), ahead):
        turn = turns[number]
        if rank == root:
            sends.add(_exchange(channel, [(first(turn), _piece(memory, turn, length)[0])], [], comm=comm))
        elif first(turn) == rank:
            sends.add(_exchange(channel, [(other, _piece(memory, turn, length)[0]) for other in receivers], [], comm=comm))
    sends.wait()


def broadcast_piece(nbytes: int, others: int) -> int:
    """Returns the bytes of the pieces in which a broadcast of ``nbytes`` goes to so many ranks. The last one may be shorter.

    Each of the other ranks sends every ``others``-th piece to ``others`` - 1 ranks. If there are few pieces, a card sends several
    times what the root does: 16 pieces among 64 ranks, 3.9 times. Then there are as many pieces for each rank.
    """
    if others == 1:
        return SLICE
    length = min(SLICE, max(BROADCAST_LEAST, nbytes // BROADCAST_PIECES))
    pieces = -(-nbytes // length)
    rounds = -(-pieces // others)
    if rounds * (others - 1) <= pieces:  # always so among at most 4 ranks, above BROADCAST_LEAST
        return length
    return -(-nbytes // (rounds * others * LINE)) * LINE


def _piece(memory: Block, turn: int, length: int = SLICE) -> list[Block]:
    """The bytes of ``memory`` that move in a turn; an empty list behind the end."""
    address, nbytes = memory
    begin = turn * length
    return [(address + begin, min(length, nbytes - begin))] if begin < nbytes else []


_exchange = partial(Exchange, large=True)


def slices_of(memory: Tensor, size: int) -> list[Tensor]:
    """Cuts one-dimensional memory into a slice for each rank. The last ones may be shorter, or empty."""
    slices = list(memory.split(-(-memory.numel() // size)))
    return slices + [memory[:0]] * (size - len(slices))


def _longest(memory: Tensor, size: int, slice_nbytes: int) -> int:
    """Number of elements of the longest slice."""
    return max(1, min(slice_nbytes, CHUNK // size) // memory.element_size())


def _ahead(chunk_nbytes: int) -> int:
    """Number of chunks whose messages move at a time."""
    return max(1, min(AHEAD, CHUNK // max(1, chunk_nbytes)))


def _moved(channel: Channel, chunks: Sequence[Sequence[Tensor]], longest: int) -> Iterator[list[Tensor]]:
    """[1] For each chunk, sends slices[i] to rank i. Yields the parts that all ranks have of this rank's slice.

    The messages of the next chunks move while the caller uses one.
    """
    rank, size, others = channel.comm.Get_rank(), channel.comm.Get_size(), peers(channel.comm)
    if not chunks:
        return
    ahead = _ahead(longest * size * chunks[0][0].element_size())
    scratch = chunks[0][0].new_empty(min(ahead + 1, len(chunks)), size, longest)

    def parts(number: int) -> list[Tensor]:
        own, rows = chunks[number][rank], scratch[number % len(scratch)]
        return [own if r == rank else rows[r].narrow(0, 0, own.numel()) for r in range(size)]

    def started(number: int) -> Exchange:
        slices, received = chunks[number], parts(number)
        sends = [(other, block(slices[other])) for other in others if slices[other].numel()]
        return _exchange(channel, sends, [(other, block(received[other])) for other in reversed(others) if slices[rank].numel()])

    with _kept_on_error(channel, scratch):
        yield from map(parts, _in_order(started, len(chunks), ahead))


def _in_order(started: Callable[[int], Exchange], count: int, ahead: int) -> Iterator[int]:
    """Starts the exchanges 0 ... count - 1, ``ahead`` of them at a time, and yields the number of each one that has ended."""
    flying = deque(started(number) for number in range(min(ahead, count)))
    for number in range(count):
        flying.popleft().wait()
        if number + ahead < count:
            flying.append(started(number + ahead))
        yield number


class _Unfinished:
    """Exchanges that nobody waits for yet; at most ``most``."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._exchanges: deque[Exchange] = deque()

    def add(self, exchange: Exchange) -> None:
        self._exchanges.append(exchange)
        if len(self._exchanges) > self._most:
            self._exchanges.popleft().wait()

    def wait(self) -> None:
        for exchange in self._exchanges:
            exchange.wait()


@contextmanager
def _kept_on_error(channel: Channel, scratch: Tensor) -> Iterator[None]:
    """Keeps the memory for ever if an error leaves the block: messages that have not ended may still use it."""
    try:
        yield
    except BaseException:  # also where the generator is closed
        channel.kept.append(scratch)
        raise

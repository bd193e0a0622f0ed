"""Memory that the ranks of a group expose to each other: MPI's windows, and memory that the ranks of a node share.

Each rank exposes memory of its own size. A rank copies to and from memory that it maps (`share`). MPI moves the rest.

# Note [Who moves a put]
# The target takes no part in MPI's rules. But without RDMA the library of the target moves the bytes, while a thread is inside
# MPI: MPICH 5.0.2, and Open MPI 5.0.11 over TCP and libfabric. A flush took as long as the target slept. So the poller of a rank
# that exposes memory calls MPI meanwhile (`_engine/poller.py: Poller.serve`).

# Note [Flushes that never return]
# If the target has died, MPI_Win_flush of Open MPI 5.0.11 never returns, with ULFM too; revoking does not end it. So a job that
# goes on when a rank dies has no window of MPI, and only memory that is mapped can be reached.

# Note [Windows and threads, Open MPI over UCX]
# The component osc/ucx of 5.0.11 connects each thread that calls it. Over TCP the puts of a second thread ended with
# MPI_ERR_OTHER, also under a lock, and after an asynchronous put MPI_Win_free did not return. osc/rdma, MPICH, and osc/ucx in
# shared memory take all of this. Open MPI chooses osc/ucx over TCP only if it is told to.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakValueDictionary

from mpicoll._mpi import shared_segment, survivors
from mpicoll._mpi.channel import Channel
from mpicoll._mpi.datatypes import BYTE, fromaddress
from mpicoll._mpi.library import MPI
from mpicoll._mpi.shared_segment import ORDERED, WORD, from_all

RECORD = struct.Struct(f"=q24s{WORD}sq")  # bytes, kind, word and offset of `_location`
PIECE = 1 << 30  # bytes of one call of MPI: Open MPI takes counts up to 2^31-1
PAGE = 4096  # bytes; ranks of a node share no page, which belongs to the processor of the rank that writes it first

# What `share` has made and the program still uses, by the word at its end. All ranks of the node read the same word.
_shared: WeakValueDictionary[bytes, mmap.mmap] = WeakValueDictionary()


Part: TypeAlias = "tuple[mmap.mmap, int]"  # memory of this process, and an offset there


class Shared(NamedTuple):
    """Memory that the ranks of a node map."""

    number: int  # the same on all ranks
    parts: list[Part]  # of each rank of the node


def share(channel: Channel, node: Sequence[int], nbytes: int, number: int) -> Shared | None:
    """Makes memory that the ranks of this node map (collective). None if a rank of the group could not map it.

    ``node``: the ranks of this node. ``nbytes``: of this rank's part. ``number``: for `Shared`.
    """
    with channel.lock:
        sizes = [size for (size,) in map(struct.Struct("=q").unpack, from_all(channel.comm, struct.pack("=q", nbytes)))]
        ends = [0]
        for rank in node:
            ends.append(ends[-1] + -(-sizes[rank] // PAGE) * PAGE)
        segment = shared_segment.create(channel.comm, ends[-1], maker=node[0])
    if segment is None:
        return None
    _shared[segment.memory[-WORD:]] = segment.memory
    return Shared(number, [(segment.memory, begin) for begin in ends[:-1]])


def _location(address: int) -> tuple[bytes, int]:
    """The shared memory in which an address is, by its word, and the offset there; a word of zeros if it is in none."""
    for word, memory in list(_shared.items()):
        offset = address - ctypes.addressof(ctypes.c_char.from_buffer(memory))
        if 0 <= offset < len(memory) - WORD:
            return word, offset
    return bytes(WORD), 0


class RemoteMemory:
    """What the ranks of a channel expose (collective to make and to free).

    Attributes:
        sizes: Bytes of each rank's memory.
        kinds: What each rank says about its memory.
        mapped: Each rank's memory in this process, with the offset, if it was made by `share` and this process maps it.
        addresses: The same as addresses; 0: not mapped. This rank's own memory has its address.
        is_shared: Whether each rank's memory was made by `share`.
    """

    def __init__(self, channel: Channel, address: int, nbytes: int, kind: bytes) -> None:
        self._channel, self._rank = channel, channel.comm.Get_rank()
        record = RECORD.pack(nbytes, kind, *_location(address))
        memory = fromaddress(address, nbytes) if nbytes else bytearray(1)  # Open MPI 4.1 makes no empty window
        with channel.lock:
            records = [RECORD.unpack(each) for each in from_all(channel.comm, record)]
            self._window: MPI.Win | None = None
            if not survivors.possible():  # see Note [Flushes that never return]
                self._window = MPI.Win.Create(memory, 1, comm=channel.comm)
                self._window.Lock_all(MPI.MODE_NOCHECK)
        self.sizes: list[int] = [nbytes for nbytes, *_ in records]
        self.kinds: list[bytes] = [kind.rstrip(b"\0") for _, kind, *_ in records]
        self.is_shared = [any(word) for *_, word, _ in records]
        self.mapped = [(found, offset) if (found := _shared.get(word)) else None for *_, word, offset in records]
        self._starts = [None if each is None else ctypes.c_char.from_buffer(*each) for each in self.mapped]
        self.addresses = [0 if start is None else ctypes.addressof(start) for start in self._starts]
        self.addresses[self._rank] = address
        self.unflushed: set[int] = set()  #: Ranks at which `start` has started something that `flush` waits for.
        self._ordered = self.unified and platform.machine() in ORDERED

    @property
    def unified(self) -> bool:
        """False if MPI keeps copies of exposed memory, which is then right after `sync` only."""
        with self._channel.lock:
            return self._window is None or bool(self._window.Get_attr(MPI.WIN_MODEL) == MPI.WIN_UNIFIED)

    @property
    def by_mpi(self) -> bool:
        """Whether MPI can reach memory that is not mapped."""
        return self._window is not None

    def move(self, call: str, address: int, nbytes: int, rank: int, offset: int, *reduction: Any) -> None:
        """Calls MPI's Put, Get or Accumulate, and returns when the bytes have arrived. ``reduction``: datatype and op."""
        assert self._window is not None
        with self._channel.lock:
            for arguments in _pieces(address, nbytes, rank, offset, *reduction):
                getattr(self._window, call)(*arguments)
            self._window.Flush(rank)

    def start(self, call: str, address: int, nbytes: int, rank: int, offset: int, *reduction: Any) -> Access:
        """Starts the same. When it has ended, this rank's memory is free or has the result; `flush` waits for the target."""
        assert self._window is not None
        with self._channel.lock:
            function = getattr(self._window, "R" + call.lower())
            self.unflushed.add(rank)
            requests = [function(*each) for each in _pieces(address, nbytes, rank, offset, *reduction)]
            self.unflushed.add(rank)  # another thread may have called `flush` meanwhile
            return Access(self._channel, requests)

    def flush(self, rank: int) -> None:
        """Returns when everything that this rank has started at a rank has arrived there."""
        assert self._window is not None
        self.unflushed.discard(rank)
        with self._channel.lock:
            self._window.Flush(rank)

    def sync(self) -> None:
        """A fence between this rank's own reads and writes of exposed memory, and its messages, where one is needed."""
        if self._window is not None and not self._ordered:
            with self._channel.lock:
                self._window.Sync()

    def free(self) -> None:
        if self._window is not None:
            with self._channel.lock:
                self._window.Unlock_all()
                self._window.Free()


def _pieces(
    address: int, nbytes: int, rank: int, offset: int, datatype: MPI.Datatype = BYTE, *op: MPI.Op
) -> Sequence[tuple[Any, ...]]:
    if 0 < nbytes <= PIECE and datatype is BYTE:  # nearly all; 1 us less, of 7
        return (([fromaddress(address, nbytes), nbytes, BYTE], rank, [offset, nbytes, BYTE]),)
    size, found = datatype.Get_size(), []
    for begin in range(0, nbytes, PIECE):
        part = min(PIECE, nbytes - begin)
        memory = [fromaddress(address + begin, part), part // size, datatype]
        found.append((memory, rank, [offset + begin, part // size, datatype], *op))
    return found


class Access:
    """A put, get or accumulate under way: a `Transfer`."""

    source, moved, nbytes, wrong = -1, False, 0, ""

    def __init__(self, channel: Channel, requests: list[MPI.Request]) -> None:
        self._channel, self._requests = channel, requests

    def test(self) -> bool:
        while self._requests and self._channel.test(self._requests[-1]):
            self._requests.pop()
        return not self._requests

    def cancel(self) -> bool:
        return False

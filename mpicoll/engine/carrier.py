"""Carries plain memory by the algorithm that `choose` names.

Each method is called by all ranks of the group, in the same order, inside an operation: what it needs (the node's window) is
made on first use, by all of them. False: nothing was done, and MPI's own is the way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mpicoll.algorithms import shared_memory
from mpicoll.algorithms.shared_memory import Block, block
from mpicoll.algorithms.window import Window
from mpicoll.engine import choose
from mpicoll.engine.choose import NEVER, Choices
from mpicoll.engine.kernels import Kernel
from mpicoll.engine.progress import Backoff, Lane
from mpicoll.mpi import segment
from mpicoll.mpi.channel import ANY_SOURCE, Channel
from mpicoll.mpi.datatypes import fromaddress
from mpicoll.mpi.topology import Topology

PAGE = 4096  # bytes
FLAT_BYTES = 64 << 10  # that a rank reads of others; up to here one hand-over is dearer than the work that slices save
SPINS = 1000  # looks, 50 us; handing over between two ranks that both run takes less
BESIDE_SPIN_S, BESIDE_YIELD_S = 0.0, 50e-6  # seconds; as Backoff's
ALIVE_S = 0.05  # seconds between two questions whether the others are alive, of a rank that waits for them


class Carrier:
    """One per group.

    Args:   topology: of the group's ranks. lane: the group's; its thread sleeps where another one may spin.
    """

    def __init__(self, channel: Channel, topology: Topology, choices: Choices, lane: Lane) -> None:
        self.channel = channel
        self.rank: int = channel.comm.Get_rank()
        self.size: int = channel.comm.Get_size()
        self._choices = choices
        self._lane = lane
        self._crowded = topology.crowded
        self._window: Window | None = None
        here = topology.single and not channel.runtime.serialized
        #: bytes from which an operation goes through the window
        self.least = {
            operation: choices.least(operation, self.size, topology.crowded) if here else NEVER
            for operation in choose.WINDOW_FROM
        }

    def all_reduce(self, memory: Tensor, kernel: Kernel) -> bool:
        """In place on every rank."""
        nbytes = memory.nbytes
        if nbytes < self.least["all_reduce"] or (window := self.window()) is None:
            return False
        flat = plain(memory, kernel.dtype)
        if nbytes * (self.size - 1) <= FLAT_BYTES and nbytes <= window.chunk:
            shared_memory.all_reduce_flat(window, flat, kernel.combine)
        else:
            shared_memory.all_reduce(window, flat, kernel.combine)
        return True

    def reduce(self, memory: Tensor, kernel: Kernel, root: int) -> bool:
        """In place on the root."""
        if memory.nbytes < self.least["reduce"] or (window := self.window()) is None:
            return False
        shared_memory.all_reduce(window, plain(memory, kernel.dtype), kernel.combine, root)
        return True

    def reduce_scatter(self, output: Tensor, memory: Tensor, kernel: Kernel) -> bool:
        """Equal blocks; no memory in common."""
        if memory.nbytes < self.least["reduce_scatter"] or (window := self.window()) is None:
            return False
        shared_memory.reduce_scatter(window, plain(output, kernel.dtype), plain(memory, kernel.dtype), kernel.combine)
        return True

    def broadcast(self, memory: Tensor, root: int) -> bool:
        if memory.nbytes < self.least["broadcast"] or (window := self.window()) is None:
            return False
        shared_memory.broadcast(window, block(memory), root)
        return True

    def all_gather(self, targets: Sequence[Block], source: Block) -> bool:
        """Blocks of any sizes, which all ranks know; a rank's own target may be its source."""
        if sum(nbytes for _, nbytes in targets) < self.least["all_gather"] or (window := self.window()) is None:
            return False
        shared_memory.all_gather(window, targets, source)
        return True

    def all_to_all(self, operation: str, targets: Sequence[Block], sources: Sequence[Block]) -> bool:
        """Blocks of any sizes, be they known to this rank alone.

        Raises: ValueError, on all ranks alike: what a rank has for another is not what that expects.
        """
        if (window := self.window()) is None:
            return False
        for i, j in shared_memory.all_to_all(window, targets, sources):
            raise ValueError(f"{operation}: what rank {i} has for rank {j} has another size than what rank {j} expects from it")
        return True

    def barrier(self, timeout_s: float) -> bool | None:
        """True when every rank has come, False if they have not in time; None: not done here.

        Makes no window: who waits for a rank to make one with waits without end.
        """
        if self._window is None:
            return None
        return shared_memory.barrier(self._window, self._pause(), timeout_s)

    # -- the window ----------------------------------------------------------------------------------------------------

    def window(self) -> Window | None:
        """The group's window, made on first use (collective then); None, for ever, if a rank could not have it."""
        if self._window is None and self.least["all_reduce"] < NEVER:
            most = self._choices.window_bytes // (2 * (self.size + 1))
            chunk = min(self._choices.chunk_bytes, most) // PAGE * PAGE
            made = segment.create(self.channel.comm, Window.nbytes(self.size, chunk)) if chunk else None
            if made is None:
                self.least = dict.fromkeys(self.least, NEVER)
                return None
            spins = 0 if self._crowded else SPINS
            self._window = Window(made, self.rank, self.size, chunk, self._pause, spins)
        return self._window

    def close(self) -> None:
        self._window = None
        self.least = dict.fromkeys(self.least, NEVER)

    def _pause(self) -> Callable[[], None]:
        return Waiting(self.channel, threading.get_ident() == self._lane.thread_id)


class Waiting:
    """What to do between two looks at what another rank has not written yet.

    A lane's thread runs beside the program, which needs the core, and the interpreter, that it would spin on: it sleeps.
    """

    def __init__(self, channel: Channel, beside: bool) -> None:
        self._channel = channel
        self._backoff = Backoff()
        if beside:
            self._backoff.SPIN_S, self._backoff.YIELD_S = BESIDE_SPIN_S, BESIDE_YIELD_S
        self._ask_at = time.monotonic() + ALIVE_S

    def __call__(self) -> None:
        self._backoff.pause()
        if time.monotonic() > self._ask_at:
            # Nobody is in MPI here, so MPI's word that a rank has died (ULFM) must be asked for.
            self._channel.comm.Iprobe(ANY_SOURCE)
            self._ask_at = time.monotonic() + ALIVE_S


def plain(memory: Tensor, dtype: torch.dtype) -> Tensor:
    """The same memory as a tensor of one dimension that torch's kernels may write, whatever autograd thinks of it."""
    return torch.frombuffer(fromaddress(memory.data_ptr(), memory.nbytes), dtype=dtype)

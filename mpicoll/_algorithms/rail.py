"""The communicator of a rail: the ranks of one place on their nodes, in the order of the nodes (hierarchical.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import memmove
from typing import Any, TypeAlias

import torch
from torch import Tensor

from mpicoll._algorithms import direct
from mpicoll._algorithms.blocks import Block, block
from mpicoll._algorithms.pairwise import TESTED_FROM, Exchange, pairs
from mpicoll._mpi.channel import IN_PLACE, Channel, reduce_at_any_root
from mpicoll._mpi.datatypes import BYTE, fromaddress, spec

LEAST_SLICE = 32 << 10  # bytes for each rank from which an all_reduce or a broadcast is made of messages

Finish: TypeAlias = "Callable[[Tensor, Tensor], None]"  # (code, out), once per element: see Stages in hierarchical.py


class Rail:
    """Collectives of a rail. All ranks give buffers of the same size, and so choose the same kind of call."""

    def __init__(self, channel: Channel, comm: Any) -> None:
        self._channel, self._comm = channel, comm
        # Messages under way and their memory, which MPI uses even if an error ends the collective.
        self._unfinished: dict[int, tuple[Exchange, object]] = {}
        self._allreduce = self._collective("Allreduce")
        self._reduce = self._collective("Reduce", reduce_at_any_root)
        self._bcast = self._collective("Bcast")

    def _collective(
        self, name: str, safe: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda call: call
    ) -> Callable[..., None]:
        """Takes the number of bytes and MPI's arguments. ``safe`` makes a function of the communicator safe with this MPI."""
        blocking, start = safe(getattr(self._comm, name)), safe(getattr(self._comm, "I" + name.lower()))

        def call(nbytes: int, *arguments: Any) -> None:
            if nbytes < TESTED_FROM:
                blocking(*arguments)
            else:
                self._channel.wait_all([start(*arguments)], large=True)

        return call

    def reduce(self, memory: Tensor, datatype: Any, op: Any, root: int) -> None:
        """Reduces ``memory`` in place on the root; other ranks keep theirs."""
        buffer = _spec(memory, datatype)
        buffers = (IN_PLACE, buffer) if self._comm.Get_rank() == root else (buffer, None)
        self._reduce(memory.nbytes, *buffers, op, root)

    def all_reduce(self, memory: Tensor, datatype: Any, op: Any, out: Tensor, finish: Finish | None) -> None:
        """Reduces one-dimensional ``memory``, which is overwritten, into ``out``.

        Each rank reduces a slice that the others send it, and sends them the result. So one rank reduces an element, and all get
        the same bits. MPI's algorithms take more steps one after the other, and each may have to wait for a core.

        Args:
            out: As many elements as ``memory``; ``memory`` itself if there is nothing to finish.
            finish: (reduced, out). Called once for each element, before it is sent to the other ranks: half precision, which is
                reduced as float32, comes back as half precision.
        """
        rank, size = self._comm.Get_rank(), self._comm.Get_size()
        if memory.nbytes < max(TESTED_FROM, size * LEAST_SLICE):
            self._allreduce(memory.nbytes, IN_PLACE, _spec(memory, datatype), op)
            if finish is not None:
                finish(memory, out)
            return
        slices, results = direct.slices_of(memory, size), direct.slices_of(out, size)
        own, result = slices[rank], results[rank]
        received = own.new_empty(size, own.numel())
        self._started([block(slice_) for slice_ in slices], [block(row) for row in received], [memory, received])()
        _combine(own, received, rank, datatype, op)
        if finish is not None:
            finish(own, result)
        self._started([block(result)] * size, [block(slice_) for slice_ in results], out)()

    def reduce_scatter(self, source: Tensor, output: Tensor, datatype: Any, op: Any) -> Callable[[], None]:
        """Starts: rank i gets the reduction of the i-th block of every rank's ``source``. Both are one-dimensional.

        Returns a function that ends it. Until then nobody writes ``source``.

        Large ones do not use Ireduce_scatter: that of Open MPI 5.0 reduces all blocks on one rank and sends them from there. On 2
        hosts of 2 ranks at 1 Gbit/s it took 2.1 times the bandwidth limit; this takes 1.05 to 1.09.
        """
        rank, size = self._comm.Get_rank(), self._comm.Get_size()
        if output.nbytes < TESTED_FROM:
            self._comm.Reduce_scatter(_spec(source, datatype), _spec(output, datatype), [output.numel()] * size, op)
            return direct.nothing
        blocks = source.view(size, -1)
        received = torch.empty_like(blocks)
        moved = self._started([block(row) for row in blocks], [block(row) for row in received], [source, received])

        def end() -> None:
            moved()
            output.copy_(blocks[rank])
            _combine(output, received, rank, datatype, op)

        return end

    def all_gather(self, source: Block, address: int) -> Callable[[], None]:
        """Starts: the sources of all ranks, in their order, arrive in the memory at ``address``.

        Returns a function that ends it. Until then nobody uses either memory, and the caller keeps both.
        """
        rank, size = self._comm.Get_rank(), self._comm.Get_size()
        mine, nbytes = source
        if nbytes < TESTED_FROM:
            self._comm.Allgather(spec(*source), [fromaddress(address, size * nbytes), nbytes, BYTE])
            return direct.nothing
        moved = self._started([source] * size, [(address + peer * nbytes, nbytes) for peer in range(size)])
        memmove(address + rank * nbytes, mine, nbytes)
        return moved

    def broadcast(self, memory: Block, root: int) -> None:
        """The bytes of the root arrive in the memory of every rank."""
        if memory[1] < max(TESTED_FROM, self._comm.Get_size() * LEAST_SLICE):
            self._bcast(memory[1], spec(*memory), root)
        else:
            direct.broadcast(self._channel, memory, root, self._comm)

    def _started(self, sends: Sequence[Block], receives: Sequence[Block], scratch: object = None) -> Callable[[], None]:
        """Starts messages to and from each other rank; an entry per rank. The returned function ends them. Keeps ``scratch``."""
        outgoing, incoming, _ = pairs(self._comm, receives, sends)
        exchange = Exchange(self._channel, outgoing, incoming, large=True, comm=self._comm)
        self._unfinished[id(exchange)] = exchange, scratch

        def end() -> None:
            exchange.wait()
            del self._unfinished[id(exchange)]

        return end

    def free(self) -> None:
        """Frees the communicator (collective)."""
        self._comm.Free()


def _combine(own: Tensor, received: Tensor, rank: int, datatype: Any, op: Any) -> None:
    """Reduces the rows that the other ranks have sent into ``own``."""
    for peer, part in enumerate(received):
        if peer != rank:
            op.Reduce_local(_spec(part, datatype), _spec(own, datatype))


def _spec(memory: Tensor, datatype: Any) -> list[object]:
    return [fromaddress(memory.data_ptr(), memory.nbytes), memory.numel(), datatype]

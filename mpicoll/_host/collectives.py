"""How a collective is carried out on plain memory of this process: by the algorithm that the carrier chooses, or by MPI's own.

Each method is called by all ranks of the group, in the same order, inside an operation, and writes its result in place.
Memory is contiguous, and what is read and what is written have nothing in common but what a method says.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import memmove
from functools import cache

import torch
from torch import Tensor

from mpicoll._algorithms import native
from mpicoll._algorithms import pairwise as pairs
from mpicoll._algorithms.blocks import Block, block, blocks
from mpicoll._device.messages import Parcels
from mpicoll._host import thresholds
from mpicoll._host.carrier import Carrier
from mpicoll._mpi.channel import Channel
from mpicoll._mpi.datatypes import datatype, operation
from mpicoll._tensors import buffers, reductions
from mpicoll._tensors.combine import Kernel
from mpicoll._tensors.reductions import Op, Reduction

# The algorithms' names in the log
NATIVE = "MPI's own"
MESSAGES = "messages between pairs of ranks"

Memories = list[tuple[int, Tensor]]  # with the rank that each goes to, or comes from


# Note [One dimension for what is encoded]
# Some encoders return the memory itself as another dtype or with more dimensions (complex numbers as pairs, bool as bytes), and
# decoders copy it back into itself, which torch allows only for equal strides. The strides of a dimension of one element are
# arbitrary (torch.ones(2)[::2] is contiguous), and a view need not keep them. So what is encoded has one dimension of stride 1.


def encode(reduction: Reduction, memory: Tensor, op: Op) -> Tensor:
    """Plain memory to what MPI reduces: new memory, or the memory itself."""
    if reduction.encode is None:
        return memory
    memory = one_dimensional(memory)
    with torch.no_grad():
        return reduction.encode(memory.detach(), op).contiguous()


def decode(reduction: Reduction, code: Tensor, memory: Tensor, size: int) -> None:
    """What MPI reduced to the plain memory of the result."""
    if reduction.decode is None:
        if code is not memory:
            buffers.copy_into(memory, code)
        return
    with torch.inference_mode(memory.is_inference()), torch.no_grad():
        reduction.decode(code, buffers.uncounted(one_dimensional(memory)), size)


def one_dimensional(memory: Tensor) -> Tensor:
    """The same contiguous memory: Note [One dimension for what is encoded]."""
    return memory if memory.dim() == 1 and memory.stride(0) == 1 else buffers.flat(memory, memory.dtype)


def native_name(reduction: Reduction) -> str:
    """The name in the log of a reduction by MPI."""
    return NATIVE if reduction.encode is None else f"{NATIVE}, as {reduction.mpi_type}"


@cache
def handles(mpi_type: str, mpi_op: str) -> tuple[object, object]:
    return datatype(mpi_type), operation(mpi_op)


class Host:
    """One per group."""

    def __init__(self, channel: Channel, carrier: Carrier) -> None:
        self.channel = channel
        self.carrier = carrier
        self.rank = carrier.rank
        self.size = carrier.size
        #: bytes below which an operation is one MPI call, and nothing else, on every rank
        self.bare = carrier.least
        #: how messages between two ranks travel where memory may be a GPU's; None: they are MPI's
        self.parcels: Parcels | None = None

    def connect(self) -> None:
        """Makes the communicators that are not the group's own; with the group, see carrier.py (collective)."""
        self.carrier.connect()

    # -- one rank's to all, or all to all ------------------------------------------------------------------------------

    def broadcast(self, memory: Tensor, root: int) -> None:
        if not self.carrier.broadcast(memory, root):
            self.carrier.took("broadcast", NATIVE, memory.nbytes)
            native.broadcast(self.channel, memory, root)

    def all_gather(self, targets: Sequence[Tensor], source: Tensor) -> None:
        """Of any sizes; this rank's target may be its source."""
        if self.carrier.all_gather([block(target) for target in targets], block(source)):
            return
        sizes = [target.nbytes for target in targets]
        algorithm = thresholds.all_gather(sizes)
        self.carrier.took("all_gather", NATIVE if algorithm != "pairs" else MESSAGES, sum(sizes))
        if algorithm == "pairs":
            others = [(rank, target) for rank, target in enumerate(targets) if rank != self.rank]
            Host.exchange(self, [(rank, source) for rank, _ in others], others, (targets[self.rank], source))
            return
        flat = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
        if algorithm == "even":
            native.all_gather(self.channel, flat, source)
        else:
            native.all_gather_uneven(self.channel, flat, source, sizes)
        place = flat.data_ptr()
        for target, nbytes in zip(targets, sizes, strict=True):
            memmove(target.data_ptr(), place, nbytes)
            place += nbytes

    def all_gather_single(self, target: Tensor, source: Tensor) -> None:
        """Equal blocks; the source may be this rank's block of the target."""
        if not self.carrier.all_gather(blocks(target, self.size), block(source)):
            self.carrier.took("all_gather", NATIVE, target.nbytes)
            native.all_gather(self.channel, target, buffers.packed(source) if buffers.overlap(target, source) else source)

    # -- pairs ---------------------------------------------------------------------------------------------------------

    def all_to_all(self, name: str, targets: Sequence[Block], sources: Sequence[Block], held: Sequence[Tensor] = ()) -> None:
        """Of any sizes, which need not be known to other ranks than the two.

        Args:   held: the memory in which the blocks lie, where it is not known to be the CPU's.
        Raises: ValueError, on all ranks alike: what a rank has for another is not what that expects. Not everywhere.
        """
        wrong = self.carrier.all_to_all(targets, sources)
        if wrong is not None:
            self._raise_for(name, wrong)
            return
        self.carrier.took("all_to_all", MESSAGES, sum(nbytes for _, nbytes in targets))
        others = [rank for rank in range(self.size) if rank != self.rank]
        own = targets[self.rank], sources[self.rank]
        self.exchange_blocks([(rank, sources[rank]) for rank in others], [(rank, targets[rank]) for rank in others], own)

    def _raise_for(self, name: str, wrong: list[tuple[int, int]]) -> None:
        for i, j in wrong:
            raise ValueError(f"{name}: what rank {i} has for rank {j} has another size than what rank {j} expects from it")

    def exchange(self, sends: Memories, receives: Memories, own: tuple[Tensor, Tensor] | None) -> None:
        """Messages between pairs of ranks. own: where to and where from, of what this rank has for itself."""
        there, here = ([(rank, block(memory)) for rank, memory in side] for side in (sends, receives))
        self.exchange_blocks(there, here, None if own is None else (block(own[0]), block(own[1])))

    def exchange_blocks(
        self, sends: list[tuple[int, Block]], receives: list[tuple[int, Block]], own: tuple[Block, Block] | None
    ) -> None:
        if own is not None:
            memmove(own[0][0], own[1][0], own[1][1])
        pairs.exchange(self.channel, sends, receives)

    # -- reductions ----------------------------------------------------------------------------------------------------

    def all_reduce(self, memory: Tensor, kernel: Kernel | None, op: Op) -> None:
        """In place on every rank."""
        if kernel is not None and self.carrier.all_reduce(memory, kernel):
            return
        reduction = reductions.lookup("all_reduce", memory.dtype, op)
        self.carrier.took("all_reduce", native_name(reduction), memory.nbytes)
        code = encode(reduction, memory, op)
        native.all_reduce(self.channel, code, *handles(reduction.mpi_type, reduction.mpi_op))
        decode(reduction, code, memory, self.size)

    def reduce(self, memory: Tensor, kernel: Kernel | None, op: Op, root: int) -> None:
        """In place on the root; elsewhere the memory is only read."""
        if kernel is not None and self.carrier.reduce(memory, kernel, root):
            return
        reduction = reductions.lookup("reduce", memory.dtype, op)
        self.carrier.took("reduce", native_name(reduction), memory.nbytes)
        code, is_root = encode(reduction, memory, op), self.rank == root
        native.reduce(self.channel, code, *handles(reduction.mpi_type, reduction.mpi_op), root, is_root)
        if is_root:
            decode(reduction, code, memory, self.size)

    def reduce_scatter(self, target: Tensor, source: Tensor, counts: Sequence[int], kernel: Kernel | None, op: Op) -> None:
        """counts: the elements of each rank's block of ``source``, which is one-dimensional."""
        even = min(counts) == max(counts)
        if even and kernel is not None and self.carrier.reduce_scatter(target, source, kernel):
            return
        reduction = reductions.lookup("reduce_scatter", target.dtype, op)
        self.carrier.took("reduce_scatter", native_name(reduction), source.nbytes)
        code = encode(reduction, source, op)
        result = target if reduction.native else torch.empty(reduction.scale * target.numel(), dtype=code.dtype, device="cpu")
        coded = [count * reduction.scale for count in counts]
        native.reduce_scatter(self.channel, result, code, coded, *handles(reduction.mpi_type, reduction.mpi_op))
        decode(reduction, result, target, self.size)

    def close(self) -> None:
        """Frees what was made; called on an explicit destroy only, never from garbage collection."""
        self.carrier.close()

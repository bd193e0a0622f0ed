"""Reductions over the ranks of a group: how a tensor is encoded for MPI, reduced, decoded and delivered."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import memmove

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from mpicoll._algorithms import native
from mpicoll._algorithms.native import CHUNK
from mpicoll._cuda import streams
from mpicoll._engine.exchanges import Step, in_turn
from mpicoll._engine.gathering import Gathering
from mpicoll._host.collectives import handles
from mpicoll._mpi.channel import IN_PLACE
from mpicoll._mpi.datatypes import fromaddress
from mpicoll._progress.work import Work
from mpicoll._tensors import buffers, checks, combine, reductions, sparse
from mpicoll._tensors.buffers import Message
from mpicoll._tensors.reductions import Op

SUM = ReduceOp.SUM
PACKED_BYTES = 64 << 10  # tensors up to here are packed where many go as one: a copy is dearer than a message from here on


def bare(dtype: torch.dtype, op: Op) -> tuple[object, object] | None:
    """MPI's handles where it can reduce the bytes as they lie; None: the long way decides."""
    entry = reductions.find(dtype, op)
    return handles(entry.mpi_type, entry.mpi_op) if entry is not None and entry.native else None


# Looked up by dtype alone: a dictionary takes 0.2 us longer over a pair with a ReduceOp in it.
BARE_SUM = {dtype: bare(dtype, SUM) for dtype, _ in reductions.TABLE}
KERNEL_SUM = {dtype: combine.find(dtype, SUM) for dtype, _ in reductions.TABLE}


class Reducing(Gathering):
    """The part of a Communicator whose operations reduce."""

    def all_reduce(self, tensor: Tensor, op: Op = SUM, async_op: bool = False) -> Work | None:
        """Reduces elementwise over all ranks into ``tensor``, in place, the same bits on every rank (collective).

        Args:   tensor: any shape and strides, the same shape and dtype on every rank; or sparse (COO) on every rank, with
                any places on each.
        Raises: UnsupportedReduction (a TypeError): dtype and op have no right answer together.
        """
        if not async_op and buffers.is_bare(tensor) and self._all_reduce_at_once(tensor, op):
            return None
        return self.start("all_reduce", self._all_reduce("all_reduce", tensor, op), [tensor], async_op)

    def _all_reduce_at_once(self, tensor: Tensor, op: Op) -> bool:
        """The bare path, for memory that can be reduced as it lies; False, and nothing done, for everything else."""
        dtype, nbytes = tensor.dtype, tensor.nbytes
        handles = BARE_SUM[dtype] if op is SUM else bare(dtype, op)
        if handles is None or nbytes >= self.host.bare["all_reduce"]:
            kernel = KERNEL_SUM[dtype] if op is SUM else combine.find(dtype, op)
            return kernel is not None and self.at_once("all_reduce", self.host.all_reduce, tensor, kernel, op)
        if nbytes > CHUNK:
            return False
        buffer = [fromaddress(tensor.data_ptr(), nbytes), tensor.numel(), handles[0]]
        return self.at_once("all_reduce", self.channel.Allreduce, IN_PLACE, buffer, handles[1])

    def all_reduce_coalesced(self, tensors: Sequence[Tensor], op: Op = SUM, async_op: bool = False) -> Work | None:
        """``all_reduce`` of each tensor, as one operation (collective)."""
        name = "all_reduce_coalesced"
        given = checks.tensors(name, "tensors", tensors)
        steps, small = [], dict[torch.dtype, list[Tensor]]()
        for tensor in given:
            if tensor.nbytes > PACKED_BYTES:
                steps.append(self._all_reduce(name, tensor, op))
            else:
                small.setdefault(tensor.dtype, []).append(tensor)
        steps += [self._all_reduce_packed(name, alike, op) for alike in small.values()]
        return self.start(name, in_turn(steps), given, async_op)

    def _all_reduce_packed(self, name: str, tensors: Sequence[Tensor], op: Op) -> Step:
        """Tensors of one dtype as one message."""
        if len(tensors) == 1:
            return self._all_reduce(name, tensors[0], op)
        if not all(tensor.is_cpu for tensor in tensors):
            return self._all_reduce_concatenated(name, tensors, op)
        reductions.lookup(name, tensors[0].dtype, op)
        kernel = combine.find(tensors[0].dtype, op)
        incoming = [Message(t, t) if buffers.is_bare(t) else buffers.incoming(name, t) for t in tensors]
        extents = [(mine.address, mine.nbytes) for mine in incoming]

        def transfer() -> None:
            packed = torch.empty(sum(nbytes for _, nbytes in extents), dtype=torch.uint8, device="cpu").view(tensors[0].dtype)
            first = place = packed.data_ptr()
            for address, nbytes in extents:
                memmove(place, address, nbytes)
                place += nbytes
            self.host.all_reduce(packed, kernel, op)
            place = first
            for address, nbytes in extents:
                memmove(address, place, nbytes)
                place += nbytes
            for mine in incoming:
                mine.deliver()

        return transfer

    def _all_reduce_concatenated(self, name: str, tensors: Sequence[Tensor], op: Op) -> Step:
        """The same where some are on a GPU: on the first one's device."""
        reductions.lookup(name, tensors[0].dtype, op)
        kernel = combine.find(tensors[0].dtype, op)
        incoming = [buffers.incoming(name, tensor) for tensor in tensors]
        memories = [buffers.flat(mine.memory, mine.memory.dtype) for mine in incoming]

        def transfer() -> None:
            packed = torch.cat([streams.onto(memories[0].device, memory) for memory in memories])
            self.host.all_reduce(packed, kernel, op)
            for mine, memory, part in zip(incoming, memories, packed.split([m.numel() for m in memories]), strict=True):
                memory.copy_(part)
                mine.deliver()

        return buffers.ordered(transfer, memories)

    def _all_reduce(self, name: str, tensor: Tensor, op: Op) -> Step:
        if isinstance(tensor, Tensor) and tensor.layout is torch.sparse_coo:
            return self._all_reduce_sparse(name, tensor, op)
        checks.movable(name, tensor)
        reductions.lookup(name, tensor.dtype, op)
        kernel = combine.find(tensor.dtype, op)
        incoming = buffers.incoming(name, tensor)

        def transfer() -> None:
            self.host.all_reduce(incoming.memory, kernel, op)
            incoming.deliver()

        return buffers.ordered(transfer, [incoming.memory])

    def _all_reduce_sparse(self, name: str, tensor: Tensor, op: Op) -> Step:
        source = sparse.coalesced(name, tensor, op)

        def transfer() -> None:
            headers = torch.empty(self.size, sparse.HEADER, dtype=torch.int64, device="cpu")
            native.all_gather(self.channel, headers, sparse.header(source, tensor.dtype))
            counts = sparse.counts(name, headers)
            places, parts = source.indices(), source.values()
            indices = [places.new_empty(len(places), count) for count in counts]
            values = [parts.new_empty(count, *parts.shape[1:]) for count in counts]
            self._all_gather(name, indices, places)()
            self._all_gather(name, values, parts)()
            sparse.add_up(tensor, indices, values, op)
            if caller is not None:
                for made in (tensor._indices(), tensor._values()):
                    streams.kept_for(caller, made)

        caller = None if tensor.is_cpu else streams.caller(tensor.device)
        return buffers.ordered(transfer, [tensor])

    def reduce(self, tensor: Tensor, dst: int, op: Op = SUM, async_op: bool = False) -> Work | None:
        """Reduces into ``tensor`` on ``dst``; the other ranks' tensors stay as they were (collective)."""
        dst = checks.group_rank("reduce", "dst", dst, self.size)
        if not async_op and buffers.is_bare(tensor) and self._reduce_at_once(tensor, dst, op):
            return None
        is_root = self.rank == dst
        checks.movable("reduce", tensor)
        reductions.lookup("reduce", tensor.dtype, op)
        kernel = combine.find(tensor.dtype, op)
        mine = buffers.incoming("reduce", tensor) if is_root else buffers.outgoing("reduce", tensor)

        def transfer() -> None:
            self.host.reduce(mine.memory, kernel, op, dst)
            if is_root:
                mine.deliver()

        return self.start("reduce", buffers.ordered(transfer, [mine.memory]), [tensor], async_op)

    def _reduce_at_once(self, tensor: Tensor, dst: int, op: Op) -> bool:
        """The bare path, for what is small and can be reduced as it lies; False, and nothing done, for everything else."""
        dtype, nbytes = tensor.dtype, tensor.nbytes
        handles = BARE_SUM[dtype] if op is SUM else bare(dtype, op)
        if handles is None or nbytes >= self.host.bare["reduce"] or nbytes > CHUNK:
            return False
        buffer = [fromaddress(tensor.data_ptr(), nbytes), tensor.numel(), handles[0]]
        if self.rank != dst:
            return self.at_once("reduce", self.channel.Reduce, buffer, None, handles[1], dst)
        return self.at_once("reduce", self.channel.Reduce, IN_PLACE, buffer, handles[1], dst)

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], op: Op = SUM, async_op: bool = False) -> Work | None:
        """Rank i's ``output`` becomes the reduction of everybody's ``inputs[i]`` (collective).

        Args:   inputs: one tensor per rank; inputs[i] has the same numel on every rank, different i may differ.
        """
        given = checks.tensors("reduce_scatter", "input_list", inputs, self.size)
        checks.movable("reduce_scatter", output, "output")
        checks.same_dtype("reduce_scatter", ("output", output), *((f"input_list[{i}]", t) for i, t in enumerate(given)))
        checks.same_numel("reduce_scatter", "output", output.numel(), "rank's own input", given[self.rank].numel())
        sources = [buffers.outgoing("reduce_scatter", t).memory.detach().reshape(-1) for t in given]
        flat = torch.cat([streams.onto(output.device, source) for source in sources])
        counts = [t.numel() for t in given]
        step = self._reduce_scatter("reduce_scatter", output, flat, counts, op)
        return self.start("reduce_scatter", step, [output], async_op, reads=given)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, op: Op = SUM, async_op: bool = False) -> Work | None:
        """Rank i's ``output`` becomes the reduction of everybody's i-th block of ``tensor`` (collective).

        Args:   tensor: numel == size * output.numel(); ``output`` may be a slice of it.
        """
        bare = not async_op and buffers.is_bare(tensor) and buffers.is_bare(output)
        if bare and self._reduce_scatter_at_once(output, tensor, op):
            return None
        step = self._reduce_scatter_single("reduce_scatter_single", output, tensor, op)
        return self.start("reduce_scatter_single", step, [output], async_op, reads=[tensor])

    def _reduce_scatter_at_once(self, output: Tensor, tensor: Tensor, op: Op) -> bool:
        """The bare path; False, and nothing done, for what is not small, has something before it, or is not right."""
        nbytes, count, dtype = tensor.nbytes, output.numel(), tensor.dtype
        handles = BARE_SUM[dtype] if op is SUM else bare(dtype, op)
        if handles is None or nbytes >= self.host.bare["reduce_scatter"] or nbytes > CHUNK:
            return False
        if tensor.numel() != count * self.size or output.dtype is not dtype or buffers.overlap(output, tensor):
            return False
        source = [fromaddress(tensor.data_ptr(), nbytes), count, handles[0]]
        target = [fromaddress(output.data_ptr(), output.nbytes), count, handles[0]]
        return self.at_once("reduce_scatter_single", self.channel.Reduce_scatter_block, source, target, handles[1])

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], tensors: Sequence[Tensor], op: Op = SUM, async_op: bool = False
    ) -> Work | None:
        """``reduce_scatter_single`` of each pair, as one operation (collective)."""
        name = "reduce_scatter_single_coalesced"
        sources = checks.tensors(name, "inputs", tensors)
        targets = checks.tensors(name, "outputs", outputs)
        checks.same_numel(name, "outputs", len(targets), "inputs", len(sources))
        steps = [self._reduce_scatter_single(name, target, source, op) for target, source in zip(targets, sources, strict=True)]
        return self.start(name, in_turn(steps), targets, async_op, reads=sources)

    def _reduce_scatter_single(self, name: str, output: Tensor, tensor: Tensor, op: Op) -> Step:
        checks.movable(name, output, "output")
        source = buffers.outgoing(name, tensor)
        checks.same_dtype(name, ("output", output), ("input", tensor))
        checks.same_numel(name, "input", tensor.numel(), f"output x {self.size} ranks", output.numel() * self.size)
        return self._reduce_scatter(name, output, source.memory, [output.numel()] * self.size, op)

    def _reduce_scatter(self, name: str, output: Tensor, flat: Tensor, counts: Sequence[int], op: Op) -> Step:
        reductions.lookup(name, output.dtype, op)
        target = buffers.incoming(name, output)
        kernel = combine.find(output.dtype, op)

        def transfer() -> None:
            source = buffers.packed(flat) if buffers.overlap(target.memory, flat) else flat
            self.host.reduce_scatter(target.memory, source, counts, kernel, op)
            target.deliver()

        return buffers.ordered(transfer, [flat, target.memory])

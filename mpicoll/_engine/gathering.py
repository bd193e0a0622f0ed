"""Collectives that bring one rank's tensor, or every rank's, to all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import memmove

import torch
from torch import Tensor

from mpicoll._algorithms import native
from mpicoll._engine.exchanges import Exchanges, Step, in_turn
from mpicoll._mpi.datatypes import BYTE, INT_MAX, fromaddress
from mpicoll._progress.work import Work
from mpicoll._tensors import buffers, checks


class Gathering(Exchanges):
    """The part of a Communicator whose operations bring tensors to all ranks."""

    def broadcast(self, tensor: Tensor, src: int, async_op: bool = False) -> Work | None:
        """``src``'s tensor arrives in everybody's (collective)."""
        src = checks.group_rank("broadcast", "src", src, self.size)
        if not async_op and buffers.is_bare(tensor) and self._broadcast_at_once(tensor, src):
            return None
        mine = buffers.outgoing("broadcast", tensor) if self.rank == src else buffers.incoming("broadcast", tensor)

        def transfer() -> None:
            self.host.broadcast(mine.memory, src)
            if self.rank != src:
                mine.deliver()

        return self.start("broadcast", buffers.ordered(transfer, [mine.memory]), [tensor], async_op)

    def _broadcast_at_once(self, tensor: Tensor, src: int) -> bool:
        """The bare path; False, and nothing done, for what is not small, or has something before it."""
        nbytes = tensor.nbytes
        if nbytes >= self.host.bare["broadcast"] or nbytes > INT_MAX:
            return False
        buffer = [fromaddress(tensor.data_ptr(), nbytes), nbytes, BYTE]
        return self.at_once("broadcast", self.channel.Bcast, buffer, src)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, async_op: bool = False) -> Work | None:
        """Rank i's tensor arrives in everybody's ``outputs[i]``; the ranks' tensors may differ in size (collective)."""
        if not async_op and self._all_gather_list_at_once(outputs, tensor):
            return None
        step = self._all_gather("all_gather", outputs, tensor)
        return self.start("all_gather", step, list(outputs), async_op, reads=[tensor])

    def _all_gather_list_at_once(self, outputs: Sequence[Tensor], tensor: Tensor) -> bool:
        """The bare path, for small tensors of one size; False, and nothing done, for everything else."""
        if type(outputs) is not list or len(outputs) != self.size or not buffers.is_bare(tensor):
            return False
        nbytes, dtype = tensor.nbytes, tensor.dtype
        if nbytes * self.size >= self.host.bare["all_gather"] or nbytes * self.size > INT_MAX:
            return False
        if not all(buffers.is_bare(output) and output.dtype is dtype and output.nbytes == nbytes for output in outputs):
            return False
        return self.at_once("all_gather", self._all_gather_small, [output.data_ptr() for output in outputs], tensor)

    def _all_gather_small(self, addresses: list[int], tensor: Tensor) -> None:
        nbytes = tensor.nbytes
        flat = torch.empty(nbytes * self.size, dtype=torch.uint8, device="cpu")
        native.all_gather(self.channel, flat, tensor)
        place = flat.data_ptr()
        for address in addresses:
            memmove(address, place, nbytes)
            place += nbytes

    def all_gather_coalesced(
        self, output_lists: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor], async_op: bool = False
    ) -> Work | None:
        """``all_gather`` of each tensor; output_lists[i][r] is rank r's i-th tensor, as one operation (collective)."""
        name = "all_gather_coalesced"
        given = checks.tensors(name, "input_tensor_list", tensors)
        checks.same_numel(name, "output_tensor_lists", len(output_lists), "input_tensor_list", len(given))
        steps = [self._all_gather(name, outputs, tensor) for outputs, tensor in zip(output_lists, given, strict=True)]
        return self.start(name, in_turn(steps), [t for outputs in output_lists for t in outputs], async_op, reads=given)

    def _all_gather(self, name: str, outputs: Sequence[Tensor], tensor: Tensor) -> Step:
        targets = checks.tensors(name, "tensor_list", outputs, self.size)
        source = buffers.outgoing(name, tensor)
        checks.same_dtype(name, ("tensor", tensor), *((f"tensor_list[{i}]", t) for i, t in enumerate(targets)))
        checks.same_numel(name, "tensor", tensor.numel(), f"tensor_list[{self.rank}]", targets[self.rank].numel())
        for index, target in enumerate(targets):
            checks.writable(name, target, f"tensor_list[{index}]")
        incoming = [buffers.incoming(name, target) for target in targets]
        aliased = any(buffers.overlap(source.memory, mine.memory) for mine in incoming)

        def transfer() -> None:
            memory = buffers.packed(source.memory) if aliased else source.memory
            self.host.all_gather([mine.memory for mine in incoming], memory)
            for mine in incoming:
                mine.deliver()

        return buffers.ordered(transfer, [source.memory, *(mine.memory for mine in incoming)])

    def all_gather_single(self, output: Tensor, tensor: Tensor, async_op: bool = False) -> Work | None:
        """Rank i's tensor arrives as the i-th block of everybody's ``output`` (collective).

        Args:   output: numel == size * tensor.numel(), as one long tensor (n*k, ...) or stacked (n, k, ...);
                ``tensor`` may be a slice of it.
        """
        if not async_op and buffers.is_bare(tensor) and buffers.is_bare(output) and self._all_gather_at_once(output, tensor):
            return None
        step = self._all_gather_single("all_gather_single", output, tensor)
        return self.start("all_gather_single", step, [output], async_op, reads=[tensor])

    def _all_gather_at_once(self, output: Tensor, tensor: Tensor) -> bool:
        """The bare path; False, and nothing done, for what is not small, has something before it, or is not right."""
        nbytes, total = tensor.nbytes, output.nbytes
        if total >= self.host.bare["all_gather"] or total > INT_MAX or total != nbytes * self.size:
            return False
        if output.dtype is not tensor.dtype or buffers.overlap(output, tensor):
            return False
        source = [fromaddress(tensor.data_ptr(), nbytes), nbytes, BYTE]
        target = [fromaddress(output.data_ptr(), total), nbytes, BYTE]
        return self.at_once("all_gather_single", self.channel.Allgather, source, target)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], tensors: Sequence[Tensor], async_op: bool = False
    ) -> Work | None:
        """``all_gather_single`` of each pair, as one operation (collective)."""
        name = "all_gather_single_coalesced"
        sources = checks.tensors(name, "inputs", tensors)
        targets = checks.tensors(name, "outputs", outputs)
        checks.same_numel(name, "outputs", len(targets), "inputs", len(sources))
        steps = [self._all_gather_single(name, target, source) for target, source in zip(targets, sources, strict=True)]
        return self.start(name, in_turn(steps), targets, async_op, reads=sources)

    def _all_gather_single(self, name: str, output: Tensor, tensor: Tensor) -> Step:
        checks.movable(name, output, "output")
        source = buffers.outgoing(name, tensor)
        checks.same_dtype(name, ("output", output), ("input", tensor))
        checks.same_numel(name, "output", output.numel(), f"input x {self.size} ranks", tensor.numel() * self.size)
        target = buffers.incoming(name, output)
        own = target.memory.data_ptr() + self.rank * source.nbytes  # where the input may lie already
        aliased = buffers.overlap(source.memory, target.memory)

        def transfer() -> None:
            memory = buffers.packed(source.memory) if aliased and source.address != own else source.memory
            self.host.all_gather_single(target.memory, memory)
            target.deliver()

        return buffers.ordered(transfer, [source.memory, target.memory])

"""How a collective is carried out where some rank's memory may be a GPU's: by one of three ways, the same on all ranks.

    direct    MPI takes GPU memory: its own calls move, torch's kernels reduce what was moved
    ipc       the ranks of a node open each other's GPU memory (CUDA IPC): the window's algorithms, on slots there
    staged    through pinned host memory, chunk after chunk (staged.py): what `Host` does, on each chunk

# Note [Who has memory where]
# Ranks may call one operation with tensors of different devices, and each knows of its own only. What is small goes the staged
# way on a rank that has it on a GPU; to the others that is the host's way. For what is large the ranks ask each other first, and
# all of them take the GPUs' way if one has to. Who has it in host memory takes part as it is, or with a copy on its own GPU.
# Messages between pairs of ranks match whatever either side does, so there nobody asks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from mpicoll._algorithms import direct, native, shared_memory
from mpicoll._algorithms.blocks import Block, block, blocks
from mpicoll._cuda import ipc, streams
from mpicoll._device import staging
from mpicoll._device.messages import Parcels
from mpicoll._device.regions import Regions
from mpicoll._device.staging import Part
from mpicoll._device.window import DeviceWindow
from mpicoll._host.carrier import Carrier
from mpicoll._host.collectives import Host, Memories
from mpicoll._host.thresholds import Choices
from mpicoll._mpi import runtime, shared_segment
from mpicoll._mpi.channel import Channel
from mpicoll._mpi.datatypes import BYTE
from mpicoll._tensors import buffers
from mpicoll._tensors.combine import Kernel
from mpicoll._tensors.reductions import Op

ASK_FROM = 64 << 10  # bytes; below, two copies over the bus take no longer than asking does
SLOT = 8 << 20  # bytes of a slot in a GPU's memory; five of them, 40 MiB, for each group that uses this way
Way = Literal["host", "direct", "ipc", "staged"]
GPU_WAYS: dict[Way, str] = {  # their names in the log
    "direct": "GPU memory handed to MPI", "ipc": "GPU memory of the node, by CUDA IPC", "staged": "through pinned host memory",
}  # fmt: skip


class Gpus(Host):
    """One per group of a world in which some rank has a GPU."""

    def __init__(self, channel: Channel, carrier: Carrier, choices: Choices) -> None:
        super().__init__(channel, carrier)
        # The kernels reduce several parts; and non-blocking collectives of GPU memory are what no trial has shown.
        self._direct = choices.direct and self.size > 1 and not channel.serialized
        self._shares = choices.shares_gpus and carrier.shares_memory
        self._window: DeviceWindow | None = None
        self.bare = {operation: min(least, ASK_FROM) for operation, least in carrier.least.items()}
        self._mine, self._all = bytearray(1), bytearray(self.size)
        self._asking = [self._mine, 1, BYTE], [self._all, 1, BYTE]
        self._choices = choices
        #: how many collectives went which way; for tests, and for who wonders
        self.taken: Counter[Way] = Counter()

    def connect(self) -> None:
        super().connect()
        near = [self._choices.shares_gpus and self.carrier.beside(rank) for rank in range(self.size)]
        self.parcels = Parcels(self.channel, self._choices.direct, near)

    # -- one rank's to all, or all to all ------------------------------------------------------------------------------

    def broadcast(self, memory: Tensor, root: int) -> None:
        way = self._way("broadcast", memory.nbytes, memory)
        if way == "host":
            super().broadcast(memory, root)
        elif way == "direct":
            native.broadcast(self.channel, memory, root)
        elif way == "ipc":
            with self._reaching(memory) as window:
                shared_memory.broadcast(window, block(memory), root)
        else:
            bytes_, mine = buffers.raw(memory), self.rank == root
            chunks = [[Part(bytes_[a:b], mine, not mine)] for a, b in staging.extents(bytes_.numel(), 1)]
            staging.carry_out(chunks, lambda chunk: Host.broadcast(self, chunk, root))

    def all_gather(self, targets: Sequence[Tensor], source: Tensor) -> None:
        sizes = [target.nbytes for target in targets]
        way = self._way("all_gather", sum(sizes), source, *targets)
        if way == "host":
            super().all_gather(targets, source)
        elif way == "direct":
            others = [(rank, target) for rank, target in enumerate(targets) if rank != self.rank]
            self._exchange_direct([(rank, source) for rank, _ in others], others, (targets[self.rank], source))
        elif way == "ipc":
            with self._reaching(source, *targets) as window:
                shared_memory.all_gather(window, [block(target) for target in targets], block(source))
        else:
            into, mine = [buffers.raw(target) for target in targets], buffers.raw(source)
            even = min(sizes) == max(sizes)
            extents = staging.extents(source.nbytes, 1, self.size + 1) if even else [(0, max(sizes))]
            chunks = [[Part(mine[a:b], True, False), *(Part(t[a:b], False, True) for t in into)] for a, b in extents]
            staging.carry_out(chunks, lambda chunk, *parts: Host.all_gather(self, parts, chunk))

    def all_gather_single(self, target: Tensor, source: Tensor) -> None:
        way = self._way("all_gather", target.nbytes, target, source)
        if way == "host":
            super().all_gather_single(target, source)
        elif way == "direct":
            source = buffers.packed(source) if buffers.overlap(target, source) else source
            self._settle(source)
            native.all_gather(self.channel, target, source)
        elif way == "ipc":
            with self._reaching(target, source) as window:
                shared_memory.all_gather(window, blocks(target, self.size), block(source))
        else:
            rows, mine = buffers.raw(target).view(self.size, -1), buffers.raw(source)
            extents = staging.extents(source.nbytes, 1, self.size + 1)
            chunks = [[Part(rows[:, a:b], False, True), Part(mine[a:b], True, False)] for a, b in extents]
            staging.carry_out(chunks, partial(Host.all_gather_single, self))

    # -- pairs ---------------------------------------------------------------------------------------------------------

    def all_to_all(self, name: str, targets: Sequence[Block], sources: Sequence[Block], held: Sequence[Tensor] = ()) -> None:
        way = self._way("all_to_all", None, *held)
        if way == "host":
            super().all_to_all(name, targets, sources)
            return
        if way == "ipc":
            with self._reaching(*held) as window:
                self._raise_for(name, shared_memory.all_to_all(window, targets, sources))
            return
        regions = Regions(buffers.raw(memory) for memory in held)
        into, given = ([regions.bytes(*block_) for block_ in side] for side in (targets, sources))
        if way == "direct":
            others = [rank for rank in range(self.size) if rank != self.rank]
            own = into[self.rank], given[self.rank]
            self._exchange_direct([(rank, given[rank]) for rank in others], [(rank, into[rank]) for rank in others], own)
            return

        def call(*chunks: Tensor) -> None:
            there, here = ([block(chunk) for chunk in side] for side in (chunks[: self.size], chunks[self.size :]))
            Host.all_to_all(self, name, there, here)

        staging.carry_out([[*(Part(t, False, True) for t in into), *(Part(t, True, False) for t in given)]], call)

    def exchange(self, sends: Memories, receives: Memories, own: tuple[Tensor, Tensor] | None) -> None:
        everything = [memory for _, memory in [*sends, *receives]] + list(own or ())
        if all(memory.is_cpu for memory in everything):
            super().exchange(sends, receives, own)
        elif self._direct:
            self._exchange_direct(sends, receives, own)
        else:
            there, here = ([rank for rank, _ in side] for side in (sends, receives))
            parts = [Part(buffers.raw(memory), True, False) for _, memory in sends]
            parts += [Part(buffers.raw(memory), False, True) for _, memory in receives]
            parts += [] if own is None else [Part(buffers.raw(own[0]), False, True), Part(buffers.raw(own[1]), True, False)]

            def call(*values: Tensor) -> None:
                given, into, mine = values[: len(there)], values[len(there) : len(there) + len(here)], values[-2:]
                ends = None if own is None else (mine[0], mine[1])
                Host.exchange(self, list(zip(there, given, strict=True)), list(zip(here, into, strict=True)), ends)

            staging.carry_out([parts], call)

    def _exchange_direct(self, sends: Memories, receives: Memories, own: tuple[Tensor, Tensor] | None) -> None:
        if own is not None and own[0].data_ptr() != own[1].data_ptr():
            buffers.raw(own[0]).copy_(buffers.raw(own[1]))
        self._settle(*(memory for _, memory in [*sends, *receives]))
        Host.exchange(self, sends, receives, None)

    # -- reductions ----------------------------------------------------------------------------------------------------

    def all_reduce(self, memory: Tensor, kernel: Kernel | None, op: Op) -> None:
        self._reduced(memory, kernel, None, lambda chunk: Host.all_reduce(self, chunk, kernel, op))

    def reduce(self, memory: Tensor, kernel: Kernel | None, op: Op, root: int) -> None:
        self._reduced(memory, kernel, root, lambda chunk: Host.reduce(self, chunk, kernel, op, root))

    def _reduced(self, memory: Tensor, kernel: Kernel | None, root: int | None, host: Callable[[Tensor], None]) -> None:
        """In place on the root; None: on every rank. host: does it on plain memory."""
        operation = "all_reduce" if root is None else "reduce"
        way, written = self._reducing_way(operation, kernel, memory.nbytes, memory), root in (None, self.rank)
        if way == "host":
            host(memory)
        elif way == "direct":
            assert kernel is not None
            direct.all_reduce(
                self.channel, buffers.flat(memory, kernel.dtype), kernel.combine, root, lambda: self._settle(memory)
            )
        elif way == "ipc":
            assert kernel is not None
            with self._here(Part(buffers.flat(memory, kernel.dtype), True, written)) as (here,), self._reaching(here) as window:
                shared_memory.all_reduce(window, here, kernel.combine, root)
        else:
            elements = buffers.flat(memory, memory.dtype)
            extents = staging.extents(elements.numel(), elements.element_size())
            staging.carry_out([[Part(elements[a:b], True, written)] for a, b in extents], host)

    def reduce_scatter(self, target: Tensor, source: Tensor, counts: Sequence[int], kernel: Kernel | None, op: Op) -> None:
        even = min(counts) == max(counts)
        way = self._reducing_way("reduce_scatter", kernel if even else None, source.nbytes, target, source)
        if way == "host":
            super().reduce_scatter(target, source, counts, kernel, op)
        elif way == "direct":
            assert kernel is not None
            output = buffers.flat(target, kernel.dtype)
            elements = streams.onto(output.device, buffers.flat(source, kernel.dtype))
            self._settle(elements)
            direct.reduce_scatter(self.channel, output, elements, kernel.combine, lambda: self._settle(target))
        elif way == "ipc":
            assert kernel is not None
            parts = Part(buffers.flat(target, kernel.dtype), False, True), Part(buffers.flat(source, kernel.dtype), True, False)
            with self._here(*parts) as (output, elements), self._reaching(output, elements) as window:
                shared_memory.reduce_scatter(window, output, elements, kernel.combine)
        else:
            output, elements = buffers.flat(target, target.dtype), buffers.flat(source, source.dtype)
            chunks = [[Part(output, False, True), Part(elements, True, False)]]
            if even:
                rows = elements.view(self.size, -1)
                extents = staging.extents(output.numel(), output.element_size(), self.size + 1)
                chunks = [[Part(output[a:b], False, True), Part(rows[:, a:b], True, False)] for a, b in extents]

            def call(output: Tensor, elements: Tensor) -> None:
                sizes = [output.numel()] * self.size if even else counts
                Host.reduce_scatter(self, output, elements.view(-1), sizes, kernel, op)

            staging.carry_out(chunks, call)

    # -- which way -----------------------------------------------------------------------------------------------------

    def _reducing_way(self, operation: str, kernel: Kernel | None, nbytes: int, *memories: Tensor) -> Way:
        """What torch has no kernel for is encoded for MPI's own reductions, of host memory."""
        way = self._choose(nbytes, *memories)
        if kernel is None and way in ("direct", "ipc"):
            way = "staged"
        return self._note(operation, way, nbytes)

    def _way(self, operation: str, nbytes: int | None, *memories: Tensor) -> Way:
        return self._note(operation, self._choose(nbytes, *memories), nbytes)

    def _note(self, operation: str, way: Way, nbytes: int | None) -> Way:
        self.taken[way] += 1
        if way != "host":  # that logs its own
            self.carrier.took(operation, GPU_WAYS[way], nbytes or 0)
        return way

    def _choose(self, nbytes: int | None, *memories: Tensor) -> Way:
        """Args: nbytes: alike on all ranks; None: they do not know of each other's, and ask."""
        device = next((memory.device for memory in memories if not memory.is_cpu), None)
        if nbytes is not None and nbytes < ASK_FROM:
            return "host" if device is None else "staged"
        if not self._anybody(device is not None):
            return "host"
        if self._direct:
            self._settle(*memories)
            return "direct"
        return "ipc" if self._shares and self._made(device) else "staged"

    def _anybody(self, mine: bool) -> bool:
        """Whether any rank's memory is a GPU's (collective)."""
        self._mine[0] = mine
        self.channel.Allgather(*self._asking)
        return any(self._all)

    def _settle(self, *memories: Tensor) -> None:
        """Before MPI reads: what was launched to write them, or to read them, has ended."""
        for device in {memory.device for memory in memories if not memory.is_cpu}:
            streams.wait_for_ours(device)

    # -- the window in the GPUs' memory --------------------------------------------------------------------------------

    def _made(self, device: torch.device | None) -> bool:
        """Makes the window on first use (collective then); False, for ever, if a rank could not have its own."""
        if self._window is None:
            self._window = self._new_window(device)
            self._shares = self._window is not None
        return self._shares

    def _new_window(self, device: torch.device | None) -> DeviceWindow | None:
        comm = self.channel.comm
        buffer, records = self._shared_buffer(device)
        given = comm.alltoall(records)  # everybody's for this rank
        buffers = [
            buffer if rank == self.rank else None if buffer is None or record is None else ipc.opened(record, buffer.device)
            for rank, record in enumerate(given)
        ]
        words = shared_segment.create(comm, DeviceWindow.words(self.size))
        opened = [opened for opened in buffers if opened is not None]
        if not all(comm.allgather(len(opened) == self.size)) or words is None:
            return None
        return DeviceWindow(words, opened, self.rank, SLOT, self.carrier.pause, self.carrier.spins)

    def _shared_buffer(self, device: torch.device | None) -> tuple[Tensor | None, list[bytes | None]]:
        """This rank's, with a record for each of the others; nothing, if anything goes wrong: they wait for either."""
        nothing: list[bytes | None] = [None] * self.size
        try:
            buffer = ipc.allocate(device or ipc.current_device(), DeviceWindow.buffer_nbytes(SLOT))
            records = nothing if buffer is None else [ipc.share(buffer) if r != self.rank else None for r in range(self.size)]
        except Exception:  # noqa: BLE001  whatever a GPU's first use may raise
            return None, nothing
        return buffer, records

    @contextmanager
    def _reaching(self, *memories: Tensor) -> Iterator[DeviceWindow]:
        """The window, for an operation on this memory, which it does not hold any longer."""
        assert self._window is not None
        self._window.reach(buffers.raw(memory) for memory in memories)
        try:
            yield self._window
        finally:
            self._window.reach(())

    @contextmanager
    def _here(self, *parts: Part) -> Iterator[list[Tensor]]:
        """The parts' memory where the window's kernels reach it: as it is, or copied to this rank's GPU and back."""
        assert self._window is not None
        device = self._window.device
        if all(part.memory.device == device for part in parts):
            yield [part.memory for part in parts]
            return
        with streams.ours(streams.marks([device])):
            copies = [streams.onto(device, part.memory) for part in parts]
            yield copies
            for part, copy in zip(parts, copies, strict=True):
                if part.written and copy is not part.memory:
                    part.memory.copy_(copy)

    def close(self) -> None:
        """And lets go of the others' memory; torch keeps this rank's until they have, too."""
        super().close()
        if self.parcels is not None and not runtime.finalized():
            self.parcels.close()
        self._window = self.parcels = None
        self._shares = False

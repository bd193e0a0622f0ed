"""Collectives on GPU memory. All ranks of a group use the same one of three paths:

    direct    MPI takes GPU memory: MPI moves the bytes, torch kernels reduce them
    ipc       the ranks of a node open each other's GPU memory (CUDA IPC): the shared-memory algorithms, on slots in GPU memory
    staged    through pinned host memory, chunk by chunk (staging.py): the host collectives, on each chunk

Small operations are staged: two copies over the bus take less time than a synchronisation between GPUs.

# Note [One kind of device in each collective]
# All ranks pass tensors on the same kind of device, as with torch's own backends. The collectives on GPU memory have their own
# communicator. So a rank that passes a CPU tensor instead is in another collective. That collective ends in a timeout that names
# it, and no rank gets wrong bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from mpicoll._algorithms import direct, native, pairwise, shared_memory
from mpicoll._algorithms.backend import Backend
from mpicoll._algorithms.blocks import Block, block, blocks
from mpicoll._algorithms.plans import Plan
from mpicoll._algorithms.windows import Windows
from mpicoll._device import staging, streams
from mpicoll._device.consensus import DeviceChoices
from mpicoll._device.ipc_window import SharedDeviceMemory
from mpicoll._device.messages import DeviceMessages
from mpicoll._device.staging import Part
from mpicoll._mpi import runtime
from mpicoll._mpi.channel import Channel
from mpicoll._mpi.topology import Topology
from mpicoll._tensors import buffers, calls, checks
from mpicoll._tensors.calls import Call, Signature
from mpicoll._tensors.reductions import Op

SMALL = 64 << 10  # bytes; smaller operations are staged
Way = Literal["direct", "ipc", "staged"]
LOG_NAMES: dict[Way, str] = {
    "direct": "GPU memory handed to MPI", "ipc": "GPU memory of the node, by CUDA IPC", "staged": "through pinned host memory",
}  # fmt: skip
Memories = Sequence[tuple[int, Tensor]]  # (peer, memory)


class DeviceCollectives:
    """The `Backend` of one group for GPU memory, in a world in which some rank has a GPU.

    Args:
        channel: Communicators for these collectives alone.
        host: Collectives on host memory over that channel.
        windows: Their windows; None: MPI moves everything.
        checked: Messages say what they are.
    """

    def __init__(
        self,
        channel: Channel,
        host: Backend,
        windows: Windows | None,
        choices: DeviceChoices,
        topology: Topology,
        took: Callable[[str, str, int], None],
        checked: bool,
    ) -> None:
        self.channel = channel
        self.host = host
        self.rank: int = channel.comm.Get_rank()
        self.size: int = channel.comm.Get_size()
        self._took = took
        # The kernels reduce at least two parts, and no trial has shown non-blocking collectives on GPU memory to work.
        self._direct = choices.direct and self.size > 1 and not channel.serialized
        self._shared = SharedDeviceMemory(channel, windows if choices.shares and topology.single else None)
        node = topology.nodes[self.rank]
        near = [choices.shares and rank != self.rank and other == node for rank, other in enumerate(topology.nodes)]
        self.messages = DeviceMessages(channel, choices.direct, near, checked)
        self.taken: Counter[Way] = Counter()  # number of collectives per path; read by tests

    check = staticmethod(streams.refuse_capture)

    def _call(self, memories: Sequence[Tensor], signature: Signature, function: Callable[..., object], *arguments: Any) -> Call:
        """Returns a Call that runs on internal streams, after the work that the caller has launched until now."""
        return _run_behind, (streams.marks(memory.device for memory in memories), function, arguments), signature

    def copying_back(self, call: Call, tensors: Sequence[Tensor], memories: Sequence[Tensor]) -> Call:
        run_behind, (marks, function, arguments), signature = call
        return run_behind, (marks, calls.run_and_copy_back, ((function, arguments, ()), tensors, memories)), signature

    # -- from one rank, from all ranks ---------------------------------------------------------------------------------

    def broadcast(self, memory: Tensor, root: int) -> Call:
        return self._call([memory], (memory.dtype, memory.nbytes, root), self._broadcast, memory, root)

    def _broadcast(self, memory: Tensor, root: int) -> None:
        way = self._way("broadcast", memory.nbytes, memory)
        if way == "direct":
            native.broadcast(self.channel, memory, root)
        elif way == "ipc":
            with self._shared.reaching(memory) as window:
                shared_memory.broadcast(window, block(memory), root)
        else:
            flat, is_root = buffers.raw(memory), self.rank == root
            chunks = [[Part(flat[a:b], is_root, not is_root)] for a, b in staging.extents(flat.numel(), 1)]
            staging.carry_out(chunks, lambda chunk: calls.run(self.host.broadcast(chunk, root)))

    def all_gather(self, targets: Sequence[Tensor], source: Tensor) -> Call:
        sizes = tuple(target.nbytes for target in targets)
        signature = (source.dtype, sum(sizes), None, sizes)
        return self._call([source, *targets], signature, self._all_gather, targets, source)

    def _all_gather(self, targets: Sequence[Tensor], source: Tensor) -> None:
        if any(buffers.overlap(source, target) for target in targets):
            source = buffers.packed(source)
        sizes = [target.nbytes for target in targets]
        way = self._way("all_gather", sum(sizes), source, *targets)
        if way == "direct":
            self._exchange_direct(*pairwise.pairs(self.channel.comm, targets, [source] * self.size))
        elif way == "ipc":
            with self._shared.reaching(source, *targets) as window:
                shared_memory.all_gather(window, [block(target) for target in targets], block(source))
        else:
            outputs, flat = [buffers.raw(target) for target in targets], buffers.raw(source)
            even = min(sizes) == max(sizes)
            extents = staging.extents(source.nbytes, 1, self.size + 1) if even else [(0, max(sizes))]
            chunks = [[Part(flat[a:b], True, False), *(Part(t[a:b], False, True) for t in outputs)] for a, b in extents]
            staging.carry_out(chunks, lambda chunk, *parts: calls.run(self.host.all_gather(parts, chunk)))

    def all_gather_single(self, target: Tensor, source: Tensor) -> Call:
        return self._call([target, source], (target.dtype, target.nbytes), self._all_gather_single, target, source)

    def _all_gather_single(self, target: Tensor, source: Tensor) -> None:
        overlap, own = buffers.overlap(target, source), target.data_ptr() + self.rank * source.nbytes
        way = self._way("all_gather", target.nbytes, target, source)
        if overlap and (source.data_ptr() != own or way == "direct"):
            source = buffers.packed(source)
        if way == "direct":
            self._settle(source)
            native.all_gather(self.channel, target, source)
        elif way == "ipc":
            with self._shared.reaching(target, source) as window:
                shared_memory.all_gather(window, blocks(target, self.size), block(source))
        else:
            rows, flat = buffers.raw(target).view(self.size, -1), buffers.raw(source)
            extents = staging.extents(source.nbytes, 1, self.size + 1)
            chunks = [[Part(rows[:, a:b], False, True), Part(flat[a:b], True, False)] for a, b in extents]
            staging.carry_out(chunks, lambda rows, chunk: calls.run(self.host.all_gather_single(rows, chunk)))

    # -- messages between pairs ----------------------------------------------------------------------------------------

    def gather(self, targets: Sequence[Tensor] | None, source: Tensor, root: int) -> Call:
        own = [] if targets else [(root, block(source))]
        traffic = own, [(rank, block(target)) for rank, target in enumerate(targets or []) if rank != root]
        return self._call([source, *(targets or [])], (source.dtype, None, root, traffic), self._gather, targets, source, root)

    def _gather(self, targets: Sequence[Tensor] | None, source: Tensor, root: int) -> None:
        if not self._direct:
            parts = [Part(buffers.raw(source), True, False), *(Part(buffers.raw(t), False, True) for t in targets or [])]
            call = lambda source, *outputs: calls.run(self.host.gather(outputs if targets else None, source, root))  # noqa: E731
            staging.carry_out([parts], call)
        elif targets is None:
            self._exchange_direct([(root, source)], [], None)
        else:
            receives = [(rank, target) for rank, target in enumerate(targets) if rank != root]
            self._exchange_direct([], receives, (targets[root], source))

    def scatter(self, target: Tensor, sources: Sequence[Tensor] | None, root: int) -> Call:
        own = [] if sources else [(root, block(target))]
        traffic = [(rank, block(source)) for rank, source in enumerate(sources or []) if rank != root], own
        return self._call([target, *(sources or [])], (target.dtype, None, root, traffic), self._scatter, target, sources, root)

    def _scatter(self, target: Tensor, sources: Sequence[Tensor] | None, root: int) -> None:
        if not self._direct:
            parts = [Part(buffers.raw(target), False, True), *(Part(buffers.raw(s), True, False) for s in sources or [])]
            call = lambda target, *values: calls.run(self.host.scatter(target, values if sources else None, root))  # noqa: E731
            staging.carry_out([parts], call)
        elif sources is None:
            self._exchange_direct([], [(root, target)], None)
        else:
            sends = [(rank, source) for rank, source in enumerate(sources) if rank != root]
            self._exchange_direct(sends, [], (target, sources[root]))

    def all_to_all(self, targets: Sequence[Tensor], sources: Sequence[Tensor], operation: str = "all_to_all") -> Call:
        outputs, inputs = [buffers.raw(t) for t in targets], [buffers.raw(s) for s in sources]
        signature = targets[0].dtype, None, None, ([block(t) for t in inputs], [block(t) for t in outputs])
        return self._call([*outputs, *inputs], signature, self._all_to_all, operation, outputs, inputs)

    def all_to_all_single(self, target: Tensor, source: Tensor, receives: Sequence[int], sends: Sequence[int]) -> Call:
        return self.all_to_all(_rows(target, receives), _rows(source, sends), "all_to_all_single")

    def _all_to_all(self, operation: str, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        way = self._way("all_to_all", None, *targets, *sources)
        if way == "ipc":
            with self._shared.reaching(*targets, *sources) as window:
                outputs, inputs = ([block(memory) for memory in side] for side in (targets, sources))
                checks.refuse_sizes(operation, shared_memory.all_to_all(window, outputs, inputs))
        elif way == "direct":
            self._exchange_direct(*pairwise.pairs(self.channel.comm, targets, sources))
        else:
            parts = [*(Part(t, False, True) for t in targets), *(Part(s, True, False) for s in sources)]
            n = self.size
            staging.carry_out([parts], lambda *host: calls.run(self.host.all_to_all(host[:n], host[n:], operation)))

    def _exchange_direct(self, sends: Memories, receives: Memories, own: tuple[Tensor, Tensor] | None) -> None:
        """Copies ``own`` (target, source) within this rank, and exchanges the memories with their ranks."""
        if own is not None and own[0].data_ptr() != own[1].data_ptr():
            buffers.raw(own[0]).copy_(buffers.raw(own[1]))
        self._settle(*(memory for _, memory in [*sends, *receives]))
        pairwise.exchange(self.channel, _blocks(sends), _blocks(receives))

    # -- reductions ----------------------------------------------------------------------------------------------------

    def all_reduce(self, memory: Tensor, plan: Plan) -> Call:
        return self._call([memory], (plan, memory.nbytes), self._reduced, memory, plan, None)

    def all_reduce_packed(self, memories: Sequence[Tensor], plan: Plan) -> Call:
        sizes = tuple(memory.nbytes for memory in memories)
        signature = plan, sum(sizes), None, sizes
        return self._call(memories, signature, self._all_reduce_packed, memories, plan)

    def _all_reduce_packed(self, memories: Sequence[Tensor], plan: Plan) -> None:
        flats = [buffers.flat(memory, memory.dtype) for memory in memories]
        packed = torch.cat([streams.onto(flats[0].device, flat) for flat in flats])
        self._reduced(packed, plan, None)
        for flat, part in zip(flats, packed.split([flat.numel() for flat in flats]), strict=True):
            flat.copy_(part)

    def all_reduce_sparse(self, operation: str, tensor: Tensor, source: Tensor, op: Op) -> Call:
        caller = streams.caller(tensor.device)
        return self._call([tensor], (tensor.dtype,), self._all_reduce_sparse, caller, operation, tensor, source, op)

    def _all_reduce_sparse(self, caller: object, operation: str, tensor: Tensor, source: Tensor, op: Op) -> None:
        calls.run(self.host.all_reduce_sparse(operation, tensor, source, op))
        for part in (tensor._indices(), tensor._values()):
            streams.keep_for(caller, part)

    def reduce(self, memory: Tensor, plan: Plan, root: int) -> Call:
        return self._call([memory], (plan, memory.nbytes, root), self._reduced, memory, plan, root)

    def _reduced(self, memory: Tensor, plan: Plan, root: int | None) -> None:
        """Reduces in place on the root; None: on every rank."""
        operation, kernel, written = "all_reduce" if root is None else "reduce", plan.kernel, root in (None, self.rank)
        way = self._reducing_way(operation, plan, memory.nbytes, memory)
        if way == "direct":
            assert kernel is not None
            flat = buffers.flat(memory, kernel.dtype)
            direct.all_reduce(self.channel, flat, kernel.combine, root, lambda: self._settle(memory))
        elif way == "ipc":
            assert kernel is not None
            with (
                self._shared.here(Part(buffers.flat(memory, kernel.dtype), True, written)) as (local,),
                self._shared.reaching(local) as window,
            ):
                shared_memory.all_reduce(window, local, kernel.combine, root)
        else:
            elements = buffers.flat(memory, memory.dtype)
            extents = staging.extents(elements.numel(), elements.element_size())
            staging.carry_out(
                [[Part(elements[a:b], True, written)] for a, b in extents], partial(self._reduced_on_host, plan, root)
            )

    def _reduced_on_host(self, plan: Plan, root: int | None, chunk: Tensor) -> None:
        calls.run(self.host.all_reduce(chunk, plan) if root is None else self.host.reduce(chunk, plan, root))

    def scan(self, memory: Tensor, plan: Plan, exclusive: bool) -> Call:
        return self._call([memory], (plan, memory.nbytes), self._scan, memory, plan, exclusive)

    def _scan(self, memory: Tensor, plan: Plan, exclusive: bool) -> None:
        self._way("scan", 0, memory)  # staged
        elements = buffers.flat(memory, memory.dtype)
        chunks = [[Part(elements[a:b], True, True)] for a, b in staging.extents(elements.numel(), elements.element_size())]
        staging.carry_out(chunks, lambda chunk: calls.run(self.host.scan(chunk, plan, exclusive)))

    def reduce_scatter(self, target: Tensor, source: Tensor, counts: Sequence[int], plan: Plan) -> Call:
        signature = plan, source.nbytes, None, tuple(count * source.element_size() for count in counts)
        return self._call([target, source], signature, self._reduce_scatter, target, source, counts, plan)

    def reduce_scatter_single(self, target: Tensor, source: Tensor, plan: Plan) -> Call:
        counts = [target.numel()] * self.size
        return self._call([target, source], (plan, source.nbytes), self._reduce_scatter, target, source, counts, plan)

    def _reduce_scatter(self, target: Tensor, source: Tensor, counts: Sequence[int], plan: Plan) -> None:
        if buffers.overlap(target, source):
            source = buffers.packed(source)
        even, kernel = min(counts) == max(counts), plan.kernel
        way = self._reducing_way("reduce_scatter", plan, source.nbytes, target, source) if even else "staged"
        if way == "direct":
            assert kernel is not None
            output = buffers.flat(target, kernel.dtype)
            elements = streams.onto(output.device, buffers.flat(source, kernel.dtype))
            self._settle(elements)
            direct.reduce_scatter(self.channel, output, elements, kernel.combine, lambda: self._settle(target))
        elif way == "ipc":
            assert kernel is not None
            parts = Part(buffers.flat(target, kernel.dtype), False, True), Part(buffers.flat(source, kernel.dtype), True, False)
            with self._shared.here(*parts) as (output, elements), self._shared.reaching(output, elements) as window:
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
                calls.run(self.host.reduce_scatter(output, elements.view(-1), sizes, plan))

            staging.carry_out(chunks, call)

    # -- choice of the path --------------------------------------------------------------------------------------------

    def _reducing_way(self, operation: str, plan: Plan, nbytes: int, *memories: Tensor) -> Way:
        """Returns `_way` for a reduction. Without a torch kernel it is staged, and MPI reduces its code in host memory."""
        return self._way(operation, 0 if plan.kernel is None else nbytes, *memories)

    def _way(self, operation: str, nbytes: int | None, *memories: Tensor) -> Way:
        """Returns the path of an operation (collective when the window is made).

        ``nbytes`` is equal on all ranks; None: ranks do not know the sizes of others.
        """
        way: Way = "staged"
        if nbytes is None or nbytes >= SMALL:
            if self._direct:
                self._settle(*memories)
                way = "direct"
            elif self._shared.make(memories[0].device):
                way = "ipc"
        self.taken[way] += 1
        self._took(operation, LOG_NAMES[way], nbytes or 0)
        return way

    def _settle(self, *memories: Tensor) -> None:
        """Waits until the launched work that writes or reads the memories has ended. Called before MPI uses them."""
        for device in {memory.device for memory in memories}:
            streams.wait_for_internal(device)

    def close(self) -> None:
        self._shared.close()  # torch keeps this rank's window until the other ranks have released it, too
        self.host.close()
        if not runtime.finalized():
            self.messages.close()
            self.channel.free()


def _run_behind(marks: Sequence[streams.Mark], function: Callable[..., object], arguments: Sequence[Any]) -> None:
    # Memory that is allocated inside is used again by threads in inference mode, and by threads outside of it.
    with torch.inference_mode(False), streams.internal_streams(marks):
        function(*arguments)


def _blocks(memories: Memories) -> list[tuple[int, Block]]:
    return [(rank, block(memory)) for rank, memory in memories]


def _rows(memory: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Splits the memory, as bytes, into blocks with ``counts`` rows of dim 0."""
    flat, row = buffers.raw(memory), memory.nbytes // max(memory.size(0), 1)
    return list(flat.split([count * row for count in counts]))

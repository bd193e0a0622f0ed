"""Collectives on CPU memory.

Each operation has two halves. Any thread may call the first one at any time; it returns a `Call`. For a small operation on memory
that MPI can use as it is, this is one MPI call. The second half runs in the group's order, on all ranks alike: it asks
`thresholds` for the algorithm and carries it out. Memory is contiguous, and results are written in place. A Call may hold only an
address, so that its caller keeps the memory until it has run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from ctypes import memmove

import torch
from torch import Tensor

from mpicoll._algorithms import direct, hierarchical, native, pairwise, shared_memory, stages
from mpicoll._algorithms.blocks import Block, block, blocks, pieces, rows
from mpicoll._algorithms.direct import SLICE
from mpicoll._algorithms.native import CHUNK
from mpicoll._algorithms.plans import Plan
from mpicoll._algorithms.window import Window
from mpicoll._algorithms.windows import Windows
from mpicoll._host import algorithm_choice
from mpicoll._host.algorithm_choice import DIRECT, HIERARCHICAL, NATIVE, PAIRWISE, SHARED_MEMORY, Thresholds
from mpicoll._host.messages import HostMessages
from mpicoll._host.shared_storages import NOT_SHARED, SharedStorages
from mpicoll._mpi.channel import IN_PLACE, Channel
from mpicoll._mpi.datatypes import BYTE, INT_MAX, allocate, fromaddress
from mpicoll._tensors import buffers, calls, checks
from mpicoll._tensors.calls import Call
from mpicoll._tensors.combine import Combine
from mpicoll._tensors.reductions import Op

ENCODED = 4 << 20  # elements of 8 or 16 bits that a reduce_scatter encodes at a time, which may take four times their memory
FLAT_BYTES = 64 << 10  # read from other ranks. Below this a second synchronisation costs more than slicing saves.
# In MPI, and in the window of another rank, a rank keeps a core busy while it waits. The ranks of a node wait before that
# (_faults/late_ranks.py). Between nodes they meet first: 4 MiB between 2 ranks took 0 to 3 % longer, 25 MiB as long as before.
MET_FROM = 4 << 20  # bytes
MEETINGS = frozenset({"all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather"})  # whose bytes every rank knows alike
LOG_NAMES = {
    NATIVE: "MPI's own",
    SHARED_MEMORY: "shared memory",
    HIERARCHICAL: "shared memory in each node, MPI between nodes",
    DIRECT: "messages, reduced by torch",
    PAIRWISE: "messages between pairs of ranks",
}


class HostCollectives:
    """The collectives of one group. ``took`` logs (operation, algorithm, bytes). ``checked``: messages say what they are."""

    def __init__(
        self, channel: Channel, windows: Windows, known: Thresholds, took: Callable[[str, str, int], None], checked: bool
    ) -> None:
        self.messages = HostMessages(channel, checked, windows.apart)
        self.channel = channel
        self.windows = windows
        self.rank: int = channel.comm.Get_rank()
        self.size: int = channel.comm.Get_size()
        self.storages = SharedStorages(channel, windows)
        self._took = took
        self.use(known)

    def use(self, known: Thresholds) -> None:
        """Chooses by these thresholds from now on. They must be equal on all ranks."""
        self.thresholds = known
        self.known = buffers.Known[Call]()
        below = known.single_call_below()
        self._single_call_below = {name: min(nbytes, MET_FROM) for name, nbytes in below.items()} if self.windows.apart else below

    def keep(self, tensor: Tensor, call: Call, root: int | None = None) -> None:
        """Keeps a Call that is one call of MPI for the next operation on the same memory. Not where ranks compare each call."""
        if call[0] in (self.channel.Allreduce, self.channel.Bcast) and not self.messages.checked:
            self.known.keep(tensor, call, root)

    def copying_back(self, call: Call, tensors: Sequence[Tensor], memories: Sequence[Tensor]) -> Call:
        return calls.run_and_copy_back, (call, tensors, memories), call[2]

    def _algorithm(self, operation: str, nbytes: int, choose: Callable[..., str], *values: object) -> str:
        """Returns the algorithm that ``choose(thresholds, *values)`` names, and makes its windows (collective on first use)."""
        if self.windows.apart and nbytes >= MET_FROM and operation in MEETINGS:
            self.channel.barrier(math.inf)
        name = choose(self.thresholds, *values)
        if name in (SHARED_MEMORY, HIERARCHICAL) and not self.windows.make():
            self.use(self.thresholds.without_windows())
            name = choose(self.thresholds, *values)
        if name != NATIVE:
            self._took(operation, LOG_NAMES[name], nbytes)
        return name

    # -- reductions ----------------------------------------------------------------------------------------------------

    def all_reduce(self, memory: Tensor, plan: Plan) -> Call:
        """Reduces in place on every rank."""
        nbytes = memory.nbytes
        if plan.native and nbytes < self._single_call_below["all_reduce"] and nbytes <= CHUNK:
            buffer = [fromaddress(memory.data_ptr(), nbytes), memory.numel(), plan.mpi_type]
            return self.channel.Allreduce, (IN_PLACE, buffer, plan.mpi_op), (plan, nbytes)
        return self._reduced, (memory, plan, None), (plan, nbytes)

    def _reduced(self, memory: Tensor, plan: Plan, root: int | None) -> None:
        """Reduces in place on the root; None: on every rank."""
        nbytes, kernel = memory.nbytes, plan.kernel
        if root is None:
            operation = "all_reduce"
            algorithm = self._algorithm(operation, nbytes, algorithm_choice.all_reduce, nbytes, kernel is not None, plan.widened)
        else:
            operation = "reduce"
            algorithm = self._algorithm(operation, nbytes, algorithm_choice.reduce, nbytes, kernel is not None)
        if algorithm == NATIVE or kernel is None:
            self._took(operation, plan.log_name, nbytes)
            code = plan.encode(memory)
            if root is None:
                native.all_reduce(self.channel, code, plan.mpi_type, plan.mpi_op)
            else:
                native.reduce(self.channel, code, plan.mpi_type, plan.mpi_op, root, self.rank == root)
            if root in (None, self.rank):
                plan.decode(code, memory, self.size)
            return
        flat = _vector(memory, kernel.dtype)
        if algorithm == DIRECT:
            direct.all_reduce(self.channel, flat, kernel.combine, root, slice_nbytes=SLICE)
        elif (window := self.windows.window) is None:
            assert self.windows.nodes is not None
            hierarchical.all_reduce(self.windows.nodes, flat, stages.of(kernel, self.size), root)
        elif root is None and nbytes * (self.size - 1) <= FLAT_BYTES:
            shared_memory.reduce_flat(window, flat, flat, kernel.combine)
        elif root is None and self.storages.count and self._all_reduce_in_place(window, memory, flat, kernel.combine):
            return
        elif self.size == 2:
            shared_memory.reduce_flat(window, flat, flat, kernel.combine, root=root)
        else:
            shared_memory.all_reduce(window, flat, kernel.combine, root)

    def _all_reduce_in_place(self, window: Window, memory: Tensor, flat: Tensor, combine: Combine) -> bool:
        """Reduces memory that all ranks map. False on all ranks if the memory of a rank is not such."""
        storage = memory.untyped_storage()
        number = self.storages.number(storage)
        places = shared_memory.exchange(window, (number, memory.data_ptr() - storage.data_ptr()))
        if number == NOT_SHARED or any(other != number for other, _ in places):
            return False
        shared = self.storages.get(storage)
        self._took("all_reduce", "shared memory, in place", flat.nbytes)
        parts = [(buffer, begin + offset) for (buffer, begin), (_, offset) in zip(shared.parts, places, strict=True)]
        shared_memory.all_reduce_in_place(window, parts, flat.nbytes, flat.dtype, combine)
        return True

    def all_reduce_packed(self, memories: Sequence[Tensor], plan: Plan) -> Call:
        sizes = tuple(memory.nbytes for memory in memories)
        return self._all_reduce_packed, (memories, plan), (plan, sum(sizes), None, sizes)

    def _all_reduce_packed(self, memories: Sequence[Tensor], plan: Plan) -> None:
        extents = [block(memory) for memory in memories]
        packed = torch.empty(sum(nbytes for _, nbytes in extents), dtype=torch.uint8, device="cpu").view(memories[0].dtype)
        position = packed.data_ptr()
        for address, nbytes in extents:
            memmove(position, address, nbytes)
            position += nbytes
        calls.run(self.all_reduce(packed, plan))
        _spread(packed.data_ptr(), memories)

    def all_reduce_sparse(self, operation: str, tensor: Tensor, source: Tensor, op: Op) -> Call:
        return self._all_reduce_sparse, (operation, tensor, source, op), (tensor.dtype,)

    def _all_reduce_sparse(self, operation: str, tensor: Tensor, source: Tensor, op: Op) -> None:
        from mpicoll._tensors import sparse

        headers = torch.empty(self.size, sparse.HEADER, dtype=torch.int64, device="cpu")
        native.all_gather(self.channel, headers, sparse.header(source, tensor.dtype))
        counts = sparse.counts(operation, headers)
        own_indices, own_values = source.indices().contiguous(), source.values().contiguous()
        indices = [own_indices.new_empty(len(own_indices), count) for count in counts]
        values = [own_values.new_empty(count, *own_values.shape[1:]) for count in counts]
        calls.run(self.all_gather(indices, own_indices))
        calls.run(self.all_gather(values, own_values))
        sparse.add_up(tensor, indices, values, op)

    def reduce(self, memory: Tensor, plan: Plan, root: int) -> Call:
        nbytes = memory.nbytes
        if plan.native and nbytes < self._single_call_below["reduce"] and nbytes <= CHUNK:
            buffer = [fromaddress(memory.data_ptr(), nbytes), memory.numel(), plan.mpi_type]
            if self.rank == root:
                return self.channel.Reduce, (IN_PLACE, buffer, plan.mpi_op, root), (plan, nbytes, root)
            return self.channel.Reduce, (buffer, None, plan.mpi_op, root), (plan, nbytes, root)
        return self._reduced, (memory, plan, root), (plan, nbytes, root)

    def scan(self, memory: Tensor, plan: Plan, exclusive: bool) -> Call:
        return self._scan, (memory, plan, exclusive), (plan, memory.nbytes)

    def _scan(self, memory: Tensor, plan: Plan, exclusive: bool) -> None:
        code, ranks = plan.encode(memory), self.rank + (not exclusive)
        native.scan(self.channel, code, plan.mpi_type, plan.mpi_op, exclusive)
        if ranks > 0:
            plan.decode(code, memory, ranks)

    def reduce_scatter(self, target: Tensor, source: Tensor, counts: Sequence[int], plan: Plan) -> Call:
        arguments = target, source, counts, min(counts) == max(counts), plan
        sizes = tuple(count * source.element_size() for count in counts)
        return self._reduce_scatter, arguments, (plan, source.nbytes, None, sizes)

    def reduce_scatter_single(self, target: Tensor, source: Tensor, plan: Plan) -> Call:
        nbytes, count = source.nbytes, target.numel()
        small = nbytes < self._single_call_below["reduce_scatter"] and nbytes <= CHUNK
        if small and plan.native and not buffers.overlap(target, source):
            source_buffer = [fromaddress(source.data_ptr(), nbytes), count, plan.mpi_type]
            target_buffer = [fromaddress(target.data_ptr(), target.nbytes), count, plan.mpi_type]
            return self.channel.Reduce_scatter_block, (source_buffer, target_buffer, plan.mpi_op), (plan, nbytes)
        return self._reduce_scatter, (target, source, [count] * self.size, True, plan), (plan, nbytes)

    def _reduce_scatter(self, target: Tensor, source: Tensor, counts: Sequence[int], even: bool, plan: Plan) -> None:
        nbytes, kernel = source.nbytes, plan.kernel
        values = nbytes, kernel is not None, plan.widened, even
        algorithm = self._algorithm("reduce_scatter", nbytes, algorithm_choice.reduce_scatter, *values)
        if buffers.overlap(target, source):
            source = buffers.packed(source)
        if algorithm == NATIVE or kernel is None:
            self._took("reduce_scatter", plan.log_name, nbytes)
            longest = max(1, ENCODED // self.size)
            if plan.native or max(counts) <= longest or source.element_size() > 2:
                self._reduce_scatter_native(target, source, counts, plan)
                return
            output, slices = buffers.flat(target, target.dtype), buffers.flat(source, source.dtype).split(list(counts))
            for begin, end in pieces(max(counts), longest):
                parts = [slice_[begin:end] for slice_ in slices]
                self._reduce_scatter_native(output[begin:end], torch.cat(parts), [part.numel() for part in parts], plan)
            return
        output, flat = _vector(target, kernel.dtype), _vector(source, kernel.dtype)
        if algorithm == DIRECT:
            direct.reduce_scatter(self.channel, output, flat, kernel.combine, slice_nbytes=SLICE)
        elif (window := self.windows.window) is not None:
            if nbytes <= min(FLAT_BYTES, window.chunk):
                shared_memory.reduce_flat(window, output, flat, kernel.combine, self.rank * output.nbytes)
            else:
                shared_memory.reduce_scatter(window, output, flat, kernel.combine)
        else:
            assert self.windows.nodes is not None
            hierarchical.reduce_scatter(self.windows.nodes, output, flat, stages.of(kernel, self.size))

    def _reduce_scatter_native(self, target: Tensor, source: Tensor, counts: Sequence[int], plan: Plan) -> None:
        code, scale = plan.encode(source), plan.entry.scale
        result = target if plan.native else torch.empty(scale * target.numel(), dtype=code.dtype, device="cpu")
        native.reduce_scatter(self.channel, result, code, [count * scale for count in counts], plan.mpi_type, plan.mpi_op)
        plan.decode(result, target, self.size)

    # -- from one rank, from all ranks ---------------------------------------------------------------------------------

    def broadcast(self, memory: Tensor, root: int) -> Call:
        nbytes = memory.nbytes
        if nbytes < self._single_call_below["broadcast"] and nbytes <= INT_MAX:
            buffer = [fromaddress(memory.data_ptr(), nbytes), nbytes, BYTE]
            return self.channel.Bcast, (buffer, root), (memory.dtype, nbytes, root)
        return self._broadcast, (memory, root), (memory.dtype, nbytes, root)

    def _broadcast(self, memory: Tensor, root: int) -> None:
        algorithm = self._algorithm("broadcast", memory.nbytes, algorithm_choice.broadcast, memory.nbytes)
        if algorithm == NATIVE:
            self._took("broadcast", LOG_NAMES[NATIVE], memory.nbytes)
            native.broadcast(self.channel, memory, root)
        elif algorithm == DIRECT:
            direct.broadcast(self.channel, block(memory), root)
        elif (window := self.windows.window) is not None:
            shared_memory.broadcast(window, block(memory), root)
        else:
            assert self.windows.nodes is not None
            hierarchical.broadcast(self.windows.nodes, block(memory), root)

    def all_gather_single(self, target: Tensor, source: Tensor) -> Call:
        nbytes, total = source.nbytes, target.nbytes
        if total < self._single_call_below["all_gather"] and total <= INT_MAX and not buffers.overlap(target, source):
            source_buffer = [fromaddress(source.data_ptr(), nbytes), nbytes, BYTE]
            target_buffer = [fromaddress(target.data_ptr(), total), nbytes, BYTE]
            return self.channel.Allgather, (source_buffer, target_buffer), (target.dtype, total)
        return self._all_gather_single, (target, source), (target.dtype, total)

    def _all_gather_single(self, target: Tensor, source: Tensor) -> None:
        targets = blocks(target, self.size)
        if buffers.overlap(target, source) and source.data_ptr() != targets[self.rank][0]:
            source = buffers.packed(source)
        if self._gathered(targets, block(source)) == NATIVE:
            self._took("all_gather", LOG_NAMES[NATIVE], target.nbytes)
            native.all_gather(self.channel, target, buffers.packed(source) if buffers.overlap(target, source) else source)

    def all_gather(self, targets: Sequence[Tensor], source: Tensor) -> Call:
        sizes = [target.nbytes for target in targets]
        total = sum(sizes)
        if total < self._single_call_below["all_gather"] and total <= INT_MAX and min(sizes) == max(sizes):
            return self._all_gather_small, (targets, source, sizes[0]), (source.dtype, total, None, tuple(sizes))
        return self._all_gather, (targets, source, sizes), (source.dtype, total, None, tuple(sizes))

    def _all_gather(self, targets: Sequence[Tensor], source: Tensor, sizes: Sequence[int]) -> None:
        if any(buffers.overlap(source, target) for target in targets):
            source = buffers.packed(source)
        outputs = [block(target) for target in targets]
        algorithm = self._gathered(outputs, block(source))
        if algorithm == PAIRWISE:
            self._exchange(*pairwise.pairs(self.channel.comm, outputs, [block(source)] * self.size))
        elif algorithm == NATIVE:
            self._took("all_gather", LOG_NAMES[NATIVE], sum(sizes))
            flat = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu")
            if min(sizes) == max(sizes):
                native.all_gather(self.channel, flat, source)
            else:
                native.all_gather_uneven(self.channel, flat, source, sizes)
            _spread(flat.data_ptr(), targets)

    def _all_gather_small(self, targets: Sequence[Tensor], source: Tensor, nbytes: int) -> None:
        flat = allocate(nbytes * self.size)  # a microsecond faster than a tensor
        self.channel.Allgather([fromaddress(source.data_ptr(), nbytes), nbytes, BYTE], [flat, nbytes, BYTE])
        _spread(flat.address, targets)

    def _gathered(self, targets: Sequence[Block], source: Block) -> str:
        """Returns the algorithm, after it has gathered. NATIVE and PAIRWISE are left to the caller."""
        sizes = [nbytes for _, nbytes in targets]
        algorithm = self._algorithm("all_gather", sum(sizes), algorithm_choice.all_gather, sizes)
        if algorithm == SHARED_MEMORY:
            assert self.windows.window is not None
            shared_memory.all_gather(self.windows.window, targets, source)
        elif algorithm == HIERARCHICAL:
            assert self.windows.nodes is not None
            hierarchical.all_gather(self.windows.nodes, targets, source)
        elif algorithm == DIRECT:
            direct.all_gather(self.channel, targets, source)
        return algorithm

    # -- messages between pairs ----------------------------------------------------------------------------------------

    def gather(self, targets: Sequence[Tensor] | None, source: Tensor, root: int) -> Call:
        if targets is None:
            sends = [(root, block(source))]
            return self._exchange, (sends, [], None), (source.dtype, None, root, (sends, []))
        receives = [(rank, block(target)) for rank, target in enumerate(targets) if rank != root]
        own = block(targets[root]), block(source)
        return self._exchange, ([], receives, own), (source.dtype, None, root, ([], receives))

    def scatter(self, target: Tensor, sources: Sequence[Tensor] | None, root: int) -> Call:
        if sources is None:
            receives = [(root, block(target))]
            return self._exchange, ([], receives, None), (target.dtype, None, root, ([], receives))
        sends = [(rank, block(source)) for rank, source in enumerate(sources) if rank != root]
        own = block(target), block(sources[root])
        return self._exchange, (sends, [], own), (target.dtype, None, root, (sends, []))

    def _exchange(
        self, sends: list[tuple[int, Block]], receives: list[tuple[int, Block]], own: tuple[Block, Block] | None
    ) -> None:
        """Copies ``own`` (target, source) within this rank, and exchanges the blocks with their ranks."""
        if own is not None:
            (target, _), (source, nbytes) = own
            memmove(target, source, nbytes)
        pairwise.exchange(self.channel, sends, receives, len(self.windows.node_members) > 1)

    def all_to_all(self, targets: Sequence[Tensor], sources: Sequence[Tensor], operation: str = "all_to_all") -> Call:
        outputs, inputs = [block(target) for target in targets], [block(source) for source in sources]
        return self._all_to_all, (operation, outputs, inputs), (targets[0].dtype, None, None, (inputs, outputs))

    def all_to_all_single(self, target: Tensor, source: Tensor, receives: Sequence[int], sends: Sequence[int]) -> Call:
        outputs, inputs = rows(target, receives), rows(source, sends)
        return self._all_to_all, ("all_to_all_single", outputs, inputs), (target.dtype, None, None, (inputs, outputs))

    def all_to_all_even(self, target: Tensor, source: Tensor) -> Call:
        """Exchanges equal blocks, as all_to_all_single does if no rows are named."""
        outputs, inputs = blocks(target, self.size), blocks(source, self.size)
        return self._all_to_all, ("all_to_all_single", outputs, inputs), (target.dtype, None, None, (inputs, outputs))

    def _all_to_all(self, operation: str, targets: Sequence[Block], sources: Sequence[Block]) -> None:
        nbytes = sum(size for _, size in targets)
        if self._algorithm("all_to_all", nbytes, algorithm_choice.all_to_all) == SHARED_MEMORY:
            assert self.windows.window is not None
            wrong = shared_memory.all_to_all(self.windows.window, targets, sources)
            checks.refuse_sizes(operation, wrong)
        else:
            self._exchange(*pairwise.pairs(self.channel.comm, targets, sources))

    # -- barrier -------------------------------------------------------------------------------------------------------

    def barrier(self, timeout_s: float, failed: Callable[[], bool]) -> bool:
        """Returns True when all ranks have called it, False if one has not within ``timeout_s``, or the group has ``failed``."""
        # No window is made here: a rank would wait without end for the others to make one, too.
        if self.windows.window is None:
            return self.channel.barrier(timeout_s, failed)
        return shared_memory.barrier(self.windows.window, timeout_s, failed)

    def close(self) -> None:
        self.windows.close()
        self.use(self.thresholds.without_windows())


def _vector(memory: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns an alias of the memory with one dimension. torch kernels may write it even if autograd protects the memory."""
    return torch.frombuffer(fromaddress(memory.data_ptr(), memory.nbytes), dtype=dtype)


def _spread(position: int, targets: Sequence[Tensor]) -> None:
    """Copies the consecutive bytes at an address into the tensors."""
    for target in targets:
        nbytes = target.nbytes
        memmove(target.data_ptr(), position, nbytes)
        position += nbytes

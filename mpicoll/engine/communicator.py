"""One per process group: a short method per operation. Ranks are group ranks.

Every collective is called by all ranks of the group, in the same order. With ``async_op`` it returns a Work that completes
by itself; without, it has ended when it returns None.

    checks -> message (tensor to memory) -> reductions (encode) -> the lane -> algorithms -> decode -> deliver
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from mpicoll.algorithms import native
from mpicoll.algorithms.native import CHUNK
from mpicoll.engine import checks, choose, message, reductions, sparse
from mpicoll.engine.exchanges import Exchanges, Step
from mpicoll.engine.monitor import monitored_barrier
from mpicoll.engine.reductions import Op, Reduction
from mpicoll.engine.work import Work
from mpicoll.errors import OperationTimeout
from mpicoll.mpi.channel import IN_PLACE
from mpicoll.mpi.datatypes import datatype, fromaddress, operation

SUM = ReduceOp.SUM


def encode(reduction: Reduction, memory: Tensor, op: Op) -> Tensor:
    """Plain memory to what MPI reduces: new memory, or the memory itself."""
    if reduction.encode is None:
        return memory
    with torch.no_grad():
        return reduction.encode(memory.detach(), op).contiguous()


def decode(reduction: Reduction, code: Tensor, memory: Tensor, size: int) -> None:
    """What MPI reduced to the plain memory of the result."""
    if reduction.decode is None:
        if code is not memory:
            message.copy_into(memory, code)
        return
    with torch.inference_mode(memory.is_inference()), torch.no_grad():
        reduction.decode(code, message.uncounted(memory), size)


@cache
def handles(mpi_type: str, mpi_op: str) -> tuple[object, object]:
    return datatype(mpi_type), operation(mpi_op)


def bare(dtype: torch.dtype, op: Op) -> tuple[object, object] | None:
    """MPI's handles where it can reduce the bytes as they lie; None: the long way decides."""
    entry = reductions.find(dtype, op)
    return handles(entry.mpi_type, entry.mpi_op) if entry is not None and entry.native else None


# Looked up by dtype alone: a dictionary takes 0.2 us longer over a pair with a ReduceOp in it.
BARE_SUM = {dtype: bare(dtype, SUM) for dtype, _ in reductions.TABLE}


class Communicator(Exchanges):
    """A process group's operations over MPI."""

    # -- reductions ----------------------------------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, op: Op = SUM, async_op: bool = False) -> Work | None:
        """Reduces elementwise over all ranks into ``tensor``, in place, the same bits on every rank (collective).

        Args:   tensor: any shape and strides, the same shape and dtype on every rank; or sparse (COO) on every rank, with
                any places on each.
        Raises: UnsupportedReduction (a TypeError): dtype and op have no right answer together.
        """
        if not async_op and isinstance(tensor, Tensor) and self._all_reduce_at_once(tensor, op):
            return None
        return self.start("all_reduce", self._all_reduce("all_reduce", tensor, op), [tensor], async_op)

    def _all_reduce_at_once(self, tensor: Tensor, op: Op) -> bool:
        """The bare path, for memory that MPI can reduce as it lies; False, and nothing done, for everything else."""
        handles = BARE_SUM.get(tensor.dtype) if op is SUM else bare(tensor.dtype, op)
        if handles is None or not message.is_plain_real(tensor):
            return False
        count = tensor.numel()
        if count > CHUNK:
            return False
        mpi_type, mpi_op = handles
        buffer = [fromaddress(tensor.data_ptr(), tensor.nbytes), count, mpi_type]
        if not self.at_once("all_reduce", self.channel.Allreduce, IN_PLACE, buffer, mpi_op):
            return False
        message.bump(tensor)
        return True

    def all_reduce_coalesced(self, tensors: Sequence[Tensor], op: Op = SUM, async_op: bool = False) -> Work | None:
        """``all_reduce`` of each tensor, as one operation (collective)."""
        given = checks.tensors("all_reduce_coalesced", "tensors", tensors)
        steps = [self._all_reduce("all_reduce_coalesced", tensor, op) for tensor in given]
        return self.start("all_reduce_coalesced", in_turn(steps), given, async_op)

    def _all_reduce(self, name: str, tensor: Tensor, op: Op) -> Step:
        if isinstance(tensor, Tensor) and tensor.layout is torch.sparse_coo:
            return self._all_reduce_sparse(name, tensor, op)
        checks.movable(name, tensor)
        reduction = reductions.lookup(name, tensor.dtype, op)
        incoming = message.incoming(name, tensor)
        code = encode(reduction, incoming.memory, op)
        mpi_type, mpi_op = handles(reduction.mpi_type, reduction.mpi_op)

        def transfer() -> None:
            native.all_reduce(self.channel, code, mpi_type, mpi_op)
            decode(reduction, code, incoming.memory, self.size)
            incoming.deliver()

        return transfer

    def _all_reduce_sparse(self, name: str, tensor: Tensor, op: Op) -> Step:
        source = sparse.coalesced(name, tensor, op)

        def transfer() -> None:
            headers = torch.empty(self.size, sparse.HEADER, dtype=torch.int64)
            native.all_gather(self.channel, headers, sparse.header(source, tensor.dtype))
            counts = sparse.counts(name, headers)
            places, parts = source.indices(), source.values()
            indices = [places.new_empty(len(places), count) for count in counts]
            values = [parts.new_empty(count, *parts.shape[1:]) for count in counts]
            self._all_gather(name, indices, places)()
            self._all_gather(name, values, parts)()
            sparse.add_up(tensor, indices, values, op)

        return transfer

    def reduce(self, tensor: Tensor, dst: int, op: Op = SUM, async_op: bool = False) -> Work | None:
        """Reduces into ``tensor`` on ``dst``; the other ranks' tensors stay as they were (collective)."""
        dst = checks.group_rank("reduce", "dst", dst, self.size)
        is_root = self.rank == dst
        checks.movable("reduce", tensor)
        reduction = reductions.lookup("reduce", tensor.dtype, op)
        mine = message.incoming("reduce", tensor) if is_root else message.outgoing("reduce", tensor)
        code = encode(reduction, mine.memory, op)
        mpi_type, mpi_op = handles(reduction.mpi_type, reduction.mpi_op)

        def transfer() -> None:
            native.reduce(self.channel, code, mpi_type, mpi_op, dst, is_root)
            if is_root:
                decode(reduction, code, mine.memory, self.size)
                mine.deliver()

        return self.start("reduce", transfer, [tensor], async_op)

    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], op: Op = SUM, async_op: bool = False) -> Work | None:
        """Rank i's ``output`` becomes the reduction of everybody's ``inputs[i]`` (collective).

        Args:   inputs: one tensor per rank; inputs[i] has the same numel on every rank, different i may differ.
        """
        given = checks.tensors("reduce_scatter", "input_list", inputs, self.size)
        checks.movable("reduce_scatter", output, "output")
        checks.same_dtype("reduce_scatter", ("output", output), *((f"input_list[{i}]", t) for i, t in enumerate(given)))
        checks.same_numel("reduce_scatter", "output", output.numel(), "rank's own input", given[self.rank].numel())
        flat = torch.cat([message.outgoing("reduce_scatter", t).memory.detach().reshape(-1) for t in given])
        counts = [t.numel() for t in given]
        return self.start("reduce_scatter", self._reduce_scatter("reduce_scatter", output, flat, counts, op), [output], async_op)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, op: Op = SUM, async_op: bool = False) -> Work | None:
        """Rank i's ``output`` becomes the reduction of everybody's i-th block of ``tensor`` (collective).

        Args:   tensor: numel == size * output.numel(); ``output`` may be a slice of it.
        """
        step = self._reduce_scatter_single("reduce_scatter_single", output, tensor, op)
        return self.start("reduce_scatter_single", step, [output], async_op)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], tensors: Sequence[Tensor], op: Op = SUM, async_op: bool = False
    ) -> Work | None:
        """``reduce_scatter_single`` of each pair, as one operation (collective)."""
        name = "reduce_scatter_single_coalesced"
        sources = checks.tensors(name, "inputs", tensors)
        targets = checks.tensors(name, "outputs", outputs)
        checks.same_numel(name, "outputs", len(targets), "inputs", len(sources))
        steps = [self._reduce_scatter_single(name, target, source, op) for target, source in zip(targets, sources, strict=True)]
        return self.start(name, in_turn(steps), targets, async_op)

    def _reduce_scatter_single(self, name: str, output: Tensor, tensor: Tensor, op: Op) -> Step:
        checks.movable(name, output, "output")
        source = message.outgoing(name, tensor)
        checks.same_dtype(name, ("output", output), ("input", tensor))
        checks.same_numel(name, "input", tensor.numel(), f"output x {self.size} ranks", output.numel() * self.size)
        return self._reduce_scatter(name, output, source.memory, [output.numel()] * self.size, op)

    def _reduce_scatter(self, name: str, output: Tensor, flat: Tensor, counts: Sequence[int], op: Op) -> Step:
        reduction = reductions.lookup(name, output.dtype, op)
        target = message.incoming(name, output)
        code = encode(reduction, flat, op)
        aliased = message.overlap(target.memory, code)
        if reduction.native and not aliased:
            result = target.memory
        else:
            result = torch.empty(target.memory.numel() * reduction.scale, dtype=code.dtype)
        coded = [count * reduction.scale for count in counts]
        mpi_type, mpi_op = handles(reduction.mpi_type, reduction.mpi_op)

        def transfer() -> None:
            native.reduce_scatter(self.channel, result, code, coded, mpi_type, mpi_op)
            decode(reduction, result, target.memory, self.size)
            target.deliver()

        return transfer

    # -- from one rank, from all ranks ---------------------------------------------------------------------------------

    def broadcast(self, tensor: Tensor, src: int, async_op: bool = False) -> Work | None:
        """``src``'s tensor arrives in everybody's (collective)."""
        src = checks.group_rank("broadcast", "src", src, self.size)
        mine = message.outgoing("broadcast", tensor) if self.rank == src else message.incoming("broadcast", tensor)

        def transfer() -> None:
            native.broadcast(self.channel, mine.memory, src)
            if self.rank != src:
                mine.deliver()

        return self.start("broadcast", transfer, [tensor], async_op)

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, async_op: bool = False) -> Work | None:
        """Rank i's tensor arrives in everybody's ``outputs[i]``; the ranks' tensors may differ in size (collective)."""
        return self.start("all_gather", self._all_gather("all_gather", outputs, tensor), list(outputs), async_op)

    def all_gather_coalesced(
        self, output_lists: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor], async_op: bool = False
    ) -> Work | None:
        """``all_gather`` of each tensor; output_lists[i][r] is rank r's i-th tensor, as one operation (collective)."""
        name = "all_gather_coalesced"
        given = checks.tensors(name, "input_tensor_list", tensors)
        checks.same_numel(name, "output_tensor_lists", len(output_lists), "input_tensor_list", len(given))
        steps = [self._all_gather(name, outputs, tensor) for outputs, tensor in zip(output_lists, given, strict=True)]
        return self.start(name, in_turn(steps), [t for outputs in output_lists for t in outputs], async_op)

    def _all_gather(self, name: str, outputs: Sequence[Tensor], tensor: Tensor) -> Step:
        targets = checks.tensors(name, "tensor_list", outputs, self.size)
        source = message.outgoing(name, tensor)
        checks.same_dtype(name, ("tensor", tensor), *((f"tensor_list[{i}]", t) for i, t in enumerate(targets)))
        checks.same_numel(name, "tensor", tensor.numel(), f"tensor_list[{self.rank}]", targets[self.rank].numel())
        for index, target in enumerate(targets):
            checks.writable(name, target, f"tensor_list[{index}]")
        sizes = [target.nbytes for target in targets]
        algorithm = choose.all_gather(sizes)
        if algorithm == "pairs":
            everybody = [(rank, source.memory) for rank in range(self.size) if rank != self.rank]
            incoming = [(rank, message.incoming(name, target)) for rank, target in enumerate(targets)]
            return self._exchange(everybody, incoming, source.memory)
        flat = torch.empty(sum(t.numel() for t in targets), dtype=tensor.dtype)
        message.bump(*targets)

        def transfer() -> None:
            if algorithm == "even":
                native.all_gather(self.channel, flat, source.memory)
            else:
                native.all_gather_uneven(self.channel, flat, source.memory, sizes)
            for target, block in zip(targets, flat.split([t.numel() for t in targets]), strict=True):
                message.copy_into(target, block)

        return transfer

    def all_gather_single(self, output: Tensor, tensor: Tensor, async_op: bool = False) -> Work | None:
        """Rank i's tensor arrives as the i-th block of everybody's ``output`` (collective).

        Args:   output: numel == size * tensor.numel(), as one long tensor (n*k, ...) or stacked (n, k, ...);
                ``tensor`` may be a slice of it.
        """
        step = self._all_gather_single("all_gather_single", output, tensor)
        return self.start("all_gather_single", step, [output], async_op)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], tensors: Sequence[Tensor], async_op: bool = False
    ) -> Work | None:
        """``all_gather_single`` of each pair, as one operation (collective)."""
        name = "all_gather_single_coalesced"
        sources = checks.tensors(name, "inputs", tensors)
        targets = checks.tensors(name, "outputs", outputs)
        checks.same_numel(name, "outputs", len(targets), "inputs", len(sources))
        steps = [self._all_gather_single(name, target, source) for target, source in zip(targets, sources, strict=True)]
        return self.start(name, in_turn(steps), targets, async_op)

    def _all_gather_single(self, name: str, output: Tensor, tensor: Tensor) -> Step:
        checks.movable(name, output, "output")
        source = message.outgoing(name, tensor)
        checks.same_dtype(name, ("output", output), ("input", tensor))
        checks.same_numel(name, "output", output.numel(), f"input x {self.size} ranks", tensor.numel() * self.size)
        target = message.incoming(name, output)
        memory = source.memory
        if message.overlap(memory, target.memory):
            memory = message.packed(memory)

        def transfer() -> None:
            native.all_gather(self.channel, target.memory, memory)
            target.deliver()

        return transfer

    # -- barriers ------------------------------------------------------------------------------------------------------

    def barrier(self, async_op: bool = False, timeout_s: float | None = None) -> Work | None:
        """Returns when every rank of the group has called it (collective).

        Args:   timeout_s: seconds; None: the group's timeout.
        Raises: OperationTimeout: not every rank came in time; the group is unusable afterwards.
        """
        seconds = timeout_s or self.timeout_s

        def transfer() -> None:
            if not self.channel.barrier(seconds):
                error = OperationTimeout(f"{self.where('barrier')}: not every rank came within {seconds:g} s")
                self.fail(error)
                raise error

        return self.start("barrier", transfer, [], async_op)

    def monitored_barrier(self, timeout_s: float | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that names the ranks that did not come (collective).

        Args:   timeout_s: seconds; None: the group's timeout. wait_all_ranks: name all missing ranks, not the first.
        Raises: OperationTimeout, on every rank that came.
        """
        seconds = timeout_s or self.timeout_s
        self.start("monitored_barrier", lambda: monitored_barrier(self, seconds, wait_all_ranks), [], async_op=False)

    def close(self) -> None:
        """Ends the group: what is queued ends first, later use raises GroupDestroyed."""
        self.closer()


def in_turn(steps: Sequence[Step]) -> Step:
    def transfer() -> None:
        for step in steps:
            step()

    return transfer

"""Collectives that bring the tensor of one rank to all ranks, of every rank to one or to all, or one to each rank."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mpicoll._engine.collectives import REFUSALS, Collectives, copying_back, refusing
from mpicoll._engine.work import Work
from mpicoll._tensors import buffers, calls, checks
from mpicoll._tensors.buffers import are_dense_cpu, is_dense_cpu
from mpicoll._tensors.calls import Call


class Gathers(Collectives):
    """broadcast, all_gather, gather, scatter."""

    def broadcast(self, tensor: Tensor, src: int, async_op: bool = False) -> Work | None:
        """Copies the tensor of ``src`` into every rank's tensor (collective)."""
        if not async_op and type(src) is int and (known := self.host.known.find(tensor, src)) and self.now("broadcast", known):
            return None
        try:
            src = checks.group_rank("broadcast", "src", src, self.size)
            if is_dense_cpu(tensor):
                call = self.host.broadcast(tensor, src)
                self.host.keep(tensor, call, src)
                return self.run("broadcast", call, [tensor], async_op)
            memory = buffers.readable("broadcast", tensor) if self.rank == src else buffers.writable("broadcast", tensor)
            backend = self.backend("broadcast", memory)
            call = backend.broadcast(memory, src)
            if self.rank != src:
                call = copying_back(backend, call, [tensor], [memory])
            return self.run("broadcast", call, [tensor], async_op, reads=[memory])
        except REFUSALS as error:
            self.refused("broadcast", error)
            raise

    @refusing
    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, async_op: bool = False) -> Work | None:
        """Rank i's tensor arrives in every rank's ``outputs[i]``; the ranks' tensors may differ in size (collective)."""
        dense = is_dense_cpu(tensor) and are_dense_cpu(outputs, self.size, tensor.dtype)
        if dense and outputs[self.rank].nbytes == tensor.nbytes:
            return self.run("all_gather", self.host.all_gather(outputs, tensor), list(outputs), async_op, (tensor,))
        call, memory = self._all_gather("all_gather", outputs, tensor)
        return self.run("all_gather", call, list(outputs), async_op, reads=[memory])

    @refusing
    def all_gather_coalesced(
        self, output_lists: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor], async_op: bool = False
    ) -> Work | None:
        """Gathers each tensor, in one operation (collective). ``output_lists[i][r]`` receives rank r's i-th tensor."""
        operation = "all_gather_coalesced"
        inputs = checks.tensors(operation, "input_tensor_list", tensors)
        checks.same_numel(operation, "output_tensor_lists", len(output_lists), "input_tensor_list", len(inputs))
        pairs = [self._all_gather(operation, outputs, tensor) for outputs, tensor in zip(output_lists, inputs, strict=True)]
        targets = [target for outputs in output_lists for target in outputs]
        several = [call for call, _ in pairs]
        return self.run(operation, calls.in_turn(several), targets, async_op, reads=[memory for _, memory in pairs])

    def _all_gather(self, operation: str, outputs: Sequence[Tensor], tensor: Tensor) -> tuple[Call, Tensor]:
        """Returns the call and the memory that it reads."""
        targets = checks.tensors(operation, "tensor_list", outputs, self.size)
        source = buffers.readable(operation, tensor)
        checks.same_dtype(operation, ("tensor", tensor), *((f"tensor_list[{i}]", t) for i, t in enumerate(targets)))
        checks.same_numel(operation, "tensor", tensor.numel(), f"tensor_list[{self.rank}]", targets[self.rank].numel())
        for index, target in enumerate(targets):
            checks.writable(operation, target, f"tensor_list[{index}]")
        memories = [buffers.writable(operation, target) for target in targets]
        backend = self.backend(operation, source, *memories)
        return copying_back(backend, backend.all_gather(memories, source), targets, memories), source

    def all_gather_single(self, output: Tensor, tensor: Tensor, async_op: bool = False) -> Work | None:
        """Rank i's tensor, maybe a slice of ``output``, arrives as the i-th block of every rank's ``output`` (collective)."""
        try:
            dense = is_dense_cpu(tensor) and is_dense_cpu(output) and output.dtype is tensor.dtype
            if dense and output.nbytes == tensor.nbytes * self.size:
                return self.run("all_gather_single", self.host.all_gather_single(output, tensor), [output], async_op, (tensor,))
            call, memory = self._all_gather_single("all_gather_single", output, tensor)
            return self.run("all_gather_single", call, [output], async_op, reads=[memory])
        except REFUSALS as error:
            self.refused("all_gather_single", error)
            raise

    @refusing
    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], tensors: Sequence[Tensor], async_op: bool = False
    ) -> Work | None:
        """Does ``all_gather_single`` for each pair, in one operation (collective)."""
        operation = "all_gather_single_coalesced"
        sources = checks.tensors(operation, "inputs", tensors)
        targets = checks.tensors(operation, "outputs", outputs)
        checks.same_numel(operation, "outputs", len(targets), "inputs", len(sources))
        pairs = [self._all_gather_single(operation, target, source) for target, source in zip(targets, sources, strict=True)]
        several = [call for call, _ in pairs]
        return self.run(operation, calls.in_turn(several), targets, async_op, reads=[memory for _, memory in pairs])

    def _all_gather_single(self, operation: str, output: Tensor, tensor: Tensor) -> tuple[Call, Tensor]:
        """Returns the call and the memory that it reads."""
        checks.movable(operation, output, "output")
        source = buffers.readable(operation, tensor)
        checks.same_dtype(operation, ("output", output), ("input", tensor))
        checks.same_numel(operation, "output", output.numel(), f"input x {self.size} ranks", tensor.numel() * self.size)
        target = buffers.writable(operation, output)
        backend = self.backend(operation, target, source)
        return copying_back(backend, backend.all_gather_single(target, source), [output], [target]), source

    @refusing
    def gather(self, tensor: Tensor, outputs: Sequence[Tensor] | None, dst: int, async_op: bool = False) -> Work | None:
        """Rank i's tensor arrives in ``outputs[i]`` on ``dst``; sizes may differ (collective)."""
        dst = checks.group_rank("gather", "dst", dst, self.size)
        if self.rank != dst:
            if outputs is not None and checks.given(outputs):
                raise ValueError(f"gather: gather_list must be None on rank {self.rank}; only dst (rank {dst}) receives")
            memory = tensor if is_dense_cpu(tensor) else buffers.readable("gather", tensor)
            call = self.backend("gather", memory).gather(None, memory, dst)
            return self.run("gather", call, [], async_op, reads=[memory])
        if is_dense_cpu(tensor) and outputs is not None and self._fits(outputs, tensor, dst):
            return self.run("gather", self.host.gather(outputs, tensor, dst), list(outputs), async_op, reads=[tensor])
        if not checks.given(outputs):
            raise ValueError("gather: gather_list must be given on dst, one tensor per rank")
        memory = buffers.readable("gather", tensor)
        targets = checks.tensors("gather", "gather_list", outputs, self.size)
        checks.same_dtype("gather", ("tensor", tensor), *((f"gather_list[{i}]", t) for i, t in enumerate(targets)))
        checks.same_numel("gather", "tensor", tensor.numel(), f"gather_list[{dst}]", targets[dst].numel())
        memories = [buffers.writable("gather", target) for target in targets]
        backend = self.backend("gather", memory, *memories)
        call = copying_back(backend, backend.gather(memories, memory, dst), targets, memories)
        return self.run("gather", call, targets, async_op, reads=[memory])

    @refusing
    def scatter(self, tensor: Tensor, inputs: Sequence[Tensor] | None, src: int, async_op: bool = False) -> Work | None:
        """``inputs[i]`` on ``src`` arrives in rank i's tensor; sizes may differ (collective)."""
        src = checks.group_rank("scatter", "src", src, self.size)
        dense, sources = is_dense_cpu(tensor), None
        if self.rank != src:
            if inputs is not None and checks.given(inputs):
                raise ValueError(f"scatter: scatter_list must be None on rank {self.rank}; only src (rank {src}) sends")
            if dense:
                return self.run("scatter", self.host.scatter(tensor, None, src), [tensor], async_op, ())
        elif dense and inputs is not None and self._fits(inputs, tensor, src):
            return self.run("scatter", self.host.scatter(tensor, inputs, src), [tensor], async_op, list(inputs))
        memory = buffers.writable("scatter", tensor)
        if self.rank == src:
            if inputs is None or not checks.given(inputs):
                raise ValueError("scatter: scatter_list must be given on src, one tensor per rank")
            listed = checks.tensors("scatter", "scatter_list", inputs, self.size)
            checks.same_dtype("scatter", ("tensor", tensor), *((f"scatter_list[{i}]", t) for i, t in enumerate(listed)))
            checks.same_numel("scatter", "tensor", tensor.numel(), f"scatter_list[{src}]", listed[src].numel())
            sources = [buffers.readable("scatter", t) for t in listed]
        backend = self.backend("scatter", memory, *(sources or []))
        call = copying_back(backend, backend.scatter(memory, sources, src), [tensor], [memory])
        return self.run("scatter", call, [tensor], async_op, reads=sources or [])

    def _fits(self, tensors: Sequence[Tensor], tensor: Tensor, rank: int) -> bool:
        """True for a list of one dense CPU tensor per rank in which ``tensors[rank]`` is as large as ``tensor``."""
        return are_dense_cpu(tensors, self.size, tensor.dtype) and tensors[rank].nbytes == tensor.nbytes

"""Collectives that bring the tensor of one rank, or of every rank, to all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mpicoll._engine.collectives import REFUSALS, Collectives, copying_back
from mpicoll._engine.work import Work
from mpicoll._tensors import buffers, calls, checks
from mpicoll._tensors.buffers import are_dense_cpu, is_dense_cpu
from mpicoll._tensors.calls import Call


class Gathers(Collectives):
    """broadcast and all_gather."""

    def broadcast(self, tensor: Tensor, src: int, async_op: bool = False) -> Work | None:
        """Copies the tensor of ``src`` into every rank's tensor (collective)."""
        try:
            src = checks.group_rank("broadcast", "src", src, self.size)
            if is_dense_cpu(tensor):
                return self.run("broadcast", self.host.broadcast(tensor, src), [tensor], async_op)
            if self.rank == src:
                memory = buffers.readable("broadcast", tensor)
                call = self.backend("broadcast", memory).broadcast(memory, src)
                return self.run("broadcast", call, [tensor], async_op, reads=[memory])
            memory = buffers.writable("broadcast", tensor)
            backend = self.backend("broadcast", memory)
            return self.run(
                "broadcast", copying_back(backend, backend.broadcast(memory, src), [tensor], [memory]), [tensor], async_op
            )
        except REFUSALS as error:
            self.refused("broadcast", error)
            raise

    def all_gather(self, outputs: Sequence[Tensor], tensor: Tensor, async_op: bool = False) -> Work | None:
        """Rank i's tensor arrives in every rank's ``outputs[i]``; the ranks' tensors may differ in size (collective)."""
        try:
            dense = is_dense_cpu(tensor) and are_dense_cpu(outputs, self.size, tensor.dtype)
            if dense and outputs[self.rank].nbytes == tensor.nbytes:
                return self.run("all_gather", self.host.all_gather(outputs, tensor), list(outputs), async_op, (tensor,))
            call, memory = self._all_gather("all_gather", outputs, tensor)
            return self.run("all_gather", call, list(outputs), async_op, reads=[memory])
        except REFUSALS as error:
            self.refused("all_gather", error)
            raise

    def all_gather_coalesced(
        self, output_lists: Sequence[Sequence[Tensor]], tensors: Sequence[Tensor], async_op: bool = False
    ) -> Work | None:
        """Gathers each tensor, in one operation (collective). ``output_lists[i][r]`` receives rank r's i-th tensor."""
        operation = "all_gather_coalesced"
        try:
            inputs = checks.tensors(operation, "input_tensor_list", tensors)
            checks.same_numel(operation, "output_tensor_lists", len(output_lists), "input_tensor_list", len(inputs))
            pairs = [self._all_gather(operation, outputs, tensor) for outputs, tensor in zip(output_lists, inputs, strict=True)]
            targets = [target for outputs in output_lists for target in outputs]
            several = [call for call, _ in pairs]
            return self.run(operation, calls.in_turn(several), targets, async_op, reads=[memory for _, memory in pairs])
        except REFUSALS as error:
            self.refused(operation, error)
            raise

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

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], tensors: Sequence[Tensor], async_op: bool = False
    ) -> Work | None:
        """Does ``all_gather_single`` for each pair, in one operation (collective)."""
        operation = "all_gather_single_coalesced"
        try:
            sources = checks.tensors(operation, "inputs", tensors)
            targets = checks.tensors(operation, "outputs", outputs)
            checks.same_numel(operation, "outputs", len(targets), "inputs", len(sources))
            pairs = [self._all_gather_single(operation, target, source) for target, source in zip(targets, sources, strict=True)]
            several = [call for call, _ in pairs]
            return self.run(operation, calls.in_turn(several), targets, async_op, reads=[memory for _, memory in pairs])
        except REFUSALS as error:
            self.refused(operation, error)
            raise

    def _all_gather_single(self, operation: str, output: Tensor, tensor: Tensor) -> tuple[Call, Tensor]:
        """Returns the call and the memory that it reads."""
        checks.movable(operation, output, "output")
        source = buffers.readable(operation, tensor)
        checks.same_dtype(operation, ("output", output), ("input", tensor))
        checks.same_numel(operation, "output", output.numel(), f"input x {self.size} ranks", tensor.numel() * self.size)
        target = buffers.writable(operation, output)
        backend = self.backend(operation, target, source)
        return copying_back(backend, backend.all_gather_single(target, source), [output], [target]), source

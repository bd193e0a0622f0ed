"""Collectives in which each rank has something for every other one: all_to_all of any sizes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mpicoll._engine.collectives import Collectives, copying_back, refusing
from mpicoll._engine.work import Work
from mpicoll._tensors import buffers, checks
from mpicoll._tensors.buffers import are_dense_cpu, is_dense_cpu


class Exchanges(Collectives):
    """all_to_all."""

    @refusing
    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], async_op: bool = False) -> Work | None:
        """``inputs[j]`` of rank i arrives in ``outputs[i]`` of rank j; sizes may differ (collective)."""
        own = self.rank
        dtype = inputs[0].dtype if type(inputs) is list and inputs and isinstance(inputs[0], Tensor) else None
        dense = dtype is not None and are_dense_cpu(outputs, self.size, dtype) and are_dense_cpu(inputs, self.size, dtype)
        disjoint = dense and not any(buffers.overlap(source, target) for source in inputs for target in outputs)
        if disjoint and inputs[own].nbytes == outputs[own].nbytes:
            return self.run("all_to_all", self.host.all_to_all(outputs, inputs), list(outputs), async_op, list(inputs))
        targets = checks.tensors("all_to_all", "output_tensor_list", outputs, self.size)
        listed = checks.tensors("all_to_all", "input_tensor_list", inputs, self.size)
        checks.same_dtype("all_to_all", ("input_tensor_list[0]", listed[0]), *(("a tensor", t) for t in [*listed, *targets]))
        checks.same_numel("all_to_all", f"input {own}", listed[own].numel(), f"output {own}", targets[own].numel())
        memories = [buffers.writable("all_to_all", target) for target in targets]
        sources = [buffers.readable("all_to_all", t) for t in listed]
        if any(buffers.overlap(source, target) for source in sources for target in memories):
            sources = [buffers.packed(source) for source in sources]
        backend = self.backend("all_to_all", *memories, *sources)
        call = copying_back(backend, backend.all_to_all(memories, sources), targets, memories)
        return self.run("all_to_all", call, targets, async_op, reads=sources)

    @refusing
    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Exchanges rows of dim 0: ``input_splits[j]`` rows go to rank j, ``output_splits[j]`` rows come from it (collective).

        None: equal shares.
        """
        operation = "all_to_all_single"
        if output_splits is None and input_splits is None and self._shared_evenly(output, tensor):
            return self.run(operation, self.host.all_to_all_even(output, tensor), [output], async_op, reads=[tensor])
        checks.movable(operation, output, "output")
        checks.movable(operation, tensor, "input")
        checks.same_dtype(operation, ("output", output), ("input", tensor))
        if tensor.dim() == 0 or output.dim() == 0:
            raise ValueError(
                f"{operation}: input and output need a dim 0 to split, got shapes {tuple(tensor.shape)}, {tuple(output.shape)}"
            )
        sends = checks.splits(operation, "input_split_sizes", input_splits, tensor.size(0), self.size)
        receives = checks.splits(operation, "output_split_sizes", output_splits, output.size(0), self.size)
        if tensor.shape[1:].numel() != output.shape[1:].numel():
            raise ValueError(
                f"{operation}: a row of input has shape {tuple(tensor.shape[1:])}, a row of output "
                f"{tuple(output.shape[1:])}; they must have as many elements"
            )
        checks.same_numel(operation, "the input's own share (rows)", sends[self.rank], "the output's", receives[self.rank])
        source = tensor if is_dense_cpu(tensor) else buffers.readable(operation, tensor)
        target = output if is_dense_cpu(output) else buffers.writable(operation, output)
        if buffers.overlap(source, target):
            source = buffers.packed(source)
        backend = self.backend(operation, target, source)
        call = copying_back(backend, backend.all_to_all_single(target, source, receives, sends), [output], [target])
        return self.run(operation, call, [output], async_op, reads=[source])

    def _shared_evenly(self, output: Tensor, tensor: Tensor) -> bool:
        """True for dense CPU tensors of one shape that all ranks can share equally and that do not overlap."""
        return (
            is_dense_cpu(tensor)
            and is_dense_cpu(output)
            and output.dtype is tensor.dtype
            and output.shape == tensor.shape
            and tensor.dim() > 0
            and tensor.size(0) % self.size == 0
            and not buffers.overlap(tensor, output)
        )

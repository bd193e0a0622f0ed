"""Reductions over the ranks of a group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from mpicoll._algorithms import plans
from mpicoll._algorithms.plans import SUM_PLANS
from mpicoll._engine.collectives import REFUSALS, Collectives, copying_back, refusing
from mpicoll._engine.work import Work
from mpicoll._tensors import buffers, calls, checks
from mpicoll._tensors.buffers import is_dense_cpu
from mpicoll._tensors.calls import Call
from mpicoll._tensors.reductions import Op

SUM = ReduceOp.SUM
PACKED_BYTES = 64 << 10  # tensors up to this size are packed into one message; copying larger ones takes longer than a message


class Reductions(Collectives):
    """all_reduce, reduce, reduce_scatter, and prefix reductions: over the ranks up to this one."""

    def all_reduce(self, tensor: Tensor, op: Op = SUM, async_op: bool = False) -> Work | None:
        """Reduces elementwise over all ranks, in place. The result has the same bits on every rank (collective).

        The tensor may be sparse (COO) on every rank; the indices may differ.
        """
        if op is SUM and not async_op and (known := self.host.known.find(tensor)) and self.now("all_reduce", known):
            return None
        try:
            if is_dense_cpu(tensor):
                plan = SUM_PLANS[tensor.dtype] if op is SUM else plans.lookup("all_reduce", tensor.dtype, op)
                call = self.host.all_reduce(tensor, plan)
                if op is SUM:
                    self.host.keep(tensor, call)
                return self.run("all_reduce", call, [tensor], async_op)
            return self.run("all_reduce", self._all_reduce("all_reduce", tensor, op), [tensor], async_op)
        except REFUSALS as error:
            self.refused("all_reduce", error)
            raise

    def _all_reduce(self, operation: str, tensor: Tensor, op: Op) -> Call:
        if isinstance(tensor, Tensor) and tensor.layout is torch.sparse_coo:
            from mpicoll._tensors import sparse

            source = sparse.coalesced(operation, tensor, op)
            return self.backend(operation, tensor).all_reduce_sparse(operation, tensor, source, op)
        checks.movable(operation, tensor)
        plan = plans.lookup(operation, tensor.dtype, op)
        memory = buffers.writable(operation, tensor)
        backend = self.backend(operation, memory)
        return copying_back(backend, backend.all_reduce(memory, plan), [tensor], [memory])

    @refusing
    def all_reduce_coalesced(self, tensors: Sequence[Tensor], op: Op = SUM, async_op: bool = False) -> Work | None:
        """Does ``all_reduce`` for each tensor, in one operation (collective)."""
        operation = "all_reduce_coalesced"
        checked = checks.tensors(operation, "tensors", tensors)
        several, small = [], dict[torch.dtype, list[Tensor]]()
        for tensor in checked:
            if tensor.nbytes > PACKED_BYTES:
                several.append(self._all_reduce(operation, tensor, op))
            else:
                small.setdefault(tensor.dtype, []).append(tensor)
        several += [self._all_reduce_packed(operation, alike, op) for alike in small.values()]
        return self.run(operation, calls.in_turn(several), checked, async_op)

    def _all_reduce_packed(self, operation: str, tensors: Sequence[Tensor], op: Op) -> Call:
        """Prepares tensors of one dtype as one message."""
        if len(tensors) == 1:
            return self._all_reduce(operation, tensors[0], op)
        plan = plans.lookup(operation, tensors[0].dtype, op)
        memories = [t if is_dense_cpu(t) else buffers.writable(operation, t) for t in tensors]
        backend = self.backend(operation, *memories)
        return copying_back(backend, backend.all_reduce_packed(memories, plan), tensors, memories)

    @refusing
    def reduce(self, tensor: Tensor, dst: int, op: Op = SUM, async_op: bool = False) -> Work | None:
        """Reduces into ``tensor`` on ``dst``. The other ranks' tensors keep their values (collective)."""
        dst = checks.group_rank("reduce", "dst", dst, self.size)
        if is_dense_cpu(tensor):
            plan = SUM_PLANS[tensor.dtype] if op is SUM else plans.lookup("reduce", tensor.dtype, op)
            return self.run("reduce", self.host.reduce(tensor, plan, dst), [tensor], async_op)
        checks.movable("reduce", tensor)
        plan = plans.lookup("reduce", tensor.dtype, op)
        memory = buffers.writable("reduce", tensor) if self.rank == dst else buffers.readable("reduce", tensor)
        backend = self.backend("reduce", memory)
        call = backend.reduce(memory, plan, dst)
        if self.rank == dst:
            call = copying_back(backend, call, [tensor], [memory])
        return self.run("reduce", call, [tensor], async_op, reads=[memory])

    @refusing
    def reduce_scatter(self, output: Tensor, inputs: Sequence[Tensor], op: Op = SUM, async_op: bool = False) -> Work | None:
        """Rank i's ``output`` becomes the reduction of every rank's ``inputs[i]``; sizes may differ by i (collective)."""
        operation = "reduce_scatter"
        listed = checks.tensors(operation, "input_list", inputs, self.size)
        checks.movable(operation, output, "output")
        checks.same_dtype(operation, ("output", output), *((f"input_list[{i}]", t) for i, t in enumerate(listed)))
        checks.same_numel(operation, "output", output.numel(), "rank's own input", listed[self.rank].numel())
        checks.one_kind_of_device(operation, [output, *listed])
        sources = [buffers.readable(operation, t).detach().reshape(-1) for t in listed]
        target = output if is_dense_cpu(output) else buffers.writable(operation, output)
        flat = torch.cat([source.to(target.device) for source in sources])
        plan = plans.lookup(operation, output.dtype, op)
        backend = self.backend(operation, target, flat)
        call = backend.reduce_scatter(target, flat, [t.numel() for t in listed], plan)
        return self.run(operation, copying_back(backend, call, [output], [target]), [output], async_op, reads=listed)

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, op: Op = SUM, async_op: bool = False) -> Work | None:
        """Rank i's ``output``, maybe a slice of ``tensor``, becomes the reduction of the ranks' i-th blocks (collective)."""
        try:
            dense = is_dense_cpu(tensor) and is_dense_cpu(output) and output.dtype is tensor.dtype
            if dense and tensor.numel() == output.numel() * self.size:
                plan = SUM_PLANS[output.dtype] if op is SUM else plans.lookup("reduce_scatter_single", output.dtype, op)
                call = self.host.reduce_scatter_single(output, tensor, plan)
                return self.run("reduce_scatter_single", call, [output], async_op, (tensor,))
            call, memory = self._reduce_scatter_single("reduce_scatter_single", output, tensor, op)
            return self.run("reduce_scatter_single", call, [output], async_op, reads=[memory])
        except REFUSALS as error:
            self.refused("reduce_scatter_single", error)
            raise

    @refusing
    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], tensors: Sequence[Tensor], op: Op = SUM, async_op: bool = False
    ) -> Work | None:
        """Does ``reduce_scatter_single`` for each pair, in one operation (collective)."""
        operation = "reduce_scatter_single_coalesced"
        sources = checks.tensors(operation, "inputs", tensors)
        targets = checks.tensors(operation, "outputs", outputs)
        checks.same_numel(operation, "outputs", len(targets), "inputs", len(sources))
        pairs = zip(targets, sources, strict=True)
        prepared = [self._reduce_scatter_single(operation, target, source, op) for target, source in pairs]
        several = [call for call, _ in prepared]
        return self.run(operation, calls.in_turn(several), targets, async_op, reads=[memory for _, memory in prepared])

    def _reduce_scatter_single(self, operation: str, output: Tensor, tensor: Tensor, op: Op) -> tuple[Call, Tensor]:
        """Returns the call and the memory that it reads."""
        checks.movable(operation, output, "output")
        source = buffers.readable(operation, tensor)
        checks.same_dtype(operation, ("output", output), ("input", tensor))
        checks.same_numel(operation, "input", tensor.numel(), f"output x {self.size} ranks", output.numel() * self.size)
        plan = plans.lookup(operation, output.dtype, op)
        target = buffers.writable(operation, output)
        backend = self.backend(operation, target, source)
        return copying_back(backend, backend.reduce_scatter_single(target, source, plan), [output], [target]), source

    @refusing
    def scan(self, tensor: Tensor, op: Op = SUM, async_op: bool = False) -> Work | None:
        """Reduces elementwise over ranks 0 to this one, in place (collective)."""
        return self._scan("scan", tensor, op, async_op)

    @refusing
    def exscan(self, tensor: Tensor, op: Op = SUM, async_op: bool = False) -> Work | None:
        """Reduces elementwise over the ranks before this one, in place. Rank 0 keeps its values (collective)."""
        return self._scan("exscan", tensor, op, async_op)

    def _scan(self, operation: str, tensor: Tensor, op: Op, async_op: bool) -> Work | None:
        checks.movable(operation, tensor)
        plan = plans.lookup(operation, tensor.dtype, op)
        memory = buffers.writable(operation, tensor)
        backend = self.backend(operation, memory)
        call = copying_back(backend, backend.scan(memory, plan, operation == "exscan"), [tensor], [memory])
        return self.run(operation, call, [tensor], async_op)

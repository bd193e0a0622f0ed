"""How a reduction of one dtype is carried out: by MPI, or by a torch kernel if another algorithm moves the bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from mpicoll._mpi.datatypes import predefined
from mpicoll._tensors import buffers, combine, reductions
from mpicoll._tensors.combine import Kernel
from mpicoll._tensors.reductions import Op, Reduction

SUM = ReduceOp.SUM


@dataclass(frozen=True, eq=False)
class Plan:
    """One entry of the table of reductions, ready for use."""

    dtype: torch.dtype
    entry: Reduction
    op: Op  # PREMUL_SUM carries its factor
    mpi_type: Any  # MPI's handles
    mpi_op: Any
    kernel: Kernel | None  # how torch reduces it
    native: bool  # MPI reduces the bytes as they are
    widened: bool  # MPI would reduce larger elements: half precision as float32

    @property
    def op_name(self) -> str:
        """The operation's name in torch, such as "SUM"."""
        return reductions.name(self.op)

    @property
    def log_name(self) -> str:
        """How the log names a reduction by MPI."""
        return "MPI's own" if self.native else f"MPI's own, as {self.entry.mpi_type}"

    def encode(self, memory: Tensor) -> Tensor:
        """Returns the memory that MPI reduces: ``memory`` itself, or its code in new memory."""
        if self.entry.encode is None:
            return memory
        memory = one_dimensional(memory)
        with torch.no_grad():
            return self.entry.encode(memory.detach(), self.op).contiguous()

    def decode(self, code: Tensor, memory: Tensor, size: int) -> None:
        """Writes the result of MPI's reduction over ``size`` ranks into ``memory``."""
        if self.entry.decode is None:
            if code is not memory:
                buffers.copy_into(memory, code)
            return
        with torch.inference_mode(memory.is_inference()), torch.no_grad():
            self.entry.decode(code, buffers.uncounted(one_dimensional(memory)), size)


def lookup(operation: str, dtype: torch.dtype, op: Op) -> Plan:
    """Returns the plan of this dtype and operation. Raises the errors of `reductions.lookup`."""
    if op is SUM:
        plan = SUM_PLANS.get(dtype)
    else:  # by type: ReduceOp(x) == x is True, but a dictionary tests x == ReduceOp(x), which is False
        plan = _PLANS.get((dtype, op)) if type(op) is ReduceOp.RedOpType else None
    if plan is not None:
        return plan
    entry = reductions.lookup(operation, dtype, op)
    if type(op) is ReduceOp and op.op != ReduceOp.PREMUL_SUM:  # type: ignore[attr-defined]
        return lookup(operation, dtype, op.op)  # type: ignore[attr-defined]
    return _plan(dtype, op, entry)


def _plan(dtype: torch.dtype, op: Op, entry: Reduction) -> Plan:
    kernel = combine.TABLE.get((dtype, op)) if type(op) is ReduceOp.RedOpType else None
    widened = kernel is not None and kernel.widened
    return Plan(dtype, entry, op, predefined(entry.mpi_type), predefined(entry.mpi_op), kernel, entry.native, widened)


# Note [Encoders get one dimension]
# Some encoders return the memory itself as another dtype or with more dimensions (complex numbers as pairs, bool as bytes).
# Decoders copy it back into itself, which torch allows only for equal strides. The strides of a dimension of one element are
# arbitrary (torch.ones(2)[::2] is contiguous), and a view may change them. So an encoder gets one dimension of stride 1.


def one_dimensional(memory: Tensor) -> Tensor:
    """Returns an alias of contiguous memory, see Note [Encoders get one dimension]."""
    return memory if memory.dim() == 1 and memory.stride(0) == 1 else buffers.flat(memory, memory.dtype)


_PLANS = {(dtype, op): _plan(dtype, op, entry) for (dtype, op), entry in reductions.TABLE.items() if op != ReduceOp.PREMUL_SUM}
# By dtype alone: a look-up takes 0.2 us longer if the key is a pair with a ReduceOp.
SUM_PLANS = {dtype: plan for (dtype, op), plan in _PLANS.items() if op == SUM}

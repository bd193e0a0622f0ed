"""Prefix reductions: over the ranks up to this one."""

from __future__ import annotations

from torch import Tensor

from mpicoll._engine.collectives import REFUSALS, Collectives, copying_back
from mpicoll._engine.reductions import SUM
from mpicoll._engine.work import Work
from mpicoll._host import plans
from mpicoll._tensors import buffers, checks
from mpicoll._tensors.reductions import Op


class Scans(Collectives):
    """scan, exscan."""

    def scan(self, tensor: Tensor, op: Op = SUM, async_op: bool = False) -> Work | None:
        """Reduces elementwise over ranks 0 to this one, in place (collective)."""
        return self._scan("scan", tensor, op, async_op)

    def exscan(self, tensor: Tensor, op: Op = SUM, async_op: bool = False) -> Work | None:
        """Reduces elementwise over the ranks before this one, in place. Rank 0 keeps its values (collective)."""
        return self._scan("exscan", tensor, op, async_op)

    def _scan(self, operation: str, tensor: Tensor, op: Op, async_op: bool) -> Work | None:
        try:
            checks.movable(operation, tensor)
            plan = plans.lookup(operation, tensor.dtype, op)
            memory = buffers.writable(operation, tensor)
            backend = self.backend(operation, memory)
            call = copying_back(backend, backend.scan(memory, plan, operation == "exscan"), [tensor], [memory])
            return self.run(operation, call, [tensor], async_op)
        except REFUSALS as error:
            self.refused(operation, error)
            raise

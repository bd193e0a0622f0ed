"""The full check (MPICOLL_CHECK=1, TORCH_DISTRIBUTED_DEBUG=DETAIL): ranks compare their calls before a collective moves a byte.

The ranks meet (_faults/roll_call.py) with their calls, and rank 0 compares them. A rank that refuses its arguments comes to the
meeting as well, so that the others learn of it and do not wait. Costs some 60 us for each collective; nothing if it is off.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mpicoll._base.errors import CollectiveMismatch
from mpicoll._base.facts import Facts, difference
from mpicoll._engine.communicator import Communicator
from mpicoll._engine.work import Work
from mpicoll._faults import roll_call
from mpicoll._tensors import calls, signatures
from mpicoll._tensors.calls import Call


class CheckedCommunicator(Communicator):
    """A group whose ranks compare each call. Rank 0 waits for the calls, and raises at the timeout; so nobody attends."""

    checked = True

    def run(
        self, operation: str, call: Call, tensors: list[Tensor], async_op: bool = False, reads: Sequence[Tensor] | None = None
    ) -> Work | None:
        limit_s = call[1][0] if operation == "barrier" else self.timeout_s
        kind = next((tensor.device.type for tensor in [*tensors, *(reads or [])]), "cpu")
        own = signatures.facts(operation, call[2])._replace(device=kind)
        return super().run(operation, (_checked, (self, own, call, limit_s), call[2]), tensors, async_op, reads)

    def refused(self, operation: str, error: Exception) -> None:
        call = Facts(operation, refusal=f"{type(error).__name__}: {error}")
        super().run(operation, (_agree, (self, call, self.timeout_s), ()), [])


def _checked(group: Communicator, own: Facts, call: Call, limit_s: float) -> None:
    _agree(group, own, limit_s)
    calls.run(call)


def _agree(group: Communicator, call: Facts, limit_s: float) -> None:
    """Compares the ranks' calls (collective).

    Raises:
        CollectiveMismatch: They differ. Raised on every rank, except on one that has refused its call.
        OperationTimeout: A rank did not come. Raised on every rank that came.
    """
    wrong = roll_call.of_group(group, call.operation, call, limit_s, difference)
    if wrong and not call.refusal:
        raise CollectiveMismatch(f"{group.where(call.operation)}: {wrong}")

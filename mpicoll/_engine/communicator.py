"""The operations of a process group, a short method each. Ranks are group ranks.

All ranks of the group call every collective, in the same order. With ``async_op`` a collective returns a Work that completes by
itself. Without it, the collective has ended when it returns None. Each operation has three steps:

    check      the arguments, before a byte moves (_tensors/checks.py), and get the memory of the tensor (_tensors/buffers.py)
    prepare    the backend of the memory's device returns a Call (_host/collectives.py, _device/collectives.py)
    run        the Call runs in the group's order (_engine/group.py)
"""

from __future__ import annotations

from typing import Any

from mpicoll._base.group_errors import OperationTimeout
from mpicoll._engine.accesses import Accesses
from mpicoll._engine.exchanges import Exchanges
from mpicoll._engine.gathers import Gathers
from mpicoll._engine.messages import Messages
from mpicoll._engine.reductions import Reductions
from mpicoll._engine.work import Work
from mpicoll._faults import culprits, roll_call
from mpicoll._tensors import checks


class Communicator(Reductions, Gathers, Exchanges, Messages):
    """The operations of a process group over MPI. ``accesses``: the one-sided ones."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.accesses = Accesses(self)

    def barrier(self, async_op: bool = False, timeout_s: float | None = None) -> Work | None:
        """Returns when every rank of the group has called it (collective).

        Raises:
            OperationTimeout: A rank did not call it in time. The group is unusable afterwards.
            ValueError: The timeout is negative.
        """
        if timeout_s is not None:
            checks.timeout("barrier", timeout_s)
        return self.run("barrier", (self._barrier, (timeout_s or self.timeout_s,), ()), [], async_op)

    def _barrier(self, timeout_s: float) -> None:
        if not self.host.barrier(timeout_s, self._still_waits):
            self.check_usable("barrier")
            error = OperationTimeout(
                f"{self.where('barrier')}: Timed out: not every rank came within the timeout of {timeout_s:g} s. "
                f"{culprits.of_group(self)}".rstrip(". ")
            )
            self.fail(error)
            raise error

    def monitored_barrier(self, timeout_s: float | None = None, wait_all_ranks: bool = False) -> None:
        """Waits as `barrier` does, and names the ranks that did not come (collective)."""
        checks.timeout("monitored_barrier", timeout_s or 0)
        arguments = self, "monitored_barrier", None, timeout_s or self.timeout_s, bool, wait_all_ranks
        self.run("monitored_barrier", (roll_call.of_group, arguments, ()), [])

    def get_comm(self) -> Any:
        """Returns the mpi4py communicator for the program's own MPI calls (collective on first use)."""
        if not self.channel.program_comm:  # None, or freed
            self.run("get_comm", (self.channel.make_program_comm, (), ()), [])
        return self.channel.program_comm

    def close(self) -> None:
        """Ends the group after its queued operations. Later use raises GroupDestroyed."""
        self.closer(self)

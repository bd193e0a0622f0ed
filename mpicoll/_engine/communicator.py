"""One per process group: a short method per operation. Ranks are group ranks.

Every collective is called by all ranks of the group, in the same order. With ``async_op`` it returns a Work that completes
by itself; without, it has ended when it returns None.

    checks -> message (tensor to memory) -> host (carrier: choose, algorithms; or encode -> MPI's own -> decode) -> deliver

    Group           the name, the ranks, the lane on which collectives take their turns
    PointToPoint    send, recv, isend, irecv
    Exchanges       gather, scatter, all_to_all
    Gathering       broadcast, all_gather
    Reducing        all_reduce, reduce, reduce_scatter
"""

from __future__ import annotations

from mpicoll._engine.monitored_barrier import monitored_barrier
from mpicoll._engine.reducing import Reducing
from mpicoll._progress.work import Work
from mpicoll.errors import OperationTimeout


class Communicator(Reducing):
    """A process group's operations over MPI."""

    def barrier(self, async_op: bool = False, timeout_s: float | None = None) -> Work | None:
        """Returns when every rank of the group has called it (collective).

        Args:   timeout_s: seconds; None: the group's timeout.
        Raises: OperationTimeout: not every rank came in time; the group is unusable afterwards.
        """
        seconds = timeout_s or self.timeout_s
        if not async_op and self.at_once("barrier", self._barrier, seconds):
            return None
        return self.start("barrier", lambda: self._barrier(seconds), [], async_op)

    def _barrier(self, seconds: float) -> None:
        came = self.carrier.barrier(seconds)
        if came is None:
            came = self.channel.barrier(seconds)
        if not came:
            error = OperationTimeout(
                f"{self.where('barrier')}: Timed out: not every rank came within the timeout of {seconds:g} s"
            )
            self.fail(error)
            raise error

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

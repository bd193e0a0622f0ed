"""The communicator of a rail: the ranks of one place on their nodes, in the order of the nodes (hierarchical.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpicoll._mpi import mpich
from mpicoll._mpi.channel import Channel

# Bytes from which a collective of a rail is a non-blocking one that is tested, so that the core is given away meanwhile: Note
# [Waiting for large messages] in _mpi/channel.py. Below, the tests would take longer than the message. On 2 hosts of 2 ranks that
# share 2 cores, at 1 Gbit/s, all_reduce of 1, 4 and 16 MiB took 1.31, 3.13 and 2.84 times the bandwidth limit with blocking
# calls, and 1.11, 1.14 and 1.41 times with these (Gloo: 1.6); broadcast 1.8 to 3.3, and 1.05. At 10 Gbit/s, two runs each:
# all_reduce of 4 MiB 6.2 and 6.1, and 3.8 and 4.2; broadcast 25 and 17, and 2.7 and 2.4.
TESTED_FROM = 64 << 10


class Rail:
    """Collectives of a rail. They have the arguments of mpi4py's, and return when they have ended.

    All ranks of the rail give buffers of the same size, and so choose the same kind of call.
    """

    def __init__(self, channel: Channel, comm: Any) -> None:
        self._channel, self._comm = channel, comm
        self.Allreduce = self._collective("Allreduce")
        self.Reduce = self._collective("Reduce", mpich.at_any_root)
        self.Reduce_scatter = self._collective("Reduce_scatter")
        self.Allgather = self._collective("Allgather")
        self.Bcast = self._collective("Bcast")

    def _collective(
        self, name: str, safe: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda call: call
    ) -> Callable[..., None]:
        """``safe`` makes a function of the communicator safe with this MPI."""
        blocking, start = safe(getattr(self._comm, name)), safe(getattr(self._comm, "I" + name.lower()))

        def call(*arguments: Any) -> None:
            nbytes = next(argument[0].nbytes for argument in arguments if isinstance(argument, list))
            if nbytes < TESTED_FROM:
                blocking(*arguments)
            else:
                self._channel.wait_all([start(*arguments)], large=True)

        return call

    def free(self) -> None:
        """Frees the communicator (collective)."""
        self._comm.Free()

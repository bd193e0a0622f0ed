"""A communicator as the algorithms see it: blocking calls that are safe at this process's thread level.

    MPI_THREAD_MULTIPLE     the blocking MPI calls themselves; other threads go on meanwhile
    MPI_THREAD_SERIALIZED   the non-blocking calls, tested under the one lock until they end, since a thread that blocked in
                            MPI under the lock would keep every other thread out

Blocking and non-blocking collectives do not match in MPI, so all ranks of a group use the same kind (they agree at birth).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from mpicoll._mpi.library import MPI
from mpicoll._mpi.runtime import Runtime

IN_PLACE = MPI.IN_PLACE
ANY_SOURCE: int = MPI.ANY_SOURCE
Status = MPI.Status


class Arrived(NamedTuple):
    """A message that has been matched and not yet received; nobody else can match it."""

    message: MPI.Message
    source: int
    nbytes: int


_COLLECTIVES = ("Allreduce", "Bcast", "Reduce", "Allgather", "Allgatherv", "Reduce_scatter", "Reduce_scatter_block")


class Channel:
    """Two communicators over the same ranks: ``comm`` for collectives and our own messages, ``peer`` for the user's.

    The user's tags may be anything up to TAG_UB, so our own messages must not share a communicator with them.

    Args:   pause: called between two tests of something pending (backs off).
    """

    def __init__(self, runtime: Runtime, comm: MPI.Intracomm, pause: Callable[[], Callable[[], None]]) -> None:
        self.runtime = runtime
        self.comm = comm
        self.lock = runtime.lock
        self.pause = pause
        with self.lock:
            self.peer = comm.Dup()
            #: whether any rank's MPI is, so that all make the calls that match
            self.serialized = bool(comm.allreduce(int(runtime.serialized), op=MPI.MAX))
        # One attribute per collective, bound once: looking them up on each call would be a tenth of its time.
        self.Allreduce: Callable[..., None]
        self.Bcast: Callable[..., None]
        self.Reduce: Callable[..., None]
        self.Allgather: Callable[..., None]
        self.Allgatherv: Callable[..., None]
        self.Reduce_scatter: Callable[..., None]
        self.Reduce_scatter_block: Callable[..., None]
        for name in _COLLECTIVES:
            call = self._tested(getattr(comm, "I" + name.lower())) if self.serialized else getattr(comm, name)
            setattr(self, name, call)

    def _tested(self, start: Callable[..., MPI.Request]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            with self.lock:
                request = start(*arguments)
            self.wait_all([request])

        return call

    def wait_all(self, requests: list[MPI.Request]) -> None:
        """Waits for messages of our own.

        One by one: Waitall's error, MPI_ERR_IN_STATUS, says neither what went wrong nor that all messages have ended.

        Raises: MPIException: MPI_ERR_TRUNCATE, after all of them have ended; any other error at once.
        """
        truncated: MPI.Exception | None = None
        for request in requests:
            try:
                self._wait(request)
            except MPI.Exception as error:
                if error.Get_error_class() != MPI.ERR_TRUNCATE:
                    raise
                truncated = error
        if truncated is not None:
            raise truncated

    def _wait(self, request: MPI.Request) -> None:
        if not self.runtime.serialized:
            request.Wait()
            return
        pause = self.pause()
        while not self.test(request):
            pause()

    def barrier(self, timeout_s: float) -> bool:
        """True when all ranks have come, False if they have not within ``timeout_s`` seconds.

        Non-blocking and tested at every thread level, so that it can end without them.
        """
        with self.lock:
            request = self.comm.Ibarrier()
        pause, deadline = self.pause(), time.monotonic() + timeout_s
        while not self.test(request):
            if time.monotonic() > deadline:
                return False
            pause()
        return True

    def test(self, request: MPI.Request, status: MPI.Status | None = None) -> bool:
        with self.lock:
            return bool(request.Test(status))

    def arrived(self, comm: MPI.Intracomm, src: int, tag: int) -> Arrived | None:
        """The next message from ``src`` (or ANY_SOURCE) by ``tag``, which the caller must receive; None: there is none yet."""
        status = Status()
        with self.lock:
            message = comm.Improbe(src, tag, status)
        return None if message is None else Arrived(message, status.Get_source(), status.Get_elements(MPI.BYTE))

    def cancel(self, request: MPI.Request) -> bool:
        """Takes back a receive; False if its message is on its way already, so that its memory is still MPI's."""
        with self.lock:
            request.Cancel()
            if request.Test():  # at once, if it was cancelled
                return True
            request.Free()
        return False

    def free(self) -> None:
        """Gives the communicators back to MPI; called on an explicit destroy only, never from garbage collection."""
        with self.lock:
            self.peer.Free()
            self.comm.Free()

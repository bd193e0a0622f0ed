"""A communicator as the algorithms see it: blocking calls that are safe at this process's thread level.

    MPI_THREAD_MULTIPLE     makes the blocking MPI calls; other threads run meanwhile
    MPI_THREAD_SERIALIZED   makes the non-blocking calls and tests them under the one lock until they end, because a thread that
                            blocked in MPI under the lock would keep every other thread out of MPI

Blocking and non-blocking collectives do not match in MPI. So all ranks of a group use the same kind; they agree on it when the
channel is made.

# Note [Thread levels]
# Open MPI works with different levels on different ranks. MPICH does not: after five blocking collectives on a communicator it
# uses shared memory for them, but only below MPI_THREAD_MULTIPLE. So ranks with different levels use different algorithms: they
# wait for ever, receive wrong data or abort. Non-blocking calls do not avoid this, because MPICH itself uses these collectives
# to make a communicator.

# Note [MPI_Reduce in place]
# MPICH 4.0.2 (Debian 12) ends with SIGSEGV in MPI_Reduce of some KiB, if the root passes MPI_IN_PLACE and is not rank 0. So the
# root passes a copy there. MPICH 5.0.2 and Intel MPI 2021.18 have no such fault.

# Note [Receives from any rank]
# MPICH 5.0.2 over UCX never completes a receive from any rank that is posted after its message has come from another node: UCX
# completes it before the receive knows its other half, in shared memory (MPIDI_NM_mpi_irecv of ch4/netmod/ucx). 20 of 20 were
# lost, over libfabric none. MPICH of PyPI has both, and takes UCX. So we look for the message ourselves, and receive it from
# its sender.

# Note [Waiting for large messages]
# MPI_Wait of Open MPI keeps its core busy until the message has come, if there are cores enough for the ranks of the host. Other
# threads, of torch, the kernel's network or another program, then wait for a core. On 4 hosts that share 2 cores (1 Gbit/s), an
# all_reduce of 16 MiB took 1.24 and 1.49 times the bandwidth limit with MPI_Wait, and 1.07 and 1.08 times with tests that yield
# the core (Gloo: 1.06 to 1.16). With more load: 1.74 to 2.47, and 1.20 to 1.36. Sleeping between the tests gave 1.07 and 1.39.
# A thread in the background uses MPI_Wait: each of its tests would need the interpreter, which another thread may hold for
# milliseconds.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

from mpicoll._base.errors import ThreadLevelError
from mpicoll._mpi import arrivals, survivors
from mpicoll._mpi.backoff import Backoff
from mpicoll._mpi.library import MPI
from mpicoll._mpi.runtime import Runtime, level_name

VENDOR, VERSION = MPI.get_vendor()
FAULTY_REDUCE = VENDOR == "MPICH" and VERSION[:2] == (4, 0)  # see Note [MPI_Reduce in place]
FAULTY_ANY_SOURCE = "ch4:ucx" in MPI.Get_library_version()  # between nodes; see Note [Receives from any rank]

IN_PLACE = MPI.IN_PLACE
ANY_SOURCE: int = MPI.ANY_SOURCE
Status = MPI.Status


def reduce_at_any_root(reduce: Callable[..., Any]) -> Callable[..., Any]:
    """The Reduce or Ireduce of a communicator, which takes MPI_IN_PLACE at any root."""
    if not FAULTY_REDUCE:
        return reduce

    def call(source: Any, target: Any, op: Any, root: int) -> Any:
        if source is MPI.IN_PLACE and root != 0:
            memory, *count_and_datatype = target
            source = [bytes(memory), *count_and_datatype]
        return reduce(source, target, op, root)  # a request keeps the copy

    return call


def check_levels(levels: Sequence[int]) -> None:
    """Raises ThreadLevelError if the levels of a communicator's ranks differ and MPI needs equal ones; Note [Thread levels]."""
    different = next((rank for rank, level in enumerate(levels) if level != levels[0]), None)
    if different is not None and VENDOR != "Open MPI":
        raise ThreadLevelError(
            f"MPI was initialised at {level_name(levels[0])} on rank 0 and at {level_name(levels[different])} on rank "
            f"{different}, and {VENDOR} {'.'.join(map(str, VERSION))} then uses different algorithms on them. Set the same "
            "mpi4py.rc.thread_level (or MPI4PY_RC_THREAD_LEVEL) on all ranks"
        )


class Channel:
    """The communicator of a group: of its collectives, its internal messages and the user's messages.

    A group has one communicator, because MPICH has 2048 for each process. Internal messages have tags below OWN_TAGS, of which
    signals have the last ones. OWN_TAGS is added to the tags of the user's messages, so that the two kinds never match.
    """

    def __init__(self, runtime: Runtime, comm: MPI.Intracomm, ranks: Sequence[int] | None = None) -> None:
        self.runtime = runtime
        self.comm = comm
        self.ranks: Sequence[int] = range(comm.Get_size()) if ranks is None else ranks  #: of the world, by rank of ``comm``
        self.lock = runtime.lock
        self.posting = threading.RLock()  # held from a look for a message of the user to the call that receives it
        self.receiving_list = threading.Lock()  # held by the thread that receives the two messages of a list from any rank
        self._freeing = threading.Lock()  # held while the communicator is freed or revoked
        self.in_background: Callable[[], bool] = lambda: False  # whether the calling thread runs beside the program's own
        self.program_comm: MPI.Intracomm | None = None  # for the program's own calls, see `make_program_comm`
        self.kept: list[object] = []  # memory of messages that had not ended when an error was raised: MPI may still use it
        #: True if MPI is serialized on any rank. All ranks then make non-blocking calls, so that the calls match.
        self.serialized = self._serialized_anywhere()
        # One attribute per call, bound once: a lookup on every call would take a tenth of the time.
        self.test: Callable[..., bool] = self._test if runtime.serialized else lambda request, status=None: request.Test(status)
        self.Allreduce = self._collective("Allreduce")
        self.Bcast = self._collective("Bcast")
        self.Reduce = reduce_at_any_root(self._collective("Reduce"))
        self.Allgather = self._collective("Allgather")
        self.Allgatherv = self._with_error(self._collective("Allgatherv"))
        self.Reduce_scatter = self._collective("Reduce_scatter")
        self.Reduce_scatter_block = self._collective("Reduce_scatter_block")
        self.Scan = self._collective("Scan")
        self.Exscan = self._collective("Exscan")

    def make_program_comm(self) -> None:
        """Makes a duplicate for the program's own MPI calls (collective). It is freed with the group."""
        with self.lock:
            self.program_comm = self.comm.Dup()

    def _serialized_anywhere(self) -> bool:
        """Returns whether MPI is serialized on any rank (collective, unless all levels are known).

        Raises:
            ThreadLevelError: On all ranks; see `check_levels`.
        """
        levels: Sequence[int] = self.runtime.thread_levels
        if not levels or len(set(levels)) > 1:  # unknown, or other ranks of the world may have the lower ones
            with self.lock:
                # Not allreduce of objects, for which mpi4py makes another communicator.
                levels = self.comm.allgather(self.runtime.thread_level)
            check_levels(levels)
        return any(level < MPI.THREAD_MULTIPLE for level in levels)

    def _collective(self, name: str) -> Callable[..., None]:
        if not self.serialized:
            return getattr(self.comm, name)  # type: ignore[no-any-return]
        start = getattr(self.comm, "I" + name.lower())

        def call(*arguments: Any) -> None:
            with self.lock:
                request = start(*arguments)
            self.wait_all([request])

        return call

    def _with_error(self, collective: Callable[..., None]) -> Callable[..., None]:
        """The collective, with an error if a rank has died. See Note [Calls without an error] in survivors.py."""
        if not survivors.possible():
            return collective

        def call(*arguments: Any) -> None:
            collective(*arguments)
            with self.lock:
                if self.comm.Is_revoked() or survivors.failed(self.comm):
                    raise MPI.Exception(MPI.ERR_PROC_FAILED)

        return call

    def wait_all(self, requests: list[MPI.Request], statuses: Sequence[MPI.Status] = (), large: bool = False) -> None:
        """Waits for internal messages, one by one. ``statuses``: filled in for the first requests.

        ``large``: the messages take so long that this thread yields its core meanwhile; Note [Waiting for large messages].

        Waitall reports MPI_ERR_IN_STATUS, which says neither what went wrong nor whether all messages have ended.

        Raises:
            MPIException: MPI_ERR_TRUNCATE, after all messages have ended; any other error at once.
        """
        truncated: MPI.Exception | None = None
        for request, status in zip_longest(requests, statuses):
            try:
                self._wait(request, status, large)
            except MPI.Exception as error:
                if error.Get_error_class() != MPI.ERR_TRUNCATE:
                    raise
                truncated = error
        if truncated is not None:
            raise truncated

    def _wait(self, request: MPI.Request, status: MPI.Status | None, large: bool) -> None:
        yields = large and not self.in_background()
        if not self.runtime.serialized and not yields:
            request.Wait(status)
            return
        pause = Backoff(yield_s=math.inf if yields else Backoff.YIELD_S).pause
        while not self.test(request, status):
            pause()

    def barrier(self, timeout_s: float, failed: Callable[[], bool] = bool) -> bool:
        """Returns True once all ranks have called this, or False after ``timeout_s`` seconds, or if ``failed()`` (collective).

        The MPI barrier is non-blocking and tested at every thread level, so that this call can return without the other ranks.
        """
        with self.lock:
            request = self.comm.Ibarrier()
        if self.test(request):
            return True
        pause, deadline = Backoff().pause, time.monotonic() + timeout_s
        while not self.test(request):
            if time.monotonic() > deadline or failed():
                return False
            pause()
        return True

    def _test(self, request: MPI.Request, status: MPI.Status | None = None) -> bool:
        with self.lock:
            return bool(request.Test(status))

    def arrived(self, src: int, tag: int, comm: MPI.Intracomm | None = None) -> arrivals.Arrived | None:
        """The first message from ``src`` (or ANY_SOURCE) that has come; None: none has. ``comm``: the group's own by default."""
        with self.lock:
            return arrivals.first(comm or self.comm, src, tag)

    def progress(self) -> None:
        """Lets MPI move messages forward, those of the program's own communicators too."""
        with self.lock:
            self.comm.Iprobe()

    def cancel(self, request: MPI.Request) -> bool:
        """Cancels a receive. Returns False if its message is already on its way: MPI still uses the memory then."""
        with self.lock, contextlib.suppress(*([MPI.Exception] if survivors.lost() else [])):
            request.Cancel()
            if request.Test():  # succeeds at once for a cancelled request
                return True
            request.Free()
        return False

    def revoke(self) -> None:
        """Ends all operations of the group with an MPI error, on all ranks. Called after a rank has died."""
        with self.lock, self._freeing:
            for comm in (self.comm, self.program_comm):
                if comm and not comm.Is_revoked():  # a null communicator is false
                    comm.Revoke()

    def shrunk(self) -> MPI.Intracomm:
        """A communicator of the ranks that live (collective over them)."""
        with self.lock:
            return self.comm.Shrink()  # type: ignore[return-value]  # the stub says Comm

    def free(self) -> None:
        """Frees the communicators. Called on an explicit destroy only, never from garbage collection."""
        with self.posting, self.lock, self._freeing:
            if self.program_comm:
                self.program_comm.Free()
            if self.comm != self.runtime.base:
                self.comm.Free()
            self.runtime.free()

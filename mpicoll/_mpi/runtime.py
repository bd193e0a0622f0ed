"""Starts MPI once per process, checks that it is the MPI that the launcher meant, and knows what was started."""

from __future__ import annotations

import os
import socket
import sys
import threading
import warnings
import zlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from mpicoll import _cpus
from mpicoll._discovery import binding, detect
from mpicoll._mpi import open_mpi
from mpicoll.errors import ForkedProcess, LaunchError, ThreadLevelError

if TYPE_CHECKING:
    from mpi4py import MPI


class Runtime:
    """What MPI is in this process: the base communicator, this rank, the thread level.

    At MPI_THREAD_MULTIPLE ``lock`` does nothing; at MPI_THREAD_SERIALIZED every MPI call is made under it, and nobody
    blocks in MPI while holding it.
    """

    def __init__(self, base: MPI.Intracomm, parent: Runtime | None = None) -> None:
        from mpicoll._mpi.library import MPI

        self.base = base
        self.parent = parent  # that of all ranks, where this is one of some of them; see `start_some`
        self.rank: int = base.Get_rank()
        self.size: int = base.Get_size()
        self.thread_level: int = MPI.Query_thread()
        self.serialized = self.thread_level < MPI.THREAD_MULTIPLE
        own: AbstractContextManager[object] = threading.RLock() if self.serialized else nullcontext()
        self.lock: AbstractContextManager[object] = (
            own if parent is None else parent.lock
        )  # all MPI calls of this process are made under one
        self.tag_ub: int = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB)  # type: ignore[assignment]
        self.library: str = MPI.Get_library_version().split("\n")[0].rstrip("\0 ")
        self.hostname: str = socket.gethostname()
        #: whether a message that is too long would overwrite what lies behind its receive
        self.overruns: bool = open_mpi.overruns()

    @cached_property
    def comm(self) -> MPI.Intracomm:
        """A duplicate of the base communicator, for our own talk (first use is collective over all its ranks)."""
        global _world_comm
        from mpicoll._mpi.library import MPI

        with self.lock:
            if self.base != MPI.COMM_WORLD:
                return self.base.Dup()
            if _world_comm is None:
                _world_comm = self.base.Dup()
            return _world_comm

    def free(self) -> None:
        """Gives ``comm`` back to MPI if it is that of a rank by itself (`alone`)."""
        from mpicoll._mpi.library import MPI

        if self.base == MPI.COMM_SELF and "comm" in self.__dict__:
            with self.lock:
                self.comm.Free()
            del self.comm

    @cached_property
    def _node(self) -> tuple[int, int]:
        from mpicoll._mpi.library import MPI

        with self.lock:
            node = self.comm.Split_type(MPI.COMM_TYPE_SHARED)
            rank, size = node.Get_rank(), node.Get_size()
            node.Free()
        return rank, size

    @property
    def local_rank(self) -> int:
        """This rank's number among the ranks that share its memory (first use is collective)."""
        return self._node[0]

    @property
    def local_size(self) -> int:
        """How many ranks share this rank's memory (first use is collective)."""
        return self._node[1]


_runtime: Runtime | None = None
_world_comm: MPI.Intracomm | None = None  # of MPI.COMM_WORLD; kept for ever, as the ranks meet on it at their end
_forked = False


def start(comm: MPI.Intracomm | None = None) -> Runtime:
    """Starts MPI if nobody has, and returns what is there; later calls return the same until ``stop``.

    Args:   comm: a communicator of the user's own that is to be the world; None: MPI.COMM_WORLD.
    Raises: LaunchError: no MPI, MPI already finalised, or the launcher's variables contradict MPI (wrong mpiexec).
            ThreadLevelError: MPI was initialised below MPI_THREAD_SERIALIZED.
            ForkedProcess: called in a forked child.
    """
    global _runtime
    if _forked:
        raise forked_error()
    if _runtime is not None and (comm is None or comm == _runtime.base) and not finalized():
        return _runtime
    _check_owner()
    mpi = _load()
    if _runtime is None:
        _check_launcher(mpi)
        _warn_of_binding(mpi)
    _runtime = Runtime(mpi.COMM_WORLD if comm is None else comm)
    return _runtime


def alone() -> Runtime:
    """This rank by itself, whatever the size of its job. Starts MPI if nobody has; no other rank takes part.

    Raises: what `start` raises.
    """
    from mpicoll._mpi.library import MPI

    lock = start().lock  # both make their MPI calls under the same
    runtime = Runtime(MPI.COMM_SELF)
    runtime.lock = lock
    return runtime


def start_some(ranks: Sequence[int]) -> Runtime:
    """Makes a world of some ranks of the one that is there, in this order (collective over them).

    `stop` goes back to the world that was there; `everyone` names it meanwhile.
    """
    global _runtime
    parent = start()
    with parent.lock:
        there = parent.base.Get_group()
        members = there.Incl(list(ranks))
        comm = parent.base.Create_group(members, zlib.crc32(repr(list(ranks)).encode()) % parent.tag_ub)
        members.Free()
        there.Free()
    _runtime = Runtime(comm, parent)
    return _runtime


def everyone() -> Runtime:
    """As `start`, but that of all ranks where the world is one of some of them."""
    there = start()
    return there.parent or there


def stop(free: bool = True) -> None:
    """Forgets the runtime (MPI itself goes on, so that it can be started again); no group may be left.

    Args:   free: False: something is still under way, so that no communicator can be given back to MPI.
    """
    global _runtime
    runtime, _runtime = _runtime, None if _runtime is None else _runtime.parent
    if not free or runtime is None or finalized():
        return
    with runtime.lock:
        if runtime.__dict__.get("comm") not in (None, _world_comm):
            runtime.comm.Free()
        if runtime.parent is not None:
            runtime.base.Free()


def current() -> Runtime | None:
    """The runtime, if MPI was started through mpicoll."""
    return _runtime


def world_comm() -> MPI.Intracomm | None:
    """Our duplicate of MPI.COMM_WORLD, if a world was made of it in this process, be it destroyed by now."""
    return _world_comm


def finalized() -> bool:
    """True once MPI_Finalize has been called."""
    from mpicoll._mpi.library import MPI

    return bool(MPI.Is_finalized())


def in_forked_child() -> bool:
    """True in a process that was forked after its parent had started MPI: not one MPI call may be made here."""
    return _forked


def forked_error() -> ForkedProcess:
    return ForkedProcess(
        f"process {os.getpid()} was forked from a rank and cannot use MPI; communicate in the process that mpiexec "
        "started (a DataLoader worker may compute, but not communicate)"
    )


def _load() -> Any:
    from mpicoll._mpi import library

    mpi = library.MPI
    if mpi.Is_finalized():
        raise LaunchError("MPI has already been finalised in this process, and MPI cannot be started a second time")
    library.initialize()
    level = mpi.Query_thread()
    if level < mpi.THREAD_SERIALIZED:
        name = "MPI_THREAD_SINGLE" if level == mpi.THREAD_SINGLE else "MPI_THREAD_FUNNELED"
        raise ThreadLevelError(
            f"MPI was initialised at {name}; mpicoll needs MPI_THREAD_SERIALIZED or MPI_THREAD_MULTIPLE. "
            "Leave mpi4py.rc.threads and mpi4py.rc.thread_level alone (or unset MPI4PY_RC_THREAD_LEVEL)"
        )
    return mpi


def _check_owner() -> None:
    from mpicoll._mpi import library

    if (refusal := library.refusal()) is not None:
        raise LaunchError(refusal)


def _check_launcher(mpi: Any) -> None:
    """MPI is the truth, the environment is the check: N singletons in the place of N ranks must not go unnoticed."""
    size = mpi.COMM_WORLD.Get_size()
    launch = detect.detect()
    if launch is not None and launch.size not in (None, size):
        library = mpi.Get_library_version().split("\n")[0].rstrip("\0 ")
        raise LaunchError(
            f"the launcher ({launch.launcher}) says {launch.size} ranks, but MPI sees {size}: this mpiexec does not belong to "
            f"the MPI that mpi4py has loaded ({library}). Use `python -m mpicoll.run`, which finds the right one, or "
            "the mpiexec of that MPI; under srun, the --mpi type that it needs (pmix for Open MPI, pmi2 for MPICH)"
        )
    check_environment()


def check_environment() -> None:
    """Refuses a world of one rank where WORLD_SIZE says more and no MPI launcher has; raises LaunchError."""
    world_size = os.environ.get("WORLD_SIZE", "")
    if world_size.isdigit() and not detect.started_by_mpi():
        check_size(int(world_size), f"WORLD_SIZE={world_size}")


def check_size(asked: int, source: str) -> None:
    """Refuses to make a world of one rank for a program that means to be one of several; MPI must have been started.

    Args:
        asked: The number of ranks that the program expects.
        source: What says so, for the message: ``"WORLD_SIZE=4"``, ``"init_process_group: world_size=4"``.

    Raises:
        LaunchError: More than one rank is expected, and MPI has one: no MPI launcher started the ranks.
    """
    from mpicoll._mpi.library import MPI

    if asked <= 1 or MPI.COMM_WORLD.Get_size() > 1:
        return
    remedy = f"`python -m mpicoll.run -n {asked} script.py` (or mpirun, or srun)"
    if detect.TORCHRUN_MARK in os.environ:
        raise LaunchError(
            f"torchrun started {asked} processes, but MPI sees 1 rank: MPI jobs are started by mpiexec. Use {remedy} in the "
            "place of torchrun"
        )
    launch = detect.detect()
    started = "no MPI launcher started this process" if launch is None else f"the launcher ({launch.launcher}) started 1 rank"
    raise LaunchError(
        f"{source} asks for {asked} ranks, but {started}, and MPI sees 1 rank. Start the ranks with {remedy}, or from Python "
        f"with mpicoll.spawn(function, args, nprocs={asked}) instead of torch.multiprocessing.spawn, Process or a shell "
        "loop. MPI then says rank and size"
    )


@cache
def _warn_of_binding(mpi: Any) -> None:
    """Once, on rank 0; see Note [One core for a rank] in `mpicoll._discovery.binding`."""
    launch = detect.detect()
    if launch is None or mpi.COMM_WORLD.Get_rank() != 0:
        return
    waits_busily = mpi.get_vendor()[0] == "Open MPI" and os.environ.get(binding.YIELD_SETTING) is None
    text = binding.advice(launch, _cpus.allowed(), binding.cores_for_ranks(launch, os.environ), waits_busily)
    if text is not None:
        warnings.warn(f"mpicoll: {text}", stacklevel=3)


def _after_fork_in_child() -> None:
    global _forked
    mpi = sys.modules.get("mpi4py.MPI")
    _forked = _forked or (mpi is not None and mpi.Is_initialized())


os.register_at_fork(after_in_child=_after_fork_in_child)

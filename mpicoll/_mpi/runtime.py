"""Starts MPI once per process, checks that it is the MPI that the launcher expects, and remembers what was started."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import threading
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, cached_property
from time import thread_time
from typing import TYPE_CHECKING, Any, TypeVar

from mpicoll._base import binding, cpus, last_words, launcher, probe
from mpicoll._base.errors import ForkedProcess, LaunchError, ThreadLevelError
from mpicoll._mpi import open_mpi

if TYPE_CHECKING:
    from mpi4py import MPI

SIGNAL_TAGS = 1024  # tags for the signals of windows; a group's window of number n has the n-th, modulo
OWN_TAGS = 16 + SIGNAL_TAGS  # number of tags that internal messages may use on the communicator of a group

T = TypeVar("T")
LOCK = threading.RLock()  # the one lock of this process around calls of MPI; see `Runtime`


class Runtime:
    """The state of MPI in this process: the base communicator, this rank, the thread level.

    At MPI_THREAD_MULTIPLE ``lock`` does nothing. At MPI_THREAD_SERIALIZED every MPI call is made under it. A thread that holds it
    blocks in MPI only to make a communicator or a window, and in a flush.
    """

    def __init__(self, base: MPI.Intracomm, own: bool = False) -> None:
        from mpicoll._mpi.library import MPI

        self.base = base  # the user's own communicator until ``comm`` exists, which takes its place: the user may free it
        self.own = own  # mpicoll has made the base, so that it need not be duplicated; the program has no handle of it
        self.frees_base = False  # at the end of this world
        self._of_all = base == MPI.COMM_WORLD
        self.given = not (own or self._of_all or base == MPI.COMM_SELF)  # the base is a communicator of the user, who may free it
        self.rank: int = base.Get_rank()
        self.size: int = base.Get_size()
        self.thread_level: int = MPI.Query_thread()
        self.serialized = self.thread_level < MPI.THREAD_MULTIPLE
        #: Of all ranks, once they have exchanged them.
        self.thread_levels: tuple[int, ...] = ()
        self.lock: AbstractContextManager[object] = LOCK if self.serialized else nullcontext()
        #: The largest tag of a user's message.
        self.tag_ub: int = MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) - OWN_TAGS  # type: ignore[operator]
        self.library: str = MPI.Get_library_version().split("\n")[0].rstrip("\0 ")
        self.hostname: str = socket.gethostname()
        #: True if a message that is too long would overwrite the memory behind its receive.
        self.overruns: bool = open_mpi.overruns()

    @cached_property
    def comm(self) -> MPI.Intracomm:
        """A communicator for internal messages (first use is collective over all its ranks): a duplicate of the user's one."""
        if self.own:
            return self.base
        with self.lock:
            known = world_comm() if self._of_all else None
            self.connect(self.base.Dup() if known is None else known)
        return self.comm

    @property
    def connected(self) -> bool:
        """Whether ``comm`` has been made."""
        return "comm" in self.__dict__ or (self._of_all and world_comm() is not None)

    def connect(self, comm: MPI.Intracomm) -> None:
        """Makes this duplicate of the base communicator ``comm``."""
        self.__dict__["comm"] = comm
        if self._of_all:
            process._world_comm = comm
        if self.given and self is current():
            self.base = process.last_base = comm

    def free(self) -> None:
        """Frees ``comm``, unless it is that of the current world, or of all ranks, or the base. May be called again."""
        comm = self.__dict__.get("comm")
        if comm and not self.own and self is not current() and comm != world_comm():  # a freed one is false
            with self.lock:
                comm.Free()

    @cached_property
    def local_rank(self) -> int:
        """This rank's number among the ranks that share its memory (first use is collective)."""
        from mpicoll._mpi.library import MPI

        with self.lock:
            node = self.comm.Split_type(MPI.COMM_TYPE_SHARED)
            rank = node.Get_rank()
            node.Free()
        return rank


class Process:
    """MPI in this process: the current world, and what outlives it. The only instance is ``process``."""

    def __init__(self) -> None:
        self._current: Runtime | None = None
        self._forked = False
        self._preparations: list[Callable[[], None]] = []  # see `entering`
        self._world_comm: MPI.Intracomm | None = None  # see `world_comm`; the ranks meet on it at exit
        self.last_base: MPI.Intracomm | None = None  #: The communicator of the last world.
        self.in_flight: list[tuple[list[MPI.Request], object]] = []  # see `arrivals.keep`
        self.cells = False  #: See `_moves_cells`.
        self.kept: list[object] = []  #: Messages whose memory MPI may use until the process ends, as they never ended.

    def start(self, comm: MPI.Intracomm | None = None, own: bool = False) -> Runtime:
        """Starts MPI if it is not running, and returns its runtime. Later calls return the same runtime until `stop`.

        Args:
            comm: A communicator, to be the world; None: MPI.COMM_WORLD.
            own: mpicoll has made it, so that it need not be duplicated.

        Raises:
            LaunchError: No MPI, MPI already finalised, or the launcher's variables contradict MPI (wrong mpiexec).
            ThreadLevelError: MPI was initialised below MPI_THREAD_SERIALIZED.
            ForkedProcess: Called in a forked child.
        """
        if self._forked:
            raise forked_error()
        if self._current is not None and (comm is None or comm == self._current.base) and not finalized():
            return self._current
        mpi, self.cells = _load(), _moves_cells()
        if self._current is None:
            _check_launcher(mpi)
            _warn_of_binding(mpi)
        self.last_base = mpi.COMM_WORLD if comm is None else comm
        groups = self.last_base.Get_group(), mpi.COMM_WORLD.Get_group()
        last_words.renumber(groups[0].Translate_ranks(None, groups[1]))
        for group in groups:
            group.Free()
        self._current = Runtime(self.last_base, own=own)
        return self._current

    def stop(self, free: bool = True) -> None:
        """Forgets the runtime. No group may be left. MPI itself keeps running, so that `start` can be called again.

        ``free`` is False if an operation is still in progress, so that no communicator can be freed.
        """
        runtime, self._current = self._current, None
        if not free or runtime is None or finalized():
            return
        runtime.free()
        if runtime.frees_base:
            with runtime.lock:
                runtime.base.Free()

    def current(self) -> Runtime | None:
        """The runtime; None if MPI was not started through mpicoll."""
        return self._current

    def world_comm(self) -> MPI.Intracomm | None:
        """The internal duplicate of MPI.COMM_WORLD, if this process has made a world of it, even if that is destroyed."""
        return self._world_comm

    def prepare_threads_with(self, preparation: Callable[[], None]) -> None:
        """Makes our background threads call ``preparation`` before each operation. Adding it again does nothing."""
        if preparation not in self._preparations:
            self._preparations.append(preparation)

    def entering(self) -> None:
        """Runs the preparations. A background thread calls this before it calls MPI."""
        for preparation in self._preparations:
            preparation()

    def in_forked_child(self) -> bool:
        """True in a process that was forked after its parent had started MPI. Such a process must not call MPI."""
        return self._forked

    def forget(self) -> None:
        """Called in a forked child."""
        self._forked = self._forked or runs()


process = Process()
os.register_at_fork(after_in_child=process.forget)
start, stop = process.start, process.stop
current, world_comm, in_forked_child = process.current, process.world_comm, process.in_forked_child
prepare_threads_with, entering = process.prepare_threads_with, process.entering


def runs() -> bool:
    """Whether MPI has been started in this process, by anybody; starts nothing."""
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and bool(mpi.Is_initialized())


def finalized() -> bool:
    """True once MPI_Finalize has been called."""
    from mpicoll._mpi.library import MPI

    return bool(MPI.Is_finalized())


@cache
def _unending() -> MPI.Request:
    """A request of this process that never ends."""
    from mpicoll._mpi.library import MPI

    return MPI.Grequest.Start(None, None, None)


@cache
def _moves_cells() -> bool:
    """Whether MPI moves 8 KiB in a call, through a queue of 64 such cells.

    MPICH does where the kernel lets no process read the memory of another one (ptrace_scope is 1 on Ubuntu). Its variable
    CH4_CMA_ENABLE is 0 there. (In Open MPI this question would change the thread level.)
    """
    from mpicoll._mpi.library import MPI, function

    if not MPI.Get_library_version().startswith("MPICH"):
        return False
    cma, index, handle, count = ctypes.c_int(1), ctypes.c_int(), ctypes.c_void_p(), ctypes.c_int()
    function("MPI_T_init_thread")(0, ctypes.byref(count))
    if not function("MPI_T_cvar_get_index")(b"MPIR_CVAR_CH4_CMA_ENABLE", ctypes.byref(index)):  # 0: there is such a variable
        function("MPI_T_cvar_handle_alloc")(index, None, ctypes.byref(handle), ctypes.byref(count))
        function("MPI_T_cvar_read")(handle, ctypes.byref(cma))
    return not cma.value


def move(cells: int = 1) -> float:
    """Lets MPI move what is under way here, and what other ranks put here. Returns the seconds of CPU time of one call.

    ``cells``: how many of them, at most 64, where it moves cells.

    MPI copies bytes here unless it has RDMA, and a call that finds none takes microseconds. The time of a clock would count waits
    for the interpreter's lock. Of MPI_Iprobe, Open MPI over UCX takes one call in a hundred to move what others put here.
    """
    world = current()
    if world is None or in_forked_child() or finalized():
        return 0.0
    if world.serialized and not LOCK.acquire(blocking=False):  # another thread is in MPI
        return 0.0
    try:
        unending, calls = _unending(), min(cells, 64) if process.cells else 1
        began = thread_time()
        for _ in range(calls):
            unending.Test()
        return (thread_time() - began) / calls
    finally:
        if world.serialized:
            LOCK.release()


def attempt(within_s: float, function: Callable[..., T], *arguments: Any) -> T | None:
    """Calls MPI under the lock, at any thread level. Returns None, and calls nothing, if another thread holds it for so long."""
    if not LOCK.acquire(timeout=within_s):
        return None
    try:
        return function(*arguments)
    finally:
        LOCK.release()


def alone() -> Runtime:
    """The runtime of this rank alone, in a job of any size. Starts MPI if it is not running; no other rank takes part."""
    from mpicoll._mpi.library import MPI

    start()
    return Runtime(MPI.COMM_SELF)


def subset(ranks: Sequence[int]) -> MPI.Intracomm:
    """Makes a communicator of some ranks of the current world, in this order (collective over them)."""
    world = start()
    with world.lock:
        return create_group(world.base, ranks, zlib.crc32(repr(list(ranks)).encode()) % world.tag_ub)


def create_group(base: MPI.Intracomm, ranks: Sequence[int], tag: int) -> MPI.Intracomm:
    """MPI_Comm_create_group, with numbers of ranks (collective over them). The caller holds the lock."""
    group = base.Get_group()
    members = group.Incl(list(ranks))
    try:
        return base.Create_group(members, tag)
    finally:
        members.Free()
        group.Free()


def forked_error() -> ForkedProcess:
    return ForkedProcess(
        f"process {os.getpid()} was forked from a rank and cannot use MPI; communicate in the process that mpiexec "
        "started (a DataLoader worker may compute, but not communicate)"
    )


def _load() -> Any:
    from mpicoll._mpi import library

    if (refusal := library.refusal()) is not None:
        if library.started_by_a_rank() is None:
            last_words.end_unless_caught()
        raise LaunchError(refusal)
    mpi = library.MPI
    if mpi.Is_finalized():
        raise LaunchError("MPI has already been finalised in this process, and MPI cannot be started a second time")
    library.initialize()
    level = mpi.Query_thread()
    if level < mpi.THREAD_SERIALIZED:
        raise ThreadLevelError(
            f"MPI was initialised at {level_name(level)}; mpicoll needs MPI_THREAD_SERIALIZED or MPI_THREAD_MULTIPLE. "
            + (
                "Another library has started MPI. Write `from mpi4py import MPI` above the line that imports or starts "
                "that library: mpi4py then starts MPI, at MPI_THREAD_MULTIPLE, and the library uses it"
                if library.mpi4py_is_unchanged()
                else "Leave mpi4py.rc.threads and mpi4py.rc.thread_level alone (or unset MPI4PY_RC_THREAD_LEVEL)"
            )
        )
    return mpi


def level_name(level: int) -> str:
    from mpicoll._mpi.library import MPI

    return next(f"MPI_THREAD_{name}" for name in probe.THREAD_LEVELS if level == getattr(MPI, f"THREAD_{name}"))


def _check_launcher(mpi: Any) -> None:
    """Checks the launcher's variables against MPI, whose size counts: N singletons instead of N ranks must be noticed."""
    size, launch = mpi.COMM_WORLD.Get_size(), launcher.detect()
    if launch is not None and launch.size != size:
        from mpicoll._mpi import library

        raise LaunchError(library.wrong_mpiexec(launch, f"but MPI sees {size}"))
    check_environment()


def check_environment() -> None:
    """Refuses a world of one rank if WORLD_SIZE asks for more and no MPI launcher started this process."""
    world_size = os.environ.get("WORLD_SIZE", "")
    if world_size.isdigit() and not launcher.started_by_mpi():
        _check_size(int(world_size), f"WORLD_SIZE={world_size}")


def check_named(operation: str, rank: object, world_size: object) -> None:
    """Refuses several ranks, named in the arguments of ``operation``, where MPI has one. -1 and None name nothing.

    Raises:
        LaunchError: world_size, or a rank other than 0, asks for more ranks than the one that MPI has.
    """
    if isinstance(world_size, int) and world_size > 1:
        _check_size(world_size, f"{operation}: world_size={world_size}")
    elif world_size in (-1, None) and isinstance(rank, int) and rank > 0:
        _check_size(rank + 1, f"{operation}: rank={rank}")


def refuse_other_size(operation: str, world_size: object, otherwise: str) -> None:
    """Refuses a world of another size before MPI starts: MPI_Init would wait for ranks that may never call it."""
    launch = launcher.detect()
    if launch is not None and launch.size > 1 and "mpi4py.MPI" not in sys.modules:  # of 1 rank: `check_named` names the launcher
        refuse_contradiction(operation, "world_size", world_size, launch.size, otherwise)


def refuse_contradiction(
    operation: str, name: str, named: object, truth: int, otherwise: str, environ: Mapping[str, str] = os.environ
) -> None:
    """Refuses the argument ``name`` of an operation if it differs from what MPI says. ``otherwise``: what else to call.

    A value that the environment has, too, is not refused: an outer torchrun or a batch shell has left it there.

    Raises:
        LaunchError: The argument differs.
    """
    if named not in (-1, None, truth) and str(named) != environ.get(name.upper()):
        known = f"but MPI says {truth}. Leave out rank and world_size: MPI knows them"
        raise LaunchError(f"{operation}: {name}={named}, {known}. {otherwise}")


def _check_size(asked: int, source: str) -> None:
    """Refuses to make a world of one rank for a program that expects ``asked`` ranks. MPI must have been started.

    Raises:
        LaunchError: More than one rank is expected, and MPI has one: no MPI launcher started the ranks.
    """
    from mpicoll._mpi.library import MPI

    if asked <= 1 or MPI.COMM_WORLD.Get_size() > 1:
        return
    launch = launcher.detect()
    started = "no MPI launcher started this process" if launch is None else f"the launcher ({launch.launcher}) started 1 rank"
    raise LaunchError(
        f"{source} asks for {asked} ranks, but {started}, and MPI sees 1 rank. Start the ranks with `python -m mpicoll.run -n "
        f"{asked} script.py` (or mpirun, or srun). Or start processes as for Gloo, by torchrun or mp.spawn: init_process_group, "
        "called before init_rpc, makes a world of them if MPI has not started before (by `from mpi4py import MPI`), and each has "
        "rank, world_size and a place to meet: a store, an init_method, or MASTER_ADDR and MASTER_PORT"
    )


@cache
def _warn_of_binding(mpi: Any) -> None:
    """Warns once, on rank 0; see Note [One core for a rank] in `mpicoll._base.binding`."""
    launch = launcher.detect()
    if launch is None or mpi.COMM_WORLD.Get_rank() != 0:
        return
    waits_busily = mpi.get_vendor()[0] == "Open MPI" and os.environ.get(binding.YIELD_SETTING) is None
    text = binding.advice(launch, cpus.allowed(), binding.cores_for_ranks(launch, os.environ), waits_busily)
    if text is not None:
        warnings.warn(f"mpicoll: {text}", stacklevel=3)

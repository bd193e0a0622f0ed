"""``mpicoll.spawn(fn, args, nprocs)``: starts MPI ranks from a script, as ``torch.multiprocessing.spawn`` starts processes.

    if __name__ == "__main__":                        # the ranks import the script again, as __mp_main__
        mpicoll.spawn(train, args=(10,), nprocs=4)    # runs train(rank, 10) in 4 ranks under mpiexec

    [1] fn and args are pickled into a private folder, and the plan of the job
    [2] a child, the supervisor, runs mpiexec, which starts the ranks, each with that folder's path
    [3] each rank imports the script, as spawn of multiprocessing does, and calls fn(rank, *args)
    [4] a rank that raises writes its traceback to the folder; the supervisor ends the others, and writes which rank failed first
    [5] otherwise the rank writes what fn has returned, pickled

All ranks run on this host. For several hosts use `python -m mpicoll.run`.
"""

from __future__ import annotations

import atexit
import importlib
import os
import pickle
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable
from multiprocessing import spawn as multiprocessing_spawn
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

import mpicoll._launch.run as run
from mpicoll._base import launcher
from mpicoll._base.errors import LaunchError, MpicollError
from mpicoll._base.waits import STOP_S
from mpicoll._launch import arguments, spawn_rank
from mpicoll._launch.find import ask
from mpicoll._launch.job import Program
from mpicoll._launch.reports import Rank, signal_name
from mpicoll._launch.supervisor import Outcome

T = TypeVar("T")

UNPICKLABLE = pickle.PicklingError, AttributeError, TypeError, RuntimeError
RESULTS = "Let fn return its results: spawn returns a list of them. A Queue cannot be sent"


class RankRaised(ProcessRaisedException, MpicollError):
    """A rank of `spawn` raised; the message holds its traceback. The other ranks have been ended.

    Attributes:
        error_index: The rank.
        error_pid: Its process id.
        msg: The message.
    """


class RankExited(ProcessExitedException, MpicollError):
    """A rank of `spawn`, or mpiexec, ended without an exception (sys.exit, a signal). The other ranks have been ended.

    Attributes:
        error_index: The rank; -1: unknown.
        error_pid: Its process id.
        exit_code: Its exit status; negative: the number of the signal that ended it.
        signal_name: Name of that signal, or None.
        msg: The message.
    """


class SpawnContext:
    """The running ranks of one `spawn` call.

    Attributes:
        results: What the ranks have returned, in rank order, once `join` has returned True. None for what cannot be sent.
    """

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, nprocs: int) -> None:
        self.results: list[Any] = []
        self.process = process  # the supervisor of mpiexec
        self.nprocs = nprocs
        self._folder = folder

    def pids(self) -> list[int]:
        """Returns the process ids of the ranks that have started, in rank order."""
        pids = [self._folder / f"pid-{rank}" for rank in range(self.nprocs)]
        return [int(text) for file in pids if file.exists() and (text := file.read_text())]  # empty while it is written

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Waits for the ranks. Returns True if all have ended, False if some still run after the time-out.

        Args:
            timeout: Seconds; None: no limit.
            grace_period: Accepted as in torch, without effect: the other ranks are ended at once when one fails.

        Raises:
            RankRaised: A rank raised. The other ranks have been ended.
            RankExited: A rank or mpiexec ended with a status other than 0. The other ranks have been ended.
        """
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        except BaseException:  # Ctrl-C, for example: the ranks must not outlive the caller
            self.stop()
            raise
        try:
            self._take_outcome()
        finally:
            self._forget()
        return True

    def stop(self) -> None:
        """Ends the ranks: SIGTERM first, then SIGKILL."""
        ask.end(self.process, 2 * STOP_S)  # the supervisor sends SIGKILL to ranks after STOP_S
        self._forget()

    def _forget(self) -> None:
        atexit.unregister(self._at_exit)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _at_exit(self) -> None:
        self.process.wait()
        self._forget()

    def _take_outcome(self) -> None:
        """Takes the results, or raises the failure of the rank that failed first; the other ranks were ended because of it."""
        file, killed = self._folder / "outcome", f"the supervisor of the ranks: exit status {self.process.returncode}"
        outcome = pickle.loads(file.read_bytes()) if file.exists() else Outcome(1, killed)
        if outcome.status == 0:
            for rank in range(self.nprocs):
                self.results.append(self._returned(rank))
            return
        first = outcome.first or Rank(-1, self.process.pid, "")
        if (raised := self._folder / f"raised-{first.number}").exists():
            text = raised.read_text("utf-8")
            text = f"\n\n-- rank {first.number} of {self.nprocs} raised, and the others were ended:\n{text}"
            raise RankRaised(text, first.number, first.pid)
        number = min(first.status or 0, 0) if not first.why else 0
        signal = signal_name(-number) if number else None
        raise RankExited(outcome.cause, first.number, first.pid, exit_code=number or outcome.status, signal_name=signal)

    def _returned(self, rank: int) -> Any:
        try:
            value, why = pickle.loads((self._folder / f"done-{rank}").read_bytes())
        except FileNotFoundError:
            message = f"rank {rank} of {self.nprocs}: exit status 0 before the end of its program, by os._exit"
            raise RankExited(message, rank, self.pids()[rank], exit_code=0) from None
        except Exception as error:  # noqa: BLE001  of the value's own methods as well
            value, why = None, f"{type(error).__name__}: {error}"
        if why:
            warnings.warn(
                f"spawn: what rank {rank} returned cannot be sent here, so that its result is None: {why}", stacklevel=5
            )
        return value


@overload
def spawn(
    fn: Callable[..., T],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    join: Literal[True] = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> list[T]: ...
@overload
def spawn(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    *,
    join: Literal[False],
    daemon: bool = False,
    start_method: str = "spawn",
) -> SpawnContext: ...
def spawn(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> SpawnContext | list[Any]:
    """Runs ``fn(rank, *args)`` in ``nprocs`` MPI ranks on this host; a drop-in for torch.multiprocessing.spawn.

    One ordinary process calls it (not collective). It waits for the ranks unless ``join=False``. Unlike in torch, the ranks find
    each other by MPI: ``init_process_group()`` needs neither address nor rank.

    Args:
        fn: A function of a module, or of the script if the call is under ``if __name__ == "__main__":``. If cloudpickle is
            installed, also a function of a notebook, a lambda or an inner function.
        args: Picklable. They may hold tensors (copied) and proxies of multiprocessing.Manager, but no Queue or Lock of
            multiprocessing.
        nprocs: Number of ranks.
        join: Wait for the ranks, and return what they return. False: return a SpawnContext at once; join it.
        daemon: With join=False: end the ranks when this process ends. Otherwise the end of this process waits for them. If
            this process is killed, the ranks end, too.
        start_method: Only "spawn"; mpiexec starts the ranks as new programs.

    Returns:
        The results of ``fn``, in rank order (torch: None). A result that cannot be sent is None, with a warning. With
        ``join=False`` a SpawnContext, with ``join(timeout)``, ``results``, ``pids()`` and ``stop()``.

    Raises:
        RankRaised: A rank raised (also a torch.multiprocessing.ProcessRaisedException).
        RankExited: A rank or mpiexec ended with a status other than 0.
        LaunchError: There is no MPI, or this process is a rank.
        TypeError: fn or args cannot be pickled, or need cloudpickle, and it is not installed.
        ValueError: nprocs or start_method.

    Example:
        >>> dist.spawn(divmod, args=(2,), nprocs=4)  # divmod(rank, 2)
        [(0, 0), (0, 1), (1, 0), (1, 1)]
    """
    _check(nprocs, start_method)
    # Only its owner may read the folder: it holds the key for connections of multiprocessing.
    folder = Path(tempfile.mkdtemp(prefix="mpicoll-spawn-"))
    try:
        (folder / "task").write_bytes(_task(fn, args))
        process = _start(folder, nprocs)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    context = SpawnContext(process, folder, nprocs)
    if join:
        context.join()
        return context.results
    atexit.register(context.stop if daemon else context._at_exit)
    return context


def _check(nprocs: int, start_method: str) -> None:
    if not isinstance(nprocs, int) or isinstance(nprocs, bool) or nprocs < 1:
        raise ValueError(f"spawn: nprocs must be a whole number of at least 1, got {nprocs!r}")
    if start_method != "spawn":
        raise ValueError(
            f"spawn: start_method must be 'spawn', got {start_method!r}; MPI ranks are new processes and cannot be"
            " forked from this one"
        )
    if spawn_rank.importing:
        raise LaunchError('spawn was called while a rank imports the script; put the call under `if __name__ == "__main__":`')
    launch = launcher.detect()
    # A Slurm step of one task may be the shell of `srun --pty bash`, from which ranks may be started.
    if launch is not None and (launch.launcher != "slurm" or launch.size > 1):
        raise LaunchError(
            f"spawn: this process is already rank {launch.rank} of {launch.size} (started by {launch.launcher}), and a"
            " rank cannot start ranks; start the script with plain `python script.py` and let spawn start the ranks,"
            " or call the function itself instead of spawn"
        )


def _task(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """What a rank needs to import the script, and fn and args, pickled."""
    preparation = multiprocessing_spawn.get_preparation_data("MpicollRank")
    preparation["authkey"] = bytes(preparation["authkey"])  # for proxies of a Manager; its own type cannot be pickled
    if not os.path.exists(preparation.get("init_main_from_path", "")):  # "<stdin>" of `python -`
        preparation.pop("init_main_from_path", None)
    interactive = not {"init_main_from_name", "init_main_from_path"} & preparation.keys()
    return pickle.dumps((preparation, _pickled((fn, tuple(args)), interactive)))


# Note [What pickle cannot send]
# pickle sends a function by the name of its module, which the ranks import. The `__main__` of a notebook, an interactive session
# or `python -c` has no file to import, and a lambda or an inner function has no name. cloudpickle sends all of these by value.


def _pickled(task: tuple[Any, ...], interactive: bool) -> bytes:
    """Returns the bytes of (fn, args). interactive: the ranks cannot import `__main__`.

    Raises:
        TypeError: They cannot be pickled, or only by cloudpickle, which is not installed.
    """
    try:
        pickled = pickle.dumps(task)
        if not interactive or b"__main__" not in pickled:  # the name of the module of a function or class
            return pickled
        why = "the ranks cannot import what is defined in a notebook, an interactive session or python -c"
    except UNPICKLABLE as error:
        why = str(error)
    try:
        cloudpickle = importlib.import_module("cloudpickle")
    except ImportError:
        raise TypeError(
            f"spawn: fn and args must be picklable, and they are not: {why}. Put fn into a module, or `pip install "
            f"cloudpickle`, with which spawn takes functions of a notebook, lambdas and inner functions. {RESULTS}"
        ) from None
    try:
        return cloudpickle.dumps(task)  # type: ignore[no-any-return]
    except UNPICKLABLE as error:
        raise TypeError(f"spawn: fn and args must be picklable, and they are not: {error}. {RESULTS}") from error


def _start(folder: Path, nprocs: int) -> subprocess.Popen[bytes]:
    program = f"from mpicoll._launch.spawn_rank import main; main({str(folder)!r})"
    job_plan, environ = run.prepare([Program(_command("rank", ["-c", program]), nprocs)])
    (folder / "plan").write_bytes(pickle.dumps((os.getpid(), job_plan)))
    # In a session of its own: a Ctrl-C reaches this process only, which ends the job (`SpawnContext.join`).
    return subprocess.Popen(_command("supervisor", str(folder)), env=environ, stdin=subprocess.DEVNULL, start_new_session=True)


def _command(module: str, argument: str | list[str]) -> tuple[str, ...]:
    """Runs ``main`` of this module of the launcher."""
    where = str(Path(__file__).resolve().parents[2])
    code = f"import sys; sys.path.append({where!r}); from mpicoll._launch.{module} import main; main({argument!r})"
    return arguments.python(), "-u", "-c", code

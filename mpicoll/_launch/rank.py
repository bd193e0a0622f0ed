"""Runs the program of one rank: ``python -m mpicoll._launch.rank [options] script.py args...`` or ``... -m module args...``
or ``... -c code args...``.

    --log-dir DIR   standard output and standard error go to DIR/rank-R.log (Note [Log files] in _launch/plan.py)
    --exec          the program is an executable, not a script

`mpicoll.run` starts every program by it, in a child of a process that reports how the child ends (`mpicoll._launch.monitor`).

Hydra lets the job continue if a rank fails before MPI_Init (a module is missing on one host, say); the other ranks then wait in
MPI_Init for ever. Here such a rank tells Hydra to end the job with its exit status. mpiexec of Open MPI does that by itself.

The program is `__main__`, as usual: it is executed in the namespace of this module, so that pickle and multiprocessing find it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import runpy
import sys
import time
import traceback
from types import TracebackType
from typing import NoReturn

from mpicoll._base import binding, cpus, frames, inherited, last_words, launcher, open_mpi_settings
from mpicoll._base.waits import LAST_WORDS_S
from mpicoll._launch import monitor

TRIFLE_S = 0.1  # processor time of a child that has not started MPI: the CUDA wheels of torch run ldconfig


def main(words: list[str]) -> None:
    """Runs the program, and ends the process as ``python words...`` does. Ends the job too if MPI has not started."""
    _choose_threads()
    open_mpi_settings.provide()
    monitor.start()
    if logs := words[0] == "--log-dir":
        _redirect(words[1])
        words = words[2:]
    if words[0] == "--exec":
        last_words.returned()  # what an executable does cannot be told from its exit status
        os.execvp(words[1], words[1:])
    _prepare_output()
    _tell_of_exit()
    try:
        if words[0] == "-m":
            sys.argv[:] = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif words[0] == "-c":
            sys.argv[:] = ["-c", *words[2:]]
            _run(words[1], "<string>")
        else:
            sys.argv[:] = words
            _run_script(words[0])
    except SystemExit as ending:
        status = exit_status(ending)
        if status != 0:
            abort_job(status)
        last_words.returned(_alone())
        sys.exit(status)
    except BaseException as error:  # noqa: BLE001  after any error the other ranks must not wait
        status = 130 if isinstance(error, KeyboardInterrupt) else 1
        if last_words.monitored() and (refusal := _refusal_of_child(error)):
            last_words.why(refusal)
            abort_job(status)
            sys.exit(status)
        if last_words.why_error(error, status) and not logs:
            time.sleep(LAST_WORDS_S)  # for the rank that prints the same error
            sys.stderr.flush()
            contextlib.redirect_stderr(open(os.devnull, "w")).__enter__()  # noqa: SIM115  until the end
        # If MPI has started, this is the hook of mpicoll: it prints, aborts and does not return.
        error = error.with_traceback(_own_frames(error.__traceback__))
        if sys.excepthook is sys.__excepthook__:
            _print(error)
        else:
            sys.excepthook(type(error), error, error.__traceback__)
        abort_job(status)
        sys.exit(status)
    last_words.returned(_alone())


def _tell_of_exit() -> None:
    """Lets os._exit(0) say whether MPI still runs: a failure then, of which mpiexec says nothing, 0 or 1.

    After MPI_Finalize it takes leave of Hydra, as MPICH does by a function of C's atexit. Hydra would kill the other ranks.
    """
    leave, hydra = os._exit, _hydra()

    def leave_and_tell(status: int) -> NoReturn:
        mpi = sys.modules.get("mpi4py.MPI")
        if status & 0xFF == 0 and last_words.monitored():
            finalized = mpi is not None and mpi.Is_finalized()
            last_words.left(mpi is not None and mpi.Is_initialized() and not finalized)
            if finalized and hydra is not None and _hydra() == hydra:
                with contextlib.suppress(OSError):  # mpiexec has ended
                    os.write(hydra[0], b"cmd=finalize\n")
        leave(status)

    os._exit = leave_and_tell


def _hydra() -> tuple[int, int] | None:
    """The file descriptor of the connection to Hydra, and what identifies it; None: there is none, or it is closed.

    srun --mpi=pmi2 sets PMI_FD, too, but takes nothing before cmd=init.
    """
    launch, number = launcher.detect(), os.environ.get("PMI_FD", "")
    with contextlib.suppress(OSError):
        if launch is not None and launch.launcher == "hydra" and number.isdigit():
            return int(number), os.fstat(int(number)).st_ino
    return None


def _alone() -> bool:
    """Whether the program has torch, and has neither called init_process_group nor started MPI or a process that might have."""
    mpi, register = sys.modules.get("mpi4py.MPI"), sys.modules.get("mpicoll._c10d.register")
    if register is None or register.worlds or (mpi is not None and mpi.Is_initialized()):
        return False
    spent = os.times()
    return spent.children_user + spent.children_system < TRIFLE_S


def _choose_threads() -> None:
    """Sets OMP_NUM_THREADS to this rank's share of the cores unless the user has set it. Call it before torch is imported."""
    threads = binding.threads(os.environ, cpus.allowed(), launcher.detect())
    if threads is not None and not any(name in os.environ for name in binding.THREAD_SETTINGS):
        inherited.provide_here(binding.THREADS, str(threads))


def _redirect(folder: str) -> None:
    """Redirects file descriptors 1 and 2 to the file of this rank, with the output of C code and of child processes."""
    launch = launcher.detect()
    os.makedirs(folder, exist_ok=True)
    name = f"rank-{launch.rank if launch is not None else 0}.log"
    file = os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o666)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def _prepare_output() -> None:
    """Lets a crash print where the program is, and writes each line in one piece.

    `python -u` writes the end of a line on its own. Hydra passes on, and tags, the pieces that it reads, so the lines of two
    ranks would come out as one line and an empty line.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)
    if not faulthandler.is_enabled() and sys.stderr is not None:
        of_c: dict[str, bool] = {"c_stack": False} if sys.version_info >= (3, 14) else {}
        faulthandler.enable(all_threads=False, **of_c)  # a crash shows the program's calls; Open MPI leaves out those of C


def abort_job(status: int) -> None:
    """Ends all ranks with ``status`` if Hydra has started this process and MPI has not started; otherwise does nothing.

    After MPI_Init, MPI_Abort ends the job.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    hydra = None if mpi is not None and mpi.Is_initialized() else _hydra()
    if hydra is None:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(LAST_WORDS_S)
    with contextlib.suppress(OSError):  # not the pipe of Hydra: then only this rank ends
        os.write(hydra[0], f"cmd=abort exitcode={status}\n".encode())  # of the PMI-1 protocol; needs no cmd=init before it


def _run_script(script: str) -> None:
    if not os.path.isfile(script):  # a folder or a zip archive with a __main__.py
        runpy.run_path(script, run_name="__main__")
        return
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    with open(script, "rb") as file:
        _run(file.read(), script, __file__=os.path.abspath(script))


def _run(text: str | bytes, name: str, **names: str) -> None:
    """Runs a program in the namespace of `__main__`, with these names more. ``name``: of its file, or "<string>"."""
    code = compile(text, name, "exec", dont_inherit=True)
    namespace = sys.modules["__main__"].__dict__
    for name in [name for name in namespace if not (name.startswith("__") and name.endswith("__"))]:
        del namespace[name]
    unset = dict.fromkeys(("__spec__", "__package__", "__cached__", "__doc__"))
    namespace.pop("__file__", None)
    namespace.update(unset, __annotations__={}, **names)
    exec(code, namespace)


def exit_status(ending: SystemExit) -> int:
    """The exit status of sys.exit(code) in Python. Prints a code that is a text; of a failure it tells the monitor."""
    code = 0 if ending.code is None else ending.code
    status = code & 0xFF if isinstance(code, int) else 1
    if status != 0:
        last_words.why(code if isinstance(code, str) else f"exit status {status}", status)
    if not isinstance(code, int):
        print(code, file=sys.stderr)
    return status


def _print(error: BaseException) -> None:
    """Prints an error as torch does once a group is there: in one piece, and each line with the rank."""
    frames.shorten(error)
    launch = launcher.detect()
    prefix = "" if launch is None else f"[rank{launch.rank}]: "
    lines = "".join(traceback.format_exception(type(error), error, error.__traceback__)).splitlines(keepends=True)
    sys.stderr.write("".join(prefix + line if line.strip() else line for line in lines))


def _refusal_of_child(error: BaseException) -> str:
    """What mpicoll has refused to a process that the program has started by mp.spawn; empty: something else has failed."""
    _, name, text = last_words.cause(str(error)).partition("mpicoll.errors.LaunchError: ")
    return f"LaunchError: {text}" if name and type(error).__name__ == "ProcessRaisedException" else ""


def _own_frames(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames of this file and of runpy."""
    own = (__file__, runpy.__file__, "<frozen runpy>")
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename in own:
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    import mpicoll._launch.rank as rank  # a second copy of the functions: this namespace becomes that of the program

    rank.main(sys.argv[1:])

"""Runs one rank's program under Hydra: ``python -m mpicoll.rank script.py args...`` or ``... -m module args...``.
`mpicoll.run` writes that.

Hydra lets the job go on when a rank ends with an error before it has started MPI (a module is missing on one host,
say), and the other ranks then wait in MPI_Init for ever. Here such a rank tells Hydra to end the job with its exit
status. Open MPI's mpiexec does so by itself and needs none of this.

The program is `__main__` as ever: exec in this very module's namespace, so that pickle and multiprocessing find what
they look for."""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
import time
from types import TracebackType

LAST_WORDS_S = 0.2  # Hydra ends the job without reading on: the end of a traceback was lost in 2 of 2 runs without this


def main(words: list[str]) -> None:
    """Runs the program; ends the process as ``python words...`` would, and the job with it if MPI cannot."""
    try:
        if words[0] == "-m":
            sys.argv[:] = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv[:] = words
            _run_script(words[0])
    except SystemExit as ending:
        status = _status(ending)
        if status != 0:
            abort_job(status)
        sys.exit(status)
    except BaseException as error:  # noqa: BLE001  whatever it is, the other ranks must not wait
        # mpicoll's own hook, if MPI is started, prints and aborts; it does not return then
        error = error.with_traceback(_own_frames(error.__traceback__))
        sys.excepthook(type(error), error, error.__traceback__)
        status = 130 if isinstance(error, KeyboardInterrupt) else 1
        abort_job(status)
        sys.exit(status)


def abort_job(status: int) -> None:
    """Ends all ranks with ``status`` if Hydra started us and MPI has not been started here; returns otherwise. After
    MPI_Init, MPI's Abort is the way.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    if "PMI_FD" not in os.environ or (mpi is not None and mpi.Is_initialized()):
        return
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(LAST_WORDS_S)
    with contextlib.suppress(OSError, ValueError):  # not Hydra's pipe after all: then this rank's own end must do
        os.write(
            int(os.environ["PMI_FD"]), f"cmd=abort exitcode={status}\n".encode()
        )  # the PMI-1 protocol; needs no cmd=init before it


def _run_script(script: str) -> None:
    if not os.path.isfile(script):  # a folder or a zip archive with a __main__.py
        runpy.run_path(script, run_name="__main__")
        return
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    with open(script, "rb") as file:
        code = compile(file.read(), script, "exec", dont_inherit=True)
    namespace = sys.modules["__main__"].__dict__
    for name in [name for name in namespace if not (name.startswith("__") and name.endswith("__"))]:
        del namespace[name]
    namespace.update(
        __file__=os.path.abspath(script),
        __spec__=None,
        __package__=None,
        __cached__=None,
        __doc__=None,
        __annotations__={},
    )
    exec(code, namespace)


def _status(ending: SystemExit) -> int:
    """The exit status that Python gives to sys.exit(code), whose text it prints."""
    if ending.code is None:
        return 0
    if isinstance(ending.code, int):
        return ending.code & 0xFF
    print(ending.code, file=sys.stderr)
    return 1


def _own_frames(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames of this file and of runpy."""
    while (
        trace is not None
        and trace.tb_next is not None
        and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>")
    ):
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    import mpicoll.rank as rank  # the functions must outlive this namespace, which becomes the program's

    rank.main(sys.argv[1:])

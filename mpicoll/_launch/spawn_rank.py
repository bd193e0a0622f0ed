"""The program of a rank that `mpicoll.spawn` has started: steps [3] to [5] of `mpicoll._launch.spawn`.

`mpicoll._launch.rank` runs it. It needs no torch: the script may not.
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
import traceback
from multiprocessing import spawn as multiprocessing_spawn
from pathlib import Path

from mpicoll._base import last_words, launcher, torch_variables
from mpicoll._base.errors import LaunchError
from mpicoll._launch.rank import abort_job, exit_status

importing = False  # True while this rank imports the script: a spawn call then lacks its `if __name__` guard


def main(folder_name: str) -> None:
    """The program of each rank. After a failure it skips MPI_Finalize, which would wait for the other ranks."""
    global importing
    launch = launcher.detect()
    if launch is None:
        raise LaunchError("this rank was not started by mpiexec")
    torch_variables.provide()
    folder = Path(folder_name)
    (folder / f"pid-{launch.rank}").write_text(str(os.getpid()))
    status, returned = 0, _pickled(None)
    try:
        preparation, task = pickle.loads((folder / "task").read_bytes())
        importing = True
        multiprocessing_spawn.prepare(preparation)
        fn, args = pickle.loads(task)
        importing = False
        returned = _pickled(fn(launch.rank, *args))
    except SystemExit as ending:
        status = exit_status(ending)
    except BaseException as error:  # noqa: BLE001  the caller gets any error
        status = 1
        (folder / f"raised-{launch.rank}").write_text(traceback.format_exc(), "utf-8", "replace")
        last_words.why_error(error, status)
    if status == 0:
        (folder / f"done-{launch.rank}").write_bytes(returned)
        return
    sys.stdout.flush()
    sys.stderr.flush()
    abort_job(status)
    os._exit(status)


def _pickled(value: object) -> bytes:
    """The value and an empty text, or None and why it cannot be sent."""
    try:
        return pickle.dumps((value, ""))
    except Exception as error:  # noqa: BLE001  of the value's own methods as well
        try:
            return importlib.import_module("cloudpickle").dumps((value, ""))  # type: ignore[no-any-return]
        except Exception:  # noqa: BLE001
            return pickle.dumps((None, f"{type(error).__name__}: {error}"))

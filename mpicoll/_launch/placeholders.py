"""Open MPI without a launcher: a process becomes the rank of a placeholder, which an mpirun has started.

    rank 0 ──► mpirun -n N sh (on this host) ──► each placeholder writes down its variables, and sleeps
           ──► ``gather`` hands them out ──► MPI_Init of each process, as the rank of its placeholder

Each placeholder reads a pipe of rank 0, which ends when rank 0 ends, however that comes. Then they end, and mpirun with them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import mpicoll._launch.run as run
from mpicoll._base.errors import LaunchError
from mpicoll._base.waits import STOP_S
from mpicoll._launch.job import NOTHING_ASKED, Program
from mpicoll._launch.pmi import Gather

START_S = 60.0  # of mpirun, which takes 0.5 s; many times longer on a busy machine
PLACEHOLDER = """
exec < "$0/pipe"
file="$0/$OMPI_COMM_WORLD_RANK"
env -0 > "$file.part"
mv "$file.part" "$file"
exec cat
"""
TAKEN = ("OMPI_", "PMIX_", "PRTE_", "ORTE_")  # the beginnings of the variables by which a rank finds its mpirun


class Placeholder:
    """The placeholder of this rank: sets its variables (collective).

    Raises:
        LaunchError: There are several hosts, or mpirun could not be started.
    """

    def __init__(self, rank: int, hosts: Sequence[str], gather: Gather) -> None:
        if len(set(hosts)) > 1:
            raise LaunchError(
                "Open MPI starts ranks on several hosts by mpirun: `python -m mpicoll.run --host node1:4,node2:4 train.py`. "
                "MPICH (`pip install mpich`) starts them under any launcher"
            )
        self._mpirun: subprocess.Popen[bytes] | None = None
        self._pipe = -1
        os.register_at_fork(after_in_child=self._close)
        said = gather(json.dumps(self._start(len(hosts))) if rank == 0 else "")[0]
        variables = json.loads(said)
        if isinstance(variables, str):
            raise LaunchError(f"rank 0 could not start mpirun: {variables}")
        os.environ.update(variables[rank])

    def _start(self, size: int) -> list[dict[str, str]] | str:
        """Starts mpirun. Returns the variables of each placeholder, or what has failed."""
        folder = Path(tempfile.mkdtemp(prefix="mpicoll-placeholders-"))
        os.mkfifo(folder / "pipe")
        self._pipe = os.open(folder / "pipe", os.O_RDWR | os.O_CLOEXEC)  # to write only would wait for a reader
        try:
            environ = run.job_environ(NOTHING_ASKED)
            plan = run.make_plan([Program(("sh", "-c", PLACEHOLDER, str(folder)), size)], NOTHING_ASKED, environ)
            with (folder / "errors").open("wb") as errors:
                self._mpirun = subprocess.Popen(
                    plan.command, env=run.full_environ(plan, environ), stdin=subprocess.DEVNULL, stdout=errors, stderr=errors,
                    start_new_session=True,
                )  # fmt: skip
            files, deadline = [folder / str(rank) for rank in range(size)], time.monotonic() + START_S
            while not all(file.exists() for file in files):
                if self._mpirun.poll() is not None or time.monotonic() > deadline:
                    return (folder / "errors").read_text(errors="replace").strip() or "it did not answer"
                time.sleep(0.01)
            return [_variables(file) for file in files]
        except (LaunchError, OSError) as error:
            return str(error)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def stop(self) -> None:
        """Ends mpirun, when MPI has been finalised on all ranks."""
        self._close()
        if self._mpirun is not None:
            self._mpirun.wait(STOP_S)

    def _close(self) -> None:
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1


def _variables(file: Path) -> dict[str, str]:
    pairs = (word.partition("=") for word in file.read_text(errors="surrogateescape").split("\0"))
    return {name: value for name, _, value in pairs if name.startswith(TAKEN)}

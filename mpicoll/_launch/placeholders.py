"""Open MPI without a launcher: a process becomes the rank of a placeholder, which an mpirun has started.

    rank 0 ──► mpirun -n N sh (on this host) ──► each placeholder writes its variables, and sleeps
           ──► ``gather`` hands them out ──► MPI_Init of each process, as the rank of its placeholder

Each placeholder reads a pipe of rank 0, which ends when rank 0 ends, however that comes. Then they end, and mpirun with them. No
file is made: one would stay behind if rank 0 were killed.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterable, Sequence

import mpicoll._launch.run as run
from mpicoll._base.errors import LaunchError
from mpicoll._base.waits import STOP_S
from mpicoll._launch.job import Program
from mpicoll._launch.pmi import Gather

PLACEHOLDER = r"""
cd /proc/$0/fd && exec < $1 && { env; echo =END; } |
while IFS= read -r line; do printf '%s %s\n' "$OMPI_COMM_WORLD_RANK" "$line"; done > $2 && exec cat
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
        variables = json.loads(gather(json.dumps(self._start(len(hosts))) if rank == 0 else "")[0])
        if isinstance(variables, str):
            raise LaunchError(f"rank 0 could not start mpirun: {variables}")
        os.environ.update(variables[rank])

    def _start(self, size: int) -> list[dict[str, str]] | str:
        """Starts mpirun. Returns the variables of each placeholder, or what has failed."""
        end, pipe = os.pipe()
        self._pipe = open(pipe, "wb", 0)  # noqa: SIM115  until `stop`
        os.register_at_fork(after_in_child=self._pipe.close)
        answers, answer = os.pipe()
        program = Program(("sh", "-c", PLACEHOLDER, *map(str, (os.getpid(), end, answers))), size)
        with open(end), open(answers) as lines, tempfile.TemporaryFile("w+", errors="replace") as errors:
            try:
                with open(answer) as until_mpirun_ends:
                    plan, environ = run.prepare([program])
                    self._mpirun = subprocess.Popen(
                        plan.command, env=environ, stdin=subprocess.DEVNULL, stdout=until_mpirun_ends, stderr=errors,
                        start_new_session=True,
                    )  # fmt: skip
                return _variables(lines, size)
            except (LaunchError, OSError) as error:
                errors.seek(0)
                return errors.read().strip() or str(error)

    def stop(self) -> None:
        """Ends mpirun, when MPI has been finalised on all ranks."""
        if self._mpirun is not None:
            self._pipe.close()
            self._mpirun.wait(STOP_S)


def _variables(lines: Iterable[str], size: int) -> list[dict[str, str]]:
    """The variables of each placeholder. Each line comes in one piece: "RANK NAME=VALUE", and "RANK =END" at last."""
    found, ended = [dict[str, str]() for _ in range(size)], 0
    for line in lines:
        rank, _, pair = line.rstrip("\n").partition(" ")
        name, _, value = pair.partition("=")
        if name.startswith(TAKEN):
            found[int(rank)][name] = value
        ended += pair == "=END"  # no name is empty
        if ended == size:
            return found
    raise LaunchError("it has ended")

"""Open MPI without a launcher: a process becomes the rank of a placeholder, which an mpirun has started.

    rank 0 ──► mpirun -n N sh (on this host) ──► each placeholder, in its turn, writes its variables, and sleeps
           ──► ``gather`` hands them out ──► MPI_Init of each process, as the rank of its placeholder

Each placeholder reads a pipe of rank 0, which ends when rank 0 ends, however that comes. Then they end, and mpirun with them. No
file is made: one would stay behind if rank 0 were killed.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Sequence

import mpicoll._launch.run as run
from mpicoll._base.errors import LaunchError
from mpicoll._base.waits import STOP_S
from mpicoll._launch.job import NOTHING_ASKED, Program
from mpicoll._launch.pmi import Gather

START_S = 60.0  # of mpirun, which takes 0.5 s; many times longer on a busy machine
PLACEHOLDER = r"""cd /proc/$0/fd && exec < $1 && read -r turn < $2 && { env -0; printf '\0'; } > $3 && exec cat"""
END = b"\0\0"  # of the variables of one placeholder
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
        end, self._pipe = os.pipe()
        turns, turn = os.pipe()
        answers, of_mpirun = os.pipe()  # mpirun only holds it open: it passes on less than it gets where there are zero bytes
        try:
            environ = run.job_environ(NOTHING_ASKED)
            program = Program(("sh", "-c", PLACEHOLDER, *map(str, (os.getpid(), end, turns, answers))), size)
            plan = run.make_plan([program], NOTHING_ASKED, environ)
            with tempfile.TemporaryFile("w+", errors="replace") as errors:
                self._mpirun = subprocess.Popen(
                    plan.command, env=run.full_environ(plan, environ), stdin=subprocess.DEVNULL, stdout=of_mpirun,
                    stderr=errors, start_new_session=True,
                )  # fmt: skip
                os.close(of_mpirun)
                if (found := _read(answers, turn, size)) is None:
                    errors.seek(0)
                    return errors.read().strip() or "it did not answer"
                return found
        except (LaunchError, OSError) as error:
            return str(error)
        finally:
            for each in (end, turns, turn, answers):
                os.close(each)

    def stop(self) -> None:
        """Ends mpirun, when MPI has been finalised on all ranks."""
        self._close()
        if self._mpirun is not None:
            self._mpirun.wait(STOP_S)

    def _close(self) -> None:
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1


def _read(answers: int, turn: int, size: int) -> list[dict[str, str]] | None:
    """The variables of each placeholder; None: one has not answered."""
    said, found, deadline = b"", dict[int, dict[str, str]](), time.monotonic() + START_S
    while len(found) < size:
        os.write(turn, b"\n")  # for one of them: what several write would mix
        while END not in said:
            ready, *_ = select.select([answers], [], [], max(deadline - time.monotonic(), 0))
            more = os.read(answers, 1 << 16) if ready else b""
            if not more:  # mpirun has ended
                return None
            said += more
        block, _, said = said.partition(END)
        pairs = (word.partition("=") for word in os.fsdecode(block).split("\0"))
        variables = {name: value for name, _, value in pairs if name.startswith(TAKEN)}
        found[int(variables["OMPI_COMM_WORLD_RANK"])] = variables
    return [found[rank] for rank in range(size)]

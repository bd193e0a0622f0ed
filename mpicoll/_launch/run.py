"""``python -m mpicoll.run -n 4 train.py``: starts a program on N ranks, by the mpiexec of the MPI that mpi4py loads.

It runs the mpiexec command (`mpicoll._launch.supervisor`), which ``--verbose`` prints: the exit status is that of the rank that
failed first. Exit status 2: nothing was started; standard error says why.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mpicoll._base import open_mpi_settings, processes
from mpicoll._base.cpus import usable_cores
from mpicoll._base.errors import LaunchError
from mpicoll._base.facts import ranks_in_words
from mpicoll._base.inherited import ADDED, OWNER, without_job
from mpicoll._base.launcher import detect
from mpicoll._base.stdout import quiet_without_reader
from mpicoll._base.waits import FIRST_PAUSE_S, LONGEST_PAUSE_S, OTHER_RANKS_S
from mpicoll._launch import supervisor
from mpicoll._launch.arguments import PROG, parse
from mpicoll._launch.find import allocation
from mpicoll._launch.find.installations import find_mpi, find_mpiexec
from mpicoll._launch.job import NOTHING_ASKED, Plan, Program, Request, Site
from mpicoll._launch.plan import plan

# How a launcher that `detect` tells from others is called
OUTER_COMMANDS = {
    "openmpi": "mpirun", "mvapich": "mpirun_rsh", "pals": "mpiexec", "flux": "flux run", "hydra": "mpiexec",
    "slurm": "srun -K --mpi=...", "pmix": "prun", "jsm": "jsrun",
}  # fmt: skip


@quiet_without_reader
def main(argv: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Runs the command line and returns the exit status; 2: nothing was started. prog: the name of the command in --help."""
    try:
        request, programs = parse(sys.argv[1:] if argv is None else argv, prog)
        check_once(os.environ)
        return _supervise(programs, request)
    except BrokenPipeError:  # from --help, with Python 3.11.2 for example; later ones drop it
        raise
    except (LaunchError, ValueError, OSError) as error:
        print(f"mpicoll.run: {error}", file=sys.stderr)
        return 2


def check_once(environ: Mapping[str, str]) -> None:
    """Raises LaunchError in the first of several ranks, each of which would start a job. The others exit with status 2.

    Not in a shell of sbatch, salloc or ``srun --pty``, nor in a rank that has started MPI, which may start a job of its own.
    """
    launch = detect(environ)
    if launch is None or launch.size == 1 or OWNER in environ:
        return
    if launch.rank > 0:
        time.sleep(OTHER_RANKS_S)
        sys.exit(2)
    command = OUTER_COMMANDS[launch.launcher]
    name = command.partition(" -")[0]
    elsewhere = "by `salloc` or in a batch script without srun" if name == "srun" else f"without {name}"
    raise LaunchError(
        f"this is rank 0 of {launch.size} of {name}, and each rank would start a job; start mpicoll.run once, {elsewhere},"
        f" or start the program itself by {name}: `{command} -n {launch.size} python train.py`"
    )


def _say(text: str) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody reads it; the job goes on
        print(f"mpicoll.run: {text}", file=sys.stderr, flush=True)


def _supervise(programs: Sequence[Program], request: Request) -> int:
    """Runs mpiexec, again after a failure if the user wants that. Returns the exit status, and prints what has ended the job."""
    watch: supervisor.Supervisor | None = None
    while True:
        job_plan, environ = prepare(programs, request)  # each time with another MASTER_PORT: the old one may still be taken
        if request.dry_run:
            print(spell(job_plan))
            return 0
        notes = [] if request.quiet or request.restart else [*request.notes, *job_plan.notes]
        for text in [*notes, *([spell(job_plan)] if request.verbose else [])]:
            _say(text)
        watch = watch or supervisor.Supervisor()
        outcome = watch.run(job_plan, environ, request.grace_s)
        if _failed_by_itself(outcome, job_plan.family, request):
            _say(f"{outcome.cause}; it is started once more")
            outcome = watch.run(job_plan, environ, request.grace_s)
        if outcome.alike:
            _say(f"{ranks_in_words(outcome.alike)}: the same error, without its traceback")
        if outcome.cause:
            _say(outcome.cause)
        if outcome.alone and not request.quiet:
            _say(f"{outcome.alone} programs ran, each alone: none has called init_process_group or started MPI")
        if outcome.status == 0 or outcome.signal or request.restart == (request.max_restarts or 0):
            return outcome.status
        delay_s = min(FIRST_PAUSE_S * 2**request.restart, LONGEST_PAUSE_S)
        request = replace(request, restart=request.restart + 1)
        _say(f"restart {request.restart} of {request.max_restarts} in {delay_s:g} s")
        if number := watch.pause(delay_s):
            return 128 + number


def _failed_by_itself(outcome: supervisor.Outcome, family: str, request: Request) -> bool:
    """Whether Open MPI's mpiexec has failed before it started a rank, and not because of an option of the user.

    On a busy machine that happens now and then: prterun ends with this status and says nothing.
    """
    of_the_user = request.mpiexec_args or request.bind_to or request.map_by
    return family == "openmpi" and outcome.status == supervisor.NOT_STARTED and not outcome.begun and not of_the_user


def prepare(programs: Sequence[Program], request: Request = NOTHING_ASKED) -> tuple[Plan, dict[str, str]]:
    """The mpiexec command for ``programs``, and its environment. Raises LaunchError or ValueError; the message names the remedy.

    `ADDED` lists the additions, so that a job started by a rank can tell them from settings.
    """
    environ = _environ(request)
    mpi = find_mpi(request.mpi, environ)
    job_plan = plan(programs, mpi, find_mpiexec(mpi, environ, request.mpi), this_site(environ), request)
    added = {ADDED: "\n".join(f"{name}={value}" for name, value in job_plan.added.items())}
    return job_plan, {**environ, **job_plan.added, **added}


def _environ(request: Request) -> dict[str, str]:
    """The environment of a new job: ours without variables of a job that this process may be part of, plus -x NAME=VALUE."""
    environ = without_job(os.environ)
    if not environ.get("HOME"):
        environ["HOME"] = "/" if (home := os.path.expanduser("~")) == "~" else home  # without it Open MPI does not start
    for item in request.exported:
        name, equals, value = item.partition("=")
        if equals:
            environ[name] = value
        elif name not in environ:
            raise LaunchError(f"-x {name}: that variable is not set here; set it, or write -x {name}=VALUE")
    return environ


def spell(job_plan: Plan) -> str:
    """The plan as a command line for a shell."""
    return shlex.join(
        [*(["env"] if job_plan.added else []), *(f"{name}={value}" for name, value in job_plan.added.items()), *job_plan.command]
    )


# --- this machine -----------------------------------------------------------------------------------------------------


def this_site(environ: Mapping[str, str]) -> Site:
    """The facts about this machine that a launch depends on."""
    name = socket.gethostname()
    return Site(
        environ,
        usable_cores(),
        os.getuid(),
        tuple(dict.fromkeys((name, name.partition(".")[0]))),
        processes.free_port,
        open_mpi_settings.decided(environ),
        allocation.find(environ),
        (launch := detect(os.environ)) is not None and launch.launcher == "slurm",
    )

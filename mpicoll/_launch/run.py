"""``python -m mpicoll.run -n 4 train.py --epochs 3``: starts a program on N ranks with the mpiexec that belongs to the
MPI that mpi4py loads.

    python -m mpicoll.run [options] script.py args...                one program
    python -m mpicoll.run [options] -m package.module args...        a module, as `python -m` would
    python -m mpicoll.run -n 1 server.py : -n 3 worker.py args...    several programs, one job, with `:` between them

It prints the command that it runs and then becomes it (exec): signals reach mpiexec and its ranks, and the exit status
is mpiexec's, which is a failing rank's own on Open MPI and MPICH. Exit status 2: nothing was started; standard error
says why and what to do.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mpicoll._cpus import read, usable_cores
from mpicoll._discovery.detect import ADDED, without_job
from mpicoll._discovery.find import Mpi, Mpiexec, find_mpi, find_mpiexec
from mpicoll._launch import mpiexec_reaper
from mpicoll._launch.command_line import PROG, Options, parse
from mpicoll._launch.job import Plan, Program, Site
from mpicoll._launch.plan import plan
from mpicoll.errors import LaunchError


def main(argv: Sequence[str] | None = None, prog: str = PROG) -> int:
    """Runs the command line; returns only for --dry-run (0) and for an error (2). ``prog``: the command, for --help."""
    try:
        options, programs = parse(sys.argv[1:] if argv is None else argv, prog)
        environ = job_environ(options)
        made = make_plan(programs, options, environ)
    except (LaunchError, ValueError, OSError) as error:
        print(f"mpicoll.run: {error}", file=sys.stderr)
        return 2
    if options.dry_run:
        print(spell(made))
        return 0
    if not options.quiet:
        for note in (*options.notes, *made.notes):
            print(f"mpicoll.run: {note}", file=sys.stderr)
        print(f"mpicoll.run: {spell(made)}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    if made.family == "openmpi":
        mpiexec_reaper.start(os.getpid())
    try:
        os.execve(made.command[0], list(made.command), full_environ(made, environ))
    except OSError as error:
        print(f"mpicoll.run: cannot start {made.command[0]}: {error.strerror}", file=sys.stderr)
    return 2


def make_plan(programs: Sequence[Program], options: Options, environ: Mapping[str, str]) -> Plan:
    """The mpiexec command for ``programs``. Raises LaunchError or ValueError with the remedy."""
    mpi, mpiexec = find(options.mpi, environ)
    if options.mca and mpiexec.family != "openmpi":
        raise LaunchError(f"--mca {' '.join(options.mca[0])}: only Open MPI has these settings, and this is {mpi.vendor}")
    extra = [*options.mpiexec_args, *(word for setting in options.mca for word in ("--mca", *setting))]
    names = tuple(item.partition("=")[0] for item in options.exported)
    site = this_site(environ)
    site = replace(site, settings=site.settings | {f"OMPI_MCA_{key}" for key, _ in options.mca})
    return plan(programs, mpi, mpiexec, site, extra, names, options.request)


def find(choice: str | None, environ: Mapping[str, str]) -> tuple[Mpi, Mpiexec]:
    """The MPI of ``--mpi choice`` and its mpiexec."""
    mpi = find_mpi(choice, environ)
    return mpi, find_mpiexec(mpi, environ, choice)


def job_environ(options: Options) -> dict[str, str]:
    """The environment of a new job: ours without the traces of a job that we may be part of, and with -x NAME=VALUE."""
    environ = without_job(os.environ)
    for item in options.exported:
        name, equals, value = item.partition("=")
        if equals:
            environ[name] = value
        elif name not in environ:
            raise LaunchError(f"-x {name}: that variable is not set here; set it, or write -x {name}=VALUE")
    return environ


def full_environ(made: Plan, environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of mpiexec: what was added is marked, so that a job started by a rank does not take it for the
    user's own.
    """
    return {**environ, **made.added, ADDED: "\n".join(f"{name}={value}" for name, value in made.added.items())}


def spell(made: Plan) -> str:
    """The plan as one line that a shell would run."""
    return shlex.join(
        [*(["env"] if made.added else []), *(f"{name}={value}" for name, value in made.added.items()), *made.command]
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
        free_port,
        mca_files(environ),
    )


def free_port() -> int:
    """A TCP port that is free on this machine now; on another first host it is a guess."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def mca_files(environ: Mapping[str, str]) -> frozenset[str]:
    """The settings in the user's own Open MPI and PRRTE files, named as in the environment, which overrides them."""
    home = environ.get("HOME", "")
    found: set[str] = set()
    for folder, prefix in ((".openmpi", "OMPI_MCA_"), (".prte", "PRTE_MCA_"), (".pmix", "PMIX_MCA_")):
        text = read(os.path.join(home, folder, "mca-params.conf")) if home else ""
        found.update(prefix + name for name in re.findall(r"^\s*([A-Za-z0-9_]+)\s*=", text, re.MULTILINE))
    return frozenset(found)

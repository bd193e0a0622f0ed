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

import argparse
import os
import re
import shlex
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import mpicoll.hostfile as hostfile
import mpicoll.watch as watch
from mpicoll.cores import read, usable_cores
from mpicoll.errors import LaunchError
from mpicoll.launch_mpi import Mpi, Mpiexec, find_mpi, find_mpiexec
from mpicoll.launch_plan import Plan, Program, Site, plan
from mpicoll.launchers import ADDED, without_job

EPILOG = """examples:
  python -m mpicoll.run -n 4 train.py --epochs 3
  python -m mpicoll.run --host node1:2,node2:2 train.py
  python -m mpicoll.run --hostfile hosts.txt --nproc-per-node 8 -m mypackage.train
  python -m mpicoll.run -n 1 --host node1 server.py : -n 2 --host node2 worker.py"""


@dataclass(frozen=True)
class Options:
    """The options that hold for the whole job."""

    mpi: str | None = None
    dry_run: bool = False
    quiet: bool = False
    mpiexec_args: tuple[str, ...] = ()
    exported: tuple[str, ...] = ()  # NAME or NAME=VALUE


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns only for --dry-run (0) and for an error (2)."""
    try:
        options, programs = parse(sys.argv[1:] if argv is None else argv)
        environ = job_environ(options)
        made = make_plan(programs, options, environ)
    except (LaunchError, ValueError, OSError) as error:
        print(f"mpicoll.run: {error}", file=sys.stderr)
        return 2
    if options.dry_run:
        print(spell(made))
        return 0
    if not options.quiet:
        for note in made.notes:
            print(f"mpicoll.run: {note}", file=sys.stderr)
        print(f"mpicoll.run: {spell(made)}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    if made.family == "openmpi":
        watch.start(os.getpid())
    try:
        os.execve(made.command[0], list(made.command), full_environ(made, environ))
    except OSError as error:
        print(f"mpicoll.run: cannot start {made.command[0]}: {error.strerror}", file=sys.stderr)
    return 2


def make_plan(programs: Sequence[Program], options: Options, environ: Mapping[str, str]) -> Plan:
    """The mpiexec command for ``programs``. Raises LaunchError or ValueError with the remedy."""
    mpi, mpiexec = find(options.mpi, environ)
    names = tuple(item.partition("=")[0] for item in options.exported)
    return plan(programs, mpi, mpiexec, this_site(environ), options.mpiexec_args, names)


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


# --- the command line -------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str]) -> tuple[Options, list[Program]]:
    """Options of the job and its programs. Exits (argparse) on --help and on what it does not understand."""
    parts: list[list[str]] = [[]]
    for word in argv:
        if word == ":":
            parts.append([])
        else:
            parts[-1].append(word)
    parser = _parser()
    if any(not part for part in parts[1:]):
        parser.error("a program is missing beside a `:`")
    read = [parser.parse_args(part) for part in parts]
    first = read[0]
    for later in read[1:]:
        if (later.mpi, later.hostfile, later.dry_run, later.quiet, later.mpiexec_args, later.export) != (
            None,
            None,
            False,
            False,
            "",
            [],
        ):
            parser.error(
                "--mpi, --hostfile, --dry-run, --quiet, --mpiexec-args and -x hold for the whole job: give them before"
                " the first program"
            )
    options = Options(first.mpi, first.dry_run, first.quiet, tuple(shlex.split(first.mpiexec_args)), tuple(first.export))
    programs = [_program(parser, part) for part in read]
    if first.hostfile is not None:
        programs[0] = replace(programs[0], hosts=hostfile.read(first.hostfile))
    return options, programs


def _parser() -> argparse.ArgumentParser:
    def count(text: str) -> int:
        if not text.isdigit() or int(text) < 1:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks; use 1 or more")
        return int(text)

    parser = argparse.ArgumentParser(
        prog="python -m mpicoll.run",
        description="Starts a Python program on N ranks, with the mpiexec that belongs to the MPI that mpi4py loads.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "-n",
        "-np",
        "--nproc",
        type=count,
        metavar="N",
        dest="ranks",
        help="number of ranks; default: nproc-per-node x hosts, the places in the host list, the tasks of the Slurm "
        "job, or the usable cores",
    )
    hosts = parser.add_mutually_exclusive_group()
    hosts.add_argument(
        "--hostfile", metavar="F", help="file with a host a line: `node1 slots=2` or `node1:2`, whichever MPI runs"
    )
    hosts.add_argument("--host", "--hosts", metavar="A,B", help="hosts, with places or without: node1,node2 or node1:2,node2:2")
    parser.add_argument(
        "--nproc-per-node", "--nproc_per_node", type=count, metavar="K", dest="per_node", help="ranks on each host"
    )
    parser.add_argument("--mpi", metavar="openmpi|mpich|PATH", help="which MPI; PATH: its folder, its libmpi or its mpiexec")
    parser.add_argument(
        "--mpiexec-args",
        default="",
        metavar="WORDS",
        help="more words for mpiexec, one string: '--mca btl_tcp_if_include eth0'",
    )
    parser.add_argument(
        "-x",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        dest="export",
        help="hand this variable on to every host",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the command and do not run it")
    parser.add_argument("--quiet", action="store_true", help="do not print what is run")
    parser.add_argument("--no-python", action="store_true", help="the program is no Python script: run it as it is")
    parser.add_argument(
        "-m", action="store_true", dest="module", help="the program is a module, as in `python -m MODULE args...`"
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="script.py args...", help="the program and its arguments")
    return parser


def _program(parser: argparse.ArgumentParser, read: argparse.Namespace) -> Program:
    words = list(read.program)
    if words[:1] == ["--"]:
        words = words[1:]
    if not words:
        parser.error("-m needs the name of a module" if read.module else "no program: give script.py, or -m module")
    hosts = hostfile.parse_list(read.host) if read.host else None
    if words[0].startswith("-"):
        parser.error(f"{words[0]} is no option of mpicoll.run and no script")
    _check_exists(words, read, only_here=hosts is None and read.hostfile is None)
    if read.module:
        words = ["-m", *words]
    return Program(tuple(words), read.ranks, hosts, read.per_node, python=None if read.no_python else python())


def _check_exists(words: Sequence[str], read: argparse.Namespace, only_here: bool) -> None:
    """N ranks that each say "can't open file" are hard to read; another host may have files that this one lacks."""
    if read.no_python and only_here and shutil.which(words[0]) is None:
        raise LaunchError(f"{words[0]}: no such program in PATH or here")
    if not read.module and not read.no_python and only_here and not Path(words[0]).exists():
        raise LaunchError(f"{words[0]}: no such file in {os.getcwd()}; a module is started by -m, another program by --no-python")


def python() -> str:
    if not sys.executable:
        raise LaunchError("this Python does not know where it lies (sys.executable is empty); start it by its full path")
    return os.path.abspath(sys.executable)


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


if __name__ == "__main__":
    sys.exit(main())

"""The command line of ``python -m mpicoll.run``: options of the job, and its programs with theirs."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import mpicoll.hostfile as hostfile
from mpicoll.errors import LaunchError
from mpicoll.launch_job import Program

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

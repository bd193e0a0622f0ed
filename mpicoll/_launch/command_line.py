"""Parses the command line of ``python -m mpicoll.run``: options of the job, then programs with their options."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import mpicoll._launch.find.hostfile as hostfile
from mpicoll._base import config
from mpicoll._base.cpus import usable_cores
from mpicoll._base.errors import LaunchError
from mpicoll._base.waits import STOP_S
from mpicoll._launch.arguments import ACCEPTED, make_parser, split, unknown
from mpicoll._launch.find.installations import torch_facts
from mpicoll._launch.find.launchers import TEMPLATE
from mpicoll._launch.job import NOTHING_ASKED, Program, Request

PROG = "python -m mpicoll.run"
JOB_OPTIONS = {  # attribute of argparse's namespace -> option; allowed only before the first program
    "mpi": "--mpi", "hostfile": "--hostfile", "dry_run": "--dry-run", "quiet": "--quiet", "mpiexec_args": "--mpiexec-args",
    "export": "-x", "genv": "-genv", "mca": "--mca", "nnodes": "--nnodes", "bind_to": "--bind-to", "map_by": "--map-by",
    "tag_output": "--tag-output", "log_dir": "--log-dir", "master_addr": "--master-addr", "master_port": "--master-port",
    "backend": "--backend", "fault_tolerant": "--fault-tolerant", "grace_s": "--grace",
    "max_restarts": "--max-restarts", "oversubscribe": "--oversubscribe", "launcher": "--launcher",
}  # fmt: skip
PYTHON = re.compile(r"python(3(\.\d+)?)?")
PYTHON_FLAGS = re.compile(r"-[bBdEIOPqRsSuvx]+")  # options of the interpreter that take no value
RANKS_PER_NODE = re.compile(r"ppr:(\d+):node")


@dataclass(frozen=True)
class Options:
    """The options of the whole job. notes: sentences for the user about some of them."""

    mpi: str | None = None
    launcher: str | None = None
    template: str | None = None  # of MPICOLL_LAUNCHER_COMMAND
    dry_run: bool = False
    grace_s: float = STOP_S  # between SIGTERM and SIGKILL
    quiet: bool = False
    mpiexec_args: tuple[str, ...] = ()
    exported: tuple[str, ...] = ()  # NAME or NAME=VALUE
    mca: tuple[tuple[str, str], ...] = ()  # settings of Open MPI
    request: Request = NOTHING_ASKED
    notes: tuple[str, ...] = ()


def parse(argv: Sequence[str], prog: str = PROG) -> tuple[Options, list[Program]]:
    """Options of the job, and its programs. Exits on --help and on errors, as argparse does."""
    parts: list[list[str]] = [[]]
    for word in argv:
        if word == ":":
            parts.append([])
        else:
            parts[-1].append(word)
    parser = make_parser(prog)
    if any(not part for part in parts[1:]):
        parser.error("a program is missing beside a `:`")
    read = [_read(parser, part) for part in parts]
    _check_later(parser, read[1:])
    first = read[0]
    notes: list[str] = []
    programs = [_program(parser, part, notes) for part in read]
    if first.hostfile is not None:
        programs[0] = replace(programs[0], hosts=hostfile.read(first.hostfile))
    return _options(first, notes), programs


def _read(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    options, program = split(words)
    if program and program[0].startswith("-") and program[0] not in ("-", "--"):
        parser.error(unknown(program[0]))
    read = parser.parse_args(options)
    read.program = program
    placed = RANKS_PER_NODE.fullmatch(read.map_by or "")
    if placed is not None and read.per_node is None and int(placed[1]) > 0:
        read.per_node, read.map_by = int(placed[1]), None
    return read


def _check_later(parser: argparse.ArgumentParser, later: Iterable[argparse.Namespace]) -> None:
    unset = parser.parse_args([])
    for read in later:
        for attribute, option in JOB_OPTIONS.items():
            if getattr(read, attribute) != getattr(unset, attribute):
                parser.error(f"{option} holds for the whole job: give it before the first program")


def _options(read: argparse.Namespace, notes: Sequence[str]) -> Options:
    exported = [*read.export, *(f"{name}={value}" for name, value in read.genv)]
    variables = {"MASTER_ADDR": read.master_addr, "MASTER_PORT": read.master_port, "MPICOLL_BACKEND": read.backend}
    exported += [f"{name}={value}" for name, value in variables.items() if value]
    log_dir = None if read.log_dir is None else os.path.abspath(read.log_dir)
    tag = read.tag_output and log_dir is None
    request = Request(
        read.nnodes, read.bind_to, read.map_by, tag, log_dir, read.fault_tolerant, read.oversubscribe,
        max_restarts=read.max_restarts,
    )  # fmt: skip
    template = config.get(TEMPLATE) if read.launcher is None else None
    said = [*notes, *_accepted(read.accepted)]
    if log_dir is not None:
        tag = "; --tag-output marks lines on the terminal only" if read.tag_output else ""
        said.append(f"the output of rank R goes to {log_dir}/rank-R.log{tag}")
    return Options(
        read.mpi, read.launcher, template, read.dry_run, read.grace_s, read.quiet,
        tuple(shlex.split(read.mpiexec_args)), tuple(exported), tuple((key, value) for key, value in read.mca), request,
        tuple(said),
    )  # fmt: skip


def _accepted(options: Iterable[str]) -> list[str]:
    """A sentence for each reason why options have no effect."""
    by_reason: dict[str, list[str]] = {}
    for option in dict.fromkeys(options):
        by_reason.setdefault(ACCEPTED[option][1], []).append(option)
    return [f"{', '.join(names)}: without effect, {reason}" for reason, names in by_reason.items()]


# --- the programs -----------------------------------------------------------------------------------------------------


def _program(parser: argparse.ArgumentParser, read: argparse.Namespace, notes: list[str]) -> Program:
    words, flags = list(read.program), tuple[str, ...]()
    if words[:1] == ["--"]:
        words = words[1:]
    if not words:
        parser.error("-m needs the name of a module" if read.module else "no program: give script.py, or -m module")
    hosts = hostfile.parse_list(read.host) if read.host else None
    if words[0].startswith("-"):
        parser.error(f"{words[0]} is no option of mpicoll.run and no script")
    module = read.module
    if not module and not read.no_python and PYTHON.fullmatch(Path(words[0]).name):
        flags, module, words = drop_python(words)
    if hosts is None and read.hostfile is None:
        _check_exists(words[0], read.no_python, module)
    if module:
        words = ["-m", *words]
    interpreter = None if read.no_python else python()
    return Program(tuple(words), read.ranks, hosts, _per_node(read.per_node, notes), interpreter, flags)


def drop_python(words: Sequence[str]) -> tuple[tuple[str, ...], bool, list[str]]:
    """Splits ``python -W error -m package args...`` into options of the interpreter, whether -m follows, and the rest.

    Raises:
        LaunchError: It is another interpreter than this one, or it would not run a file or a module.
    """
    name, rest = words[0], list(words[1:])
    if "/" in name and os.path.realpath(name) != os.path.realpath(sys.executable):
        raise LaunchError(
            f"{name}: mpicoll.run starts programs with its own Python, {sys.executable}; leave {name} out, or start mpicoll.run"
            f" by it: {name} -m mpicoll.run ..."
        )
    flags: list[str] = []
    while rest and rest[0].startswith("-"):
        if rest[0] == "-m" and len(rest) > 1:
            return tuple(flags), True, rest[1:]
        if rest[0] in ("-W", "-X") and len(rest) > 1:
            flags, rest = [*flags, *rest[:2]], rest[2:]
        elif PYTHON_FLAGS.fullmatch(rest[0]) or rest[0].startswith(("-W", "-X")):
            flags, rest = [*flags, *(rest[:1] if rest[0] != "-u" else [])], rest[1:]  # -u is always added
        else:
            raise LaunchError(f"{name} {rest[0]}: only a script or a module can be started; write the program to a file")
    if not rest:
        raise LaunchError(f"{' '.join(words)}: a script or a module is missing; a Python prompt cannot run on several ranks")
    return tuple(flags), False, rest


def _check_exists(program: str, no_python: bool, module: bool) -> None:
    """Raises LaunchError for a program that is missing here. Otherwise N ranks would each print "can't open file"."""
    if no_python and shutil.which(program) is None:
        raise LaunchError(f"{program}: no such program in PATH or here")
    if not module and not no_python and not Path(program).exists():
        raise LaunchError(f"{program}: no such file in {os.getcwd()}; a module is started by -m, another program by --no-python")


def python() -> str:
    if not sys.executable:
        raise LaunchError("this Python does not know its own path (sys.executable is empty); start it by its full path")
    return os.path.abspath(sys.executable)


def _per_node(request: int | str | None, notes: list[str]) -> int | None:
    """Ranks on each node for a number, ``gpu``, ``cpu`` or ``auto``; the words refer to this node."""
    if request is None or isinstance(request, int):
        return request
    gpus = 0 if request == "cpu" else count_gpus()
    if request == "gpu" and gpus == 0:
        raise LaunchError("--nproc-per-node gpu: torch sees no GPU on this node; use cpu, auto or a number")
    ranks, unit = (gpus, "GPU") if gpus else (usable_cores(), "usable core")
    notes.append(f"--nproc-per-node {request}: {ranks}, one rank for each {unit} of this node")
    return ranks


def count_gpus() -> int:
    """Number of GPUs that torch sees, asked in a process of its own. Raises LaunchError if torch does not answer."""
    facts = torch_facts(os.environ)
    if "error" in facts:
        raise LaunchError(f"--nproc-per-node: torch does not say how many GPUs are here: {facts['error']}; give a number")
    return int(facts["accelerators"])

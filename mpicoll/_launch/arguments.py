"""The command line of ``python -m mpicoll.run``: options of the job, then programs with options of their own.

Its options, and those that users of torchrun and mpirun type:

    own                   -n, --nproc-per-node, --nnodes, --host, --hostfile, --bind-to, --map-by, --tag-output, --log-dir, ...
    accepted, no effect   `ACCEPTED`: MPI or mpicoll.run does this by itself, such as --rdzv-backend
    refused with advice   `REPLACED`: the option has another name here
    unknown               the error names the nearest known option, and --mpiexec-args

As in torchrun, long options may have underscores."""

from __future__ import annotations

import argparse
import difflib
import functools
import math
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

import mpicoll
import mpicoll._launch.find.hostfile as hostfile
from mpicoll._base import config
from mpicoll._base.cpus import usable_cores
from mpicoll._base.errors import LaunchError
from mpicoll._base.waits import STOP_S
from mpicoll._launch.find.installations import torch_facts
from mpicoll._launch.job import Program, Request

PROG = "python -m mpicoll.run"

EPILOG = """examples:
  python -m mpicoll.run -n 4 train.py --epochs 3
  python -m mpicoll.run --host node1:2,node2:2 train.py
  python -m mpicoll.run --hostfile hosts.txt --nproc-per-node 8 -m mypackage.train
  python -m mpicoll.run -n 4 --bind-to core --log-dir logs train.py
  python -m mpicoll.run --host node1:1,node2:2 -n 1 server.py : -n 2 worker.py

exit status: that of the rank that failed first (128 + N: killed by signal N), also where mpiexec returns 0; the last line on
standard error names that rank and the cause. 2: nothing was started"""

MEETING = "MPI brings the ranks together"
LOG_DIR = "use --log-dir DIR, which writes one file for each rank"
# Options of torchrun, mpirun and mpiexec that have no effect here: the reason. `FLAGS` have no value.
FLAGS = ("--standalone",)
ACCEPTED = {
    **dict.fromkeys((*FLAGS, "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf", "--local-addr"), MEETING),
    "--monitor-interval": "mpiexec watches the ranks",
    "--start-method": "mpiexec starts the ranks",
    "--role": "ranks have no roles",
    "--event-log-handler": "no events are recorded",
}
REPLACED = {  # those that have another name here
    **dict.fromkeys(("-r", "--redirects", "-t", "--tee", "--local-ranks-filter"), LOG_DIR),
    **dict.fromkeys(("-ppn", "--ppn", "-perhost", "--npernode", "-npernode"), "use -N K"),
    **dict.fromkeys(("-f", "--machinefile", "-machinefile"), "use --hostfile FILE"),
    "-genv": "use -x NAME=VALUE",
    "--numa-binding": "use --bind-to numa (or socket, core)",
    "--run-path": "give the path of the script itself",
    "--virtual-local-rank": "every rank sees all GPUs: call torch.cuda.set_device(int(os.environ['LOCAL_RANK']))",
}
LONGEST_GRACE_S = 86400
PROGRAM_OPTIONS = ("-m", "--module", "-c", "--no-python", "-h", "--help", "--version")
# What may stand before each program, named as in argparse's namespace; all else holds for the whole job.
OF_EACH_PROGRAM = ("module", "code", "no_python", "program", "ranks")
PYTHON = re.compile(r"python(3(\.\d+)?)?")
PYTHON_FLAGS = re.compile(r"-[bBdEIOPqRsSuvx]+")  # options of the interpreter that take no value


class Parser(argparse.ArgumentParser):
    """Prints an error in one line, without the list of all options."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"mpicoll.run: {message} (`{self.prog} --help` lists the options)\n")


def whole(what: str, least: int = 1, most: float = math.inf) -> Callable[[str], int]:
    """Reads a whole number. what: the end of the message about another text, such as "a port; use 1 to 65535"."""

    def read(text: str) -> int:
        if not text.isdigit() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return int(text)

    return read


def count_or_device(text: str) -> int | str:
    return text if text in ("gpu", "cpu", "auto") else whole("a number of ranks; use 1 or more, or gpu, cpu, auto")(text)


def nodes(text: str) -> int:
    """A number of nodes, or MIN:MAX as in torchrun if both are equal."""
    least, _, most = text.partition(":")
    if least.isdigit() and most.isdigit() and int(most) != int(least):
        raise argparse.ArgumentTypeError(f"{text!r}: an MPI job cannot grow or shrink; give one number of nodes")
    return whole("a number of nodes; use 1 or more")(least if not most or most.isdigit() else text)


def first_node(text: str) -> int:
    if text != "0":
        raise argparse.ArgumentTypeError(
            f"{text!r}: mpicoll.run is started once for all nodes, not once on each as torchrun; leave --node-rank out and"
            " name the nodes with --host or --hostfile"
        )
    return 0


def seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= LONGEST_GRACE_S:  # also for nan
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds; use 0 to {LONGEST_GRACE_S}")
    return number


def _add(group: Any, *names: str, **settings: Any) -> None:
    group.add_argument(*names, help=HELP[names[0]], **settings)


def make_parser(prog: str) -> Parser:
    parser = Parser(
        prog=prog,
        description="Starts a Python program on N ranks. It uses the mpiexec that belongs to the MPI that mpi4py loads.",
        usage="%(prog)s [options] script.py args...\n       %(prog)s [options] -m package.module args...\n"
        "       %(prog)s [options] -n N PROGRAM : -n N PROGRAM",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_options(parser)
    _add_accepted(parser)
    parser.add_argument("--version", action="version", version=f"mpicoll {mpicoll.__version__}", help="print the version")
    return parser


HELP = {
    "-m": "the program is a module, as in `python -m MODULE args...`",
    "-c": "the program is the word that follows, as in `python -c CODE args...`",
    "--no-python": "the program is not a Python script: run it without Python",
    "program": "the program and its arguments",
    "-n": "number of ranks; default, the first that is known: --nproc-per-node x hosts, slots in the host list, tasks of the "
    "scheduler's job, usable cores",
    "-N": "ranks on each node; gpu: one per GPU of this node; cpu: one per usable core; auto: gpu if there is a GPU, else cpu",
    "--nnodes": "use the first N nodes of the host list or of the scheduler's job",
    "--hostfile": "file with one host per line: `node1 slots=2` or `node1:2`, for either MPI",
    "-H": "hosts, with or without a number of slots: node1,node2 or node1:2,node2:2",
    "--bind-to": "bind each rank to a core, numa, ...: the words of this mpiexec; default: no binding",
    "--map-by": "place successive ranks on successive units, in the words of this mpiexec",
    "--tag-output": "begin each line of output with the rank that wrote it",
    "--log-dir": "write the output of rank R to DIR/rank-R.log on the host of that rank, and nothing to the terminal",
    "--grace": "most time between SIGTERM and SIGKILL, when a job is ended; mpiexec may kill earlier; default: 5",
    "--max-restarts": "start the job again after a failure, up to N times; the program loads its last checkpoint itself",
    "--quiet": "do not print notes, such as why there are so many ranks",
    "--verbose": "print the command that is run",
    "--dry-run": "print the command and do not run it",
    "--mpi": "the MPI to use; PATH: its folder, its libmpi or its mpiexec",
    "--mpiexec-args": "options for mpiexec, as one string: '--mca btl_tcp_if_include eth0'",
    "-x": "pass this environment variable to every host",
    "--fault-tolerant": "the job goes on when a rank dies, and the others get mpicoll.PeerLost; needs Open MPI 5",
    "--backend": "backend of init_process_group where the program names none: `mpi`, or `cpu:mpi,cuda:nccl` for MPI beside NCCL; "
    "default: that of torch",
    "--master-addr": "MASTER_ADDR of the ranks; default: the first host",
    "--master-port": "MASTER_PORT of the ranks; default: a free one",
}


def _add_options(parser: argparse.ArgumentParser) -> None:
    group: Any = parser.add_argument_group("what to run")
    _add(group, "-m", "--module", action="store_true")
    _add(group, "-c", action="store_true", dest="code")
    _add(group, "--no-python", action="store_true")
    _add(group, "program", nargs=argparse.REMAINDER, metavar="script.py args...")

    group = parser.add_argument_group("how many ranks, and where")
    _add(group, "-n", "-np", "--nproc", type=whole("a number of ranks; use 1 or more"), metavar="N", dest="ranks")
    _add(group, "-N", "--nproc-per-node", type=count_or_device, metavar="K|gpu|cpu|auto", dest="per_node")
    _add(group, "--nnodes", type=nodes, metavar="N", dest="nodes")
    hosts = group.add_mutually_exclusive_group()
    _add(hosts, "--hostfile", metavar="FILE")
    _add(hosts, "-H", "--host", metavar="A,B")
    _add(group, "--bind-to", metavar="UNIT")
    _add(group, "--map-by", metavar="UNIT")

    group = parser.add_argument_group("the end of the job")
    _add(group, "--grace", type=seconds, default=STOP_S, metavar="SECONDS", dest="grace_s")
    _add(group, "--max-restarts", type=whole("a number of restarts; use 0 or more", least=0), metavar="N")

    group = parser.add_argument_group("output")
    _add(group, "--tag-output", action="store_true")
    _add(group, "--log-dir", metavar="DIR")
    _add(group, "--quiet", action="store_true")
    _add(group, "--verbose", action="store_true")
    _add(group, "--dry-run", action="store_true")

    group = parser.add_argument_group("MPI and environment")
    _add(group, "--mpi", metavar="openmpi|mpich|PATH")
    _add(group, "--mpiexec-args", default="", metavar="OPTIONS")
    _add(group, "-x", action="append", default=[], metavar="NAME[=VALUE]", dest="export")
    _add(group, "--fault-tolerant", action="store_true")
    _add(group, "--backend", choices=config.choices("MPICOLL_BACKEND"), metavar="NAME")
    _add(group, "--master-addr", metavar="HOST")
    port = whole("a port; use 1 to 65535, or leave it out and a free one is taken", most=65535)
    _add(group, "--master-port", type=port, metavar="PORT")


def _add_accepted(parser: argparse.ArgumentParser) -> None:
    for name in ACCEPTED:
        action = "store_true" if name in FLAGS else "store"
        parser.add_argument(name, action=action, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    parser.add_argument("--node-rank", type=first_node, help=argparse.SUPPRESS)


@functools.cache
def lengths() -> dict[str, int]:
    """Number of words of each option, itself included. `PROGRAM_OPTIONS` are left out."""
    actions = make_parser("mpicoll run")._option_string_actions
    return {name: 2 if action.nargs is None else 1 for name, action in actions.items() if name not in PROGRAM_OPTIONS}


def option_length(word: str) -> int:
    """Number of words of the option ``word``, itself included: 2 for ``-n``, 1 for ``-n4``; 0: it is not a launch option."""
    word = _dashed(word)
    if word in lengths():
        return lengths()[word]
    name, equals, _ = word.partition("=")
    attached = lengths().get(word[:2]) == 2 and (word[1] not in "nN" or word[2:].isdigit())  # -nolocal is not -n
    return 1 if (equals and lengths().get(name) == 2) or attached else 0


def _dashed(word: str) -> str:
    """The word, with dashes in the name of a long option: torchrun takes ``--nproc_per_node``, too."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The options, with dashes in their names, and the program with its own arguments.

    argparse must see neither the program, whose options it would take for its own, nor an unknown option: then the second part
    begins with that option.
    """
    options, start = list[str](), 0
    while start < len(words) and words[start].startswith("-") and words[start] not in ("-", "--"):
        option = _dashed(words[start])
        length = 1 if option in PROGRAM_OPTIONS else option_length(option)
        if not length:
            break
        options += [option, *words[start + 1 : start + length]]
        start += length
    return options, list(words[start:])


def sets_ranks(words: Sequence[str]) -> bool:
    return any(word.startswith(("-n", "-N", "--nproc", "-H", "--host")) for word in words)


def unknown(option: str) -> str:
    name = option.partition("=")[0]
    dashed, known = _dashed(name), (*lengths(), *PROGRAM_OPTIONS)
    if dashed in REPLACED:
        return f"{option} is not an option of mpicoll.run: {REPLACED[dashed]}"
    near = difflib.get_close_matches("--" + dashed.lstrip("-"), known, n=1, cutoff=0.75)
    guess = f"; did you mean {near[0]}?" if near else "."
    return (
        f"{option} is not an option of mpicoll.run{guess} An option of mpiexec goes into --mpiexec-args '{name} ...',"
        " and the options of the program stand after it"
    )


# --- what was typed ----------------------------------------------------------------------------------------------------


def parse(argv: Sequence[str], prog: str = PROG) -> tuple[Request, list[Program]]:
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
    first, *later = read = [_read(parser, part) for part in parts]
    _check_later(parser, later)
    notes: list[str] = []
    request = _request(first, notes)
    return request, [_program(parser, part, request, first.log_dir, len(parts)) for part in read]


def _read(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    options, program = split(words)
    if program and program[0].startswith("-") and program[0] not in ("-", "--"):
        parser.error(unknown(program[0]))
    read = parser.parse_args(options)
    read.program = program
    return read


def _check_later(parser: argparse.ArgumentParser, later: Iterable[argparse.Namespace]) -> None:
    unset = vars(parser.parse_args([]))
    for read in map(vars, later):
        for action in parser._actions:
            name = action.dest
            if name in unset and name not in OF_EACH_PROGRAM and read[name] != unset[name]:
                parser.error(f"{action.option_strings[0]} holds for the whole job: give it before the first program")


def _request(read: argparse.Namespace, notes: list[str]) -> Request:
    variables = {"MASTER_ADDR": read.master_addr, "MASTER_PORT": read.master_port, "MPICOLL_BACKEND": read.backend}
    notes += _accepted(read)
    if read.log_dir is not None:
        tag = "; --tag-output marks lines on the terminal only" if read.tag_output else ""
        read.tag_output, read.log_dir = False, os.path.abspath(read.log_dir)
        notes.append(f"the output of rank R goes to {read.log_dir}/rank-R.log{tag}")
    read.hosts = hostfile.parse_list(read.host) if read.host else None if read.hostfile is None else hostfile.read(read.hostfile)
    read.per_node = _per_node(read.per_node, notes)
    typed = {field.name: getattr(read, field.name) for field in fields(Request) if hasattr(read, field.name)}
    typed["exported"] = (*read.export, *(f"{name}={value}" for name, value in variables.items() if value))
    typed["mpiexec_args"] = tuple(shlex.split(read.mpiexec_args))
    return Request(**typed, notes=tuple(notes))


def _accepted(read: argparse.Namespace) -> list[str]:
    """A sentence for each reason why options have no effect."""
    names = [name for name in ACCEPTED if hasattr(read, name[2:].replace("-", "_"))]
    reasons = dict.fromkeys(ACCEPTED[name] for name in names)
    return [f"{', '.join(name for name in names if ACCEPTED[name] == reason)}: without effect, {reason}" for reason in reasons]


# --- the programs -----------------------------------------------------------------------------------------------------


def _program(
    parser: argparse.ArgumentParser, read: argparse.Namespace, request: Request, log_dir: str | None, programs: int
) -> Program:
    """The program, run by `mpicoll._launch.rank`: no mpiexec says how each rank ended, or writes one plain file for each rank."""
    words, flags = list(read.program), tuple[str, ...]()
    if words[:1] == ["--"]:
        words = words[1:]
    if not words:
        missing = "-m needs the name of a module" if read.module else "-c needs the text of a program"
        parser.error(missing if read.module or read.code else "no program: give script.py, or -m module")
    if words[0].startswith("-"):
        parser.error(f"{words[0]} is no option of mpicoll.run and no script")
    if programs > 1 and read.ranks is None:
        parser.error(f"{' '.join(words)}: say how many ranks of it to start, with -n N before it")
    kind = "-m" if read.module else "-c" if read.code else ""
    if not kind and not read.no_python and PYTHON.fullmatch(Path(words[0]).name):
        flags, kind, words = drop_python(words)
    if kind == "-c" and words[0].isdigit():  # the number of ranks in some versions of mpirun
        parser.error(f"-c {words[0]}: -c takes the text of a program; use -n {words[0]} for a number of ranks")
    if request.hosts is None and not kind:
        _check_exists(words[0], read.no_python)
    to_file = [] if log_dir is None else ["--log-dir", log_dir]
    how = ["--exec"] if read.no_python else [kind] if kind else []
    # -u, as in torchrun: output does not stay in a buffer, where it is lost if the job is killed
    return Program((python(), "-u", *flags, "-m", "mpicoll._launch.rank", *to_file, *how, *words), read.ranks)


def drop_python(words: Sequence[str]) -> tuple[tuple[str, ...], str, list[str]]:
    """Splits ``python -W error -m package args...`` into options of the interpreter, -m or -c if one follows, and the rest.

    Raises:
        LaunchError: It is another interpreter than this one, or it would not run a file, a module or -c.
    """
    name, rest = words[0], list(words[1:])
    if "/" in name and os.path.realpath(name) != os.path.realpath(sys.executable):
        raise LaunchError(
            f"{name}: mpicoll.run starts programs with its own Python, {sys.executable}; leave {name} out, or start mpicoll.run"
            f" by it: {name} -m mpicoll.run ..."
        )
    flags: list[str] = []
    while rest and rest[0].startswith("-"):
        if rest[0] in ("-m", "-c") and len(rest) > 1:
            return tuple(flags), rest[0], rest[1:]
        if rest[0] in ("-W", "-X") and len(rest) > 1:
            flags, rest = [*flags, *rest[:2]], rest[2:]
        elif PYTHON_FLAGS.fullmatch(rest[0]) or rest[0].startswith(("-W", "-X")):
            flags, rest = [*flags, *(rest[:1] if rest[0] != "-u" else [])], rest[1:]  # -u is always added
        else:
            raise LaunchError(f"{name} {rest[0]}: only a script, a module or -c can be started; write the program to a file")
    if not rest:
        raise LaunchError(f"{' '.join(words)}: a script or a module is missing; a Python prompt cannot run on several ranks")
    return tuple(flags), "", rest


def _check_exists(program: str, no_python: bool) -> None:
    """Raises LaunchError for a program that is missing here. Otherwise it would be missed by N ranks."""
    if no_python and shutil.which(program) is None:
        raise LaunchError(f"{program}: no such program in PATH or here")
    if not no_python and not Path(program).exists():
        raise LaunchError(f"{program}: no such file in {os.getcwd()}; a module is started by -m, another program by --no-python")
    if not no_python and Path(program).is_dir() and not Path(program, "__main__.py").exists():
        raise LaunchError(f"{program}: a folder without a __main__.py; give the script in it")


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

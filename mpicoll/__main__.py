"""The command ``mpicoll``, which starts the same programs as ``python -m mpicoll.run`` and the like.

    mpicoll run -n 4 train.py        python -m mpicoll.run -n 4 train.py
    mpicoll doctor                   python -m mpicoll.doctor
    mpicoll doctor dump FOLDER       python -m mpicoll.doctor dump FOLDER
    mpicoll bench -n 2 all_reduce    python -m mpicoll.run -n 2 -m mpicoll.bench all_reduce
    mpicoll settings                 python -m mpicoll settings

``python -m mpicoll`` is the same command. A program is imported when it starts: ``mpicoll --version`` imports no torch.
The shell completes it by argcomplete: ``eval "$(register-python-argcomplete mpicoll)"``.  PYTHON_ARGCOMPLETE_OK
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata

import mpicoll
from mpicoll._base.stdout import quiet_without_reader

HELP = """usage: mpicoll COMMAND ...

MPI for stock PyTorch.

commands:
  run       start a Python program on N ranks:  mpicoll run -n 4 train.py
  doctor    report which MPI, torch and hardware are here, and how to repair what will not work;
            doctor dump FOLDER: where the ranks of a job diverge
  bench     measure the operations of mpicoll, Gloo and MPI:  mpicoll bench -n 2 all_reduce
  settings  the MPICOLL_* environment variables: their values here, and what they mean

options:
  -h, --help  this text; `mpicoll COMMAND --help` lists the options of a command
  --version   the versions of mpicoll, torch, mpi4py and MPI"""

BENCH_RANKS = "2"  # enough for every benchmark; one rank per core would need gigabytes on a large machine
BENCH_ALONE = ("-h", "--help")  # these start no ranks


@quiet_without_reader
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status; 2: the command line is wrong."""
    words = list(sys.argv[1:] if argv is None else argv)
    if "_ARGCOMPLETE" in os.environ:
        _complete()
    if not words or words[0] in ("-h", "--help", "help"):
        print(HELP)
        return 0
    if words[0] in ("--version", "-V"):
        print("\n".join(_versions()))
        return 0
    command = COMMANDS.get(words[0])
    if command is None:
        print(f"mpicoll: {words[0]!r} is not a command; use one of {', '.join(COMMANDS)}, or --help", file=sys.stderr)
        return 2
    return command(words[1:])


def _complete() -> None:
    """Prints, for the shell, how the line under the cursor may go on, and ends."""
    import argcomplete

    from mpicoll._launch import arguments
    from mpicoll._launch.doctor import checks
    from mpicoll.bench import options

    parser = argparse.ArgumentParser("mpicoll")
    commands = parser.add_subparsers()
    for name, make in {"run": arguments.make_parser, "doctor": checks.make_parser, "bench": options.make_parser}.items():
        commands.add_parser(name, parents=[make(f"mpicoll {name}")], add_help=False)
    commands.add_parser("settings")
    argcomplete.autocomplete(parser)


def _versions() -> Iterator[str]:
    from mpicoll._base.errors import LaunchError
    from mpicoll._launch.find.installations import find_mpi

    yield f"mpicoll {mpicoll.__version__}"
    for name in ("torch", "mpi4py"):
        try:
            yield f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            yield f"{name}: not installed"
    try:
        yield str(find_mpi(None, os.environ))
    except LaunchError:
        yield "MPI: none that mpi4py can load; `mpicoll doctor` says why"


def _run(words: list[str]) -> int:
    from mpicoll._launch.run import main

    return main(words, prog="mpicoll run")


def _doctor(words: list[str]) -> int:
    from mpicoll._launch.doctor.checks import main

    return main(words, prog="mpicoll doctor")


def _settings(words: list[str]) -> int:
    from mpicoll._base.config import described

    argparse.ArgumentParser("mpicoll settings", description="Prints the settings, with their values here.").parse_args(words)
    print("\n".join(described(shutil.get_terminal_size().columns)))
    return 0


def _bench(words: list[str]) -> int:
    """Measures in this process if it is a rank; otherwise starts the ranks."""
    from mpicoll._base.launcher import detect

    launcher_words, bench_words = split_bench(words)
    if detect() is not None or set(bench_words) & set(BENCH_ALONE):
        if launcher_words:
            options = " ".join(launcher_words)
            print(f"mpicoll bench: {options} is an option for starting ranks, and none are started here", file=sys.stderr)
            return 2
        from mpicoll.bench.__main__ import main

        return main(bench_words, "mpicoll bench")
    from mpicoll.bench.options import parsed

    parsed(bench_words, "mpicoll bench")  # exits if something is wrong
    return _run(bench_command(launcher_words, bench_words))


def bench_command(launcher_words: Sequence[str], bench_words: Sequence[str]) -> list[str]:
    from mpicoll._launch.arguments import sets_ranks

    count = () if sets_ranks(launcher_words) else ("-n", BENCH_RANKS)
    return [*launcher_words, *count, "-m", "mpicoll.bench", *bench_words]


def split_bench(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits the words of ``mpicoll bench`` into options of ``mpicoll run`` and the benchmark with its options."""
    from mpicoll._launch.arguments import option_length

    launcher, bench, start = list[str](), list[str](), 0
    while start < len(words):
        length = option_length(words[start])
        (launcher if length else bench).extend(words[start : start + max(length, 1)])
        start += max(length, 1)
    return launcher, bench


COMMANDS: dict[str, Callable[[list[str]], int]] = {"run": _run, "doctor": _doctor, "bench": _bench, "settings": _settings}

if __name__ == "__main__":
    sys.exit(main())

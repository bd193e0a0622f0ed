"""The command ``mpicoll``, which starts the same programs as ``python -m mpicoll.run`` and the like.

    mpicoll run -n 4 train.py        python -m mpicoll.run -n 4 train.py
    mpicoll doctor                   python -m mpicoll.doctor
    mpicoll doctor dump FOLDER       python -m mpicoll.doctor dump FOLDER
    mpicoll bench -n 2 all_reduce    python -m mpicoll.run -n 2 -m mpicoll.bench all_reduce
    mpicoll settings                 python -m mpicoll settings

``python -m mpicoll`` is the same command. A program is imported when it starts: ``mpicoll --version`` imports no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import mpicoll
from mpicoll._base.stdout import quiet_without_reader

HELP = """usage: mpicoll COMMAND ...

MPI for stock PyTorch.

commands:
  run       start a Python program on N ranks:  mpicoll run -n 4 train.py
  doctor    report which MPI, torch and hardware are here, and how to repair what will not work;
            doctor dump FOLDER: where the ranks of a job diverge
  bench     measure the operations of mpicoll, Gloo and MPI:  mpicoll bench -n 2 all_reduce
  settings  print the MPICOLL_* environment variables

options:
  -h, --help  this text; `mpicoll COMMAND --help` lists the options of a command
  --version   the version of mpicoll"""

BENCH_RANKS = "2"  # enough for every benchmark; one rank per core would need gigabytes on a large machine
BENCH_ALONE = ("-h", "--help")  # these start no ranks


@quiet_without_reader
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status; 2: the command line is wrong."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(HELP)
        return 0
    if words[0] in ("--version", "-V"):
        print(f"mpicoll {mpicoll.__version__}")
        return 0
    command = COMMANDS.get(words[0])
    if command is None:
        print(f"mpicoll: {words[0]!r} is not a command; use one of {', '.join(COMMANDS)}, or --help", file=sys.stderr)
        return 2
    return command(words[1:])


def _run(words: list[str]) -> int:
    from mpicoll._launch.run import main

    return main(words, prog="mpicoll run")


def _doctor(words: list[str]) -> int:
    from mpicoll._launch.doctor.checks import main

    return main(words, prog="mpicoll doctor")


def _settings(words: list[str]) -> int:
    from mpicoll._base.config import table

    if words:
        print(f"mpicoll settings: takes no arguments, got {' '.join(words)}", file=sys.stderr)
        return 2
    print(table())
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

        return main(bench_words)
    if bench_words and not bench_words[0].startswith("-"):
        from mpicoll.bench.options import make_parser

        make_parser(None).parse_args(bench_words[:1])  # exits if there is no such benchmark
    return _run(bench_command(launcher_words, bench_words))


def bench_command(launcher_words: Sequence[str], bench_words: Sequence[str]) -> list[str]:
    from mpicoll._launch.arguments import sets_ranks

    count = () if sets_ranks(launcher_words) else ("-n", BENCH_RANKS)
    return [*launcher_words, *count, "-m", "mpicoll.bench", *bench_words]


def split_bench(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits the words of ``mpicoll bench`` into options of ``mpicoll run`` and the benchmark with its options."""
    from mpicoll._launch.arguments import option_length

    end = 0
    while end < len(words) and (length := option_length(words[end])):
        end += length
    return list(words[:end]), list(words[end:])


COMMANDS: dict[str, Callable[[list[str]], int]] = {"run": _run, "doctor": _doctor, "bench": _bench, "settings": _settings}

if __name__ == "__main__":
    sys.exit(main())

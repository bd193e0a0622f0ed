"""What can be measured, for ``--help``. Loads neither torch nor MPI."""

from __future__ import annotations

import argparse
import time
from typing import IO, Any, NoReturn

from mpicoll._base import launcher

LAST_WORDS_S = 1.0  # other ranks exit later than rank 0; otherwise its error message could be lost with the job
HELP: dict[str, str | None] = {
    "all_reduce": "a collective: the mpicoll API, the torch backend, Gloo, mpi4py on NumPy memory",
    **dict.fromkeys(
        (
            "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "gather", "scatter", "reduce_scatter",
            "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "barrier",
        )
    ),
    "latency": "messages: half a round trip",
    "exchange": "messages: isend, irecv and both waits, between two ranks",
    "bandwidth": "messages: 64 in flight",
    "tune": "find the sizes from which mpicoll's algorithms are faster than MPI's here; writes a table for MPICOLL_TUNING",
}  # fmt: skip


class Parser(argparse.ArgumentParser):
    """Prints on rank 0 only."""

    def _print_message(self, message: str, file: IO[str] | None = None) -> None:  # type: ignore[override]
        if rank() == 0:
            super()._print_message(message, file)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        if rank() != 0 and status:
            time.sleep(LAST_WORDS_S)
        super().exit(status, message)


def rank() -> int:
    """The rank of this process, before MPI has started."""
    launch = launcher.detect()
    return launch.rank if launch is not None else 0


def make_parser(description: str | None, listed: bool = True) -> tuple[Parser, Any]:
    """The parser and its subparsers: those of `HELP` without options, which is enough for ``--help``, or none."""
    parser = Parser(prog="python -m mpicoll.bench", description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    for what, text in HELP.items() if listed else ():
        commands.add_parser(what, help=text)
    return parser, commands

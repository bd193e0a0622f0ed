"""The command line: read, and refused in one line, before anything starts; rank 0 alone speaks."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NoReturn

import torch

from mpicoll._cuda import streams
from mpicoll._discovery import detect
from mpicoll.bench import arguments, ddp, formulas, patterns, plot, tune
from mpicoll.bench.formulas import EMPTY, REDUCTIONS
from mpicoll.bench.messages import MESSAGES
from mpicoll.bench.model import command as model_command
from mpicoll.bench.operations import COLLECTIVES
from mpicoll.bench.row import API, BACKEND, GLOO, NCCL, RAW

KIB, MIB = 1 << 10, 1 << 20
SIZES = [4, 8, 64, 256, KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB]
MOST = {"latency": 64 * MIB, "bandwidth": 4 * MIB}  # by default; a call of bandwidth moves 64 times as much
QUICK_SIZES = [8, 64 * KIB]
OWN_SIZES = {"rpc": [4 * KIB, MIB, 64 * MIB], "overlap": [16 * MIB, 4 * MIB, 64 * MIB], "ddp": list(ddp.SIDES)}
WAYS = {"mpicoll": API, "torch": BACKEND, "gloo": GLOO, "nccl": NCCL, "mpi4py": RAW}
PLOT = "bench.svg"  # of `all`, where nothing else is said
LAST_WORDS_S = 1.0  # other ranks leave so much later than rank 0, whose words would be lost with the job


class Parser(argparse.ArgumentParser):
    """Speaks on rank 0 alone."""

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
    """This process's, before MPI has started."""
    launch = detect.detect()
    return launch.rank if launch is not None else 0


def parser(description: str) -> Parser:
    made = Parser(prog="python -m mpicoll.bench", description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = made.add_subparsers(dest="what", metavar="WHAT", required=True)
    common = Parser(add_help=False)
    common.add_argument(
        "--repeat",
        type=arguments.count,
        metavar="N",
        help="rounds, each of every way in turn; default 15 (all, check: 9; startup: 5), less for what takes long",
    )
    common.add_argument("--quick", action="store_true", help="few and short rounds, small sizes: does it work?")
    files = Parser(add_help=False)
    files.add_argument("--json", metavar="FILE", help="everything, every round's time")
    files.add_argument("--csv", metavar="FILE", help="a line for each row and way")
    files.add_argument(
        "--plot",
        metavar="FILE.svg",
        help="a picture: one operation over size, or several compared with Gloo and MPI (needs matplotlib)",
    )
    sizes = Parser(add_help=False)
    sizes.add_argument("--sizes", "--bytes", type=arguments.size, nargs="+", metavar="S", help="8 64KiB 1MiB ...")
    kinds = Parser(add_help=False)
    kinds.add_argument("--dtypes", type=arguments.dtype, nargs="+", default=["float32"], metavar="D", help="float32 bfloat16 ...")
    ways = Parser(add_help=False)
    ways.add_argument("--impl", dest="ways", nargs="+", choices=list(WAYS), metavar="I", help=f"of {' '.join(WAYS)}; default all")
    ways.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where the tensors are; default cpu")
    for what in [*COLLECTIVES, *MESSAGES]:
        parents = [common, files, ways] if what in EMPTY else [common, files, ways, sizes, kinds]
        command = commands.add_parser(what, parents=parents, help=_HELP.get(what))
        if what in REDUCTIONS:
            command.add_argument("--ops", nargs="+", default=["SUM"], choices=patterns.OPS, metavar="OP", help="SUM AVG MAX ...")
    commands.add_parser("overlap", parents=[common, files, sizes], help=_HELP["overlap"])
    commands.add_parser("ddp", parents=[common, files, sizes], help=_HELP["ddp"])
    startup = commands.add_parser("startup", parents=[common, files], help=_HELP["startup"])
    startup.add_argument("--ranks", type=arguments.count, default=4, metavar="N", help="of the jobs that it starts; default 4")
    rpc = commands.add_parser("rpc", parents=[common, sizes], help=_HELP["rpc"])
    rpc.add_argument("--width", type=int, default=64, help="of the network; 64 is ResNet50, less is quicker")
    everything = commands.add_parser("all", parents=[common, files], help=_HELP["all"])
    everything.add_argument("--markdown", action="store_true", help="the table of targets in Markdown")
    commands.add_parser("check", parents=[common, files], help=_HELP["check"])
    tune.add_arguments(commands.add_parser("tune", parents=[common, files], help=_HELP["tune"]))
    model_command.add_arguments(commands.add_parser("model", help=_HELP["model"]))
    return made


_HELP = {
    "all_reduce": "one for each collective: the mpicoll API, the torch backend, Gloo, mpi4py on NumPy memory",
    "latency": "messages: half of a round trip",
    "bandwidth": "messages: 64 under way at once",
    "overlap": "how much of an all_reduce hides behind a matmul",
    "ddp": "a step of DistributedDataParallel, beside Gloo's",
    "startup": "import, init_process_group, first collective, beside Gloo's; starts jobs of its own",
    "all": "what the table of targets needs, and the table; some minutes",
    "check": "a few ratios beside their limits; exit status 1 if one is over; less than a minute",
    "tune": "from which sizes shared memory is faster than MPI here: writes a table for MPICOLL_TUNING",
    "model": "what each algorithm would cost on another machine; measures nothing",
    "rpc": "RPC, compared with torch.distributed.rpc (TensorPipe)",
}


def read(arguments: Sequence[str] | None, description: str) -> argparse.Namespace:
    """Exits with status 2 for what cannot be measured."""
    made = parser(description)
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or (words[0].startswith("-") and words[0] not in ("-h", "--help")):
        words = ["all_reduce", *words]
    found = made.parse_args(words)
    if hasattr(found, "device"):
        _check_device(made, found)
    if getattr(found, "sizes", None) is None:
        found.sizes = _sizes(found)
    else:
        _check_sizes(made, found)
    if found.what == "all" and found.plot is None and not found.quick and plot.available():
        found.plot = PLOT
    _check_files(made, found)
    return found


def _check_device(made: Parser, found: argparse.Namespace) -> None:
    if found.device == "cuda" and not streams.available():
        made.error("--device cuda: torch sees no GPU here")
    if found.device == "cpu" and "nccl" in (found.ways or []):
        made.error("--impl nccl: NCCL takes a GPU's tensors only, with --device cuda")
    found.ways = found.ways or [way for way in WAYS if way != "nccl" or found.device == "cuda"]


def _sizes(found: argparse.Namespace) -> list[int]:
    """Where none are given."""
    if found.what in OWN_SIZES:
        return OWN_SIZES[found.what][: 1 if found.quick else None]
    widest = max(getattr(torch, dtype).itemsize for dtype in getattr(found, "dtypes", ["float32"]))
    sizes = QUICK_SIZES if found.quick else [size for size in SIZES if size <= MOST.get(found.what, SIZES[-1])]
    return [size for size in sizes if size % widest == 0]


def _check_sizes(made: Parser, found: argparse.Namespace) -> None:
    for dtype in getattr(found, "dtypes", ["float32"]):
        itemsize = getattr(torch, dtype).itemsize
        for size in found.sizes:
            if size % itemsize:
                made.error(f"--sizes {size}: sizes of {dtype} tensors are multiples of {itemsize}")
    if found.what == "ddp" and not set(found.sizes) <= set(OWN_SIZES["ddp"]):
        made.error("--sizes of ddp are out of " + " ".join(formulas.spell(size).replace(" ", "") for size in OWN_SIZES["ddp"]))


def _check_files(made: Parser, found: argparse.Namespace) -> None:
    for option in ("json", "csv", "plot", "out"):
        file = getattr(found, option, None)
        if file is not None and not Path(file).absolute().parent.is_dir():
            made.error(f"--{option} {file}: there is no such folder")
    if getattr(found, "plot", None) is not None and not plot.available():
        made.error(plot.REMEDY)

"""The command line. Errors are args before anything starts, and only rank 0 prints them, in one line."""

from __future__ import annotations

import argparse
import math
from argparse import ArgumentTypeError
from collections.abc import Sequence
from pathlib import Path

import torch

from mpicoll._device import streams
from mpicoll.bench import formulas, overview, patterns, tune
from mpicoll.bench.formulas import EMPTY, REDUCTIONS
from mpicoll.bench.messages import MESSAGES
from mpicoll.bench.operations import COLLECTIVES
from mpicoll.bench.overview import HELP, Parser
from mpicoll.bench.row import API, BACKEND, GLOO, NCCL, RAW

KIB, MIB = 1 << 10, 1 << 20
SIZES = [4, 8, 64, 256, KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB]
# Largest default sizes. A call of bandwidth moves 64 times as much.
MOST = {"latency": 64 * MIB, "exchange": 64 * MIB, "bandwidth": 4 * MIB}
QUICK_SIZES = [8, 64 * KIB]
WAYS = {"mpicoll": API, "torch": BACKEND, "gloo": GLOO, "nccl": NCCL, "mpi4py": RAW}


def make_parser(description: str) -> Parser:
    parser, commands = overview.make_parser(description, listed=False)
    common = Parser(add_help=False)
    common.add_argument(
        "--repeat",
        type=count,
        metavar="N",
        help="rounds, each of all implementations in turn; default 15 (tune: 7), fewer for slow operations",
    )
    common.add_argument("--quick", action="store_true", help="a quick test: few and short rounds, small sizes")
    common.add_argument("--json", metavar="FILE", help="write all figures, with the time of every round")
    common.add_argument("--csv", metavar="FILE", help="write a line for each row and implementation")
    sizes = Parser(add_help=False)
    sizes.add_argument("--sizes", "--bytes", type=size, nargs="+", metavar="S", help="8 64KiB 1MiB ...")
    kinds = Parser(add_help=False)
    kinds.add_argument("--dtypes", type=dtype, nargs="+", default=["float32"], metavar="D", help="float32 bfloat16 ...")
    ways = Parser(add_help=False)
    ways.add_argument(
        "--impl", dest="ways", nargs="+", choices=list(WAYS), metavar="I", help=f"implementations: {' '.join(WAYS)}; default all"
    )
    ways.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where the tensors are; default cpu")
    for what in [*COLLECTIVES, *MESSAGES]:
        parents = [common, ways] if what in EMPTY else [common, ways, sizes, kinds]
        command = commands.add_parser(what, parents=parents, help=HELP.get(what))
        if what in COLLECTIVES:
            command.add_argument(
                "--bandwidth",
                type=positive,
                metavar="GB/s",
                help="bandwidth of the network card of a node in each direction: adds the column of the bandwidth limit",
            )
        if what in REDUCTIONS:
            command.add_argument("--ops", nargs="+", default=["SUM"], choices=patterns.OPS, metavar="OP", help="SUM AVG MAX ...")
    tuning = commands.add_parser("tune", parents=[common], help=HELP["tune"])
    tuning.add_argument("--out", metavar="FILE", default=tune.FILE, help=f"file to write; default {tune.FILE}")
    return parser


def read(words: Sequence[str], description: str) -> argparse.Namespace:
    """The parsed command line. Exits with status 2 if it asks for something that cannot be measured."""
    parser = make_parser(description)
    if not words or words[0].startswith("-"):
        words = ["all_reduce", *words]
    args = parser.parse_args(words)
    if hasattr(args, "device"):
        _check_device(parser, args)
    if getattr(args, "sizes", None) is None:
        args.sizes = _sizes(args)
    else:
        _check_sizes(parser, args)
    _check_files(parser, args)
    return args


def _check_device(parser: Parser, args: argparse.Namespace) -> None:
    if args.device == "cuda" and not streams.available():
        parser.error("--device cuda: torch sees no GPU here")
    if args.device == "cpu" and "nccl" in (args.ways or []):
        parser.error("--impl nccl: NCCL takes a GPU's tensors only, with --device cuda")
    args.ways = args.ways or [way for way in WAYS if way != "nccl" or args.device == "cuda"]


def _sizes(args: argparse.Namespace) -> list[int]:
    """The default sizes."""
    widest = max(getattr(torch, dtype).itemsize for dtype in getattr(args, "dtypes", ["float32"]))
    sizes = QUICK_SIZES if args.quick else [size for size in SIZES if size <= MOST.get(args.what, SIZES[-1])]
    return [size for size in sizes if size % widest == 0]


def _check_sizes(parser: Parser, args: argparse.Namespace) -> None:
    for dtype in getattr(args, "dtypes", ["float32"]):
        itemsize = getattr(torch, dtype).itemsize
        for size in args.sizes:
            if size % itemsize:
                parser.error(f"--sizes {size}: sizes of {dtype} tensors are multiples of {itemsize}")


def _check_files(parser: Parser, args: argparse.Namespace) -> None:
    for option in ("json", "csv", "out"):
        file = getattr(args, option, None)
        if file is not None and not Path(file).absolute().parent.is_dir():
            parser.error(f"--{option} {file}: there is no such folder")


def count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r}: 1 or more")
    return int(text)


def size(text: str) -> int:
    """In bytes."""
    try:
        nbytes = formulas.parse(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None
    if nbytes < 1:
        raise ArgumentTypeError(f"{text!r}: a size is 1 byte or more")
    return nbytes


def positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is no number") from None
    if not 0 < value < math.inf:
        raise ArgumentTypeError(f"{text!r}: a finite number, more than 0")
    return value


def dtype(text: str) -> str:
    if not isinstance(getattr(torch, text, None), torch.dtype):
        raise ArgumentTypeError(f"{text!r} is no dtype of torch: write float32, bfloat16, int64")
    return str(getattr(torch, text)).removeprefix("torch.")

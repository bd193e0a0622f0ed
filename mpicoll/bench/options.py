"""The command line. Errors are args before anything starts, and only rank 0 prints them, in one line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from mpicoll._cuda import streams
from mpicoll.bench import arguments, formulas, overview, patterns, plot, steps, tune
from mpicoll.bench.formulas import EMPTY, REDUCTIONS
from mpicoll.bench.messages import MESSAGES
from mpicoll.bench.operations import COLLECTIVES
from mpicoll.bench.overview import HELP, Parser
from mpicoll.bench.row import API, BACKEND, GLOO, NCCL, RAW
from mpicoll.bench.steps.models import SIDES

KIB, MIB = 1 << 10, 1 << 20
SIZES = [4, 8, 64, 256, KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB]
# Largest default sizes. A call of bandwidth moves 64 times as much.
MOST = {"latency": 64 * MIB, "exchange": 64 * MIB, "bandwidth": 4 * MIB}
QUICK_SIZES = [8, 64 * KIB]
OWN_SIZES = {"rpc": [4 * KIB, MIB, 64 * MIB], "overlap": [16 * MIB, 4 * MIB, 64 * MIB], "ddp": list(SIDES)}
WAYS = {"mpicoll": API, "torch": BACKEND, "gloo": GLOO, "nccl": NCCL, "mpi4py": RAW}
PLOT = "bench.svg"  # default of `all`


def make_parser(description: str) -> Parser:
    parser, commands = overview.make_parser(description, listed=False)
    common = Parser(add_help=False)
    common.add_argument(
        "--repeat",
        type=arguments.count,
        metavar="N",
        help="rounds, each of all implementations in turn; default 15 (all, check: 9; startup: 5), fewer for slow operations",
    )
    common.add_argument("--quick", action="store_true", help="a quick test: few and short rounds, small sizes")
    files = Parser(add_help=False)
    files.add_argument("--json", metavar="FILE", help="write all figures, with the time of every round")
    files.add_argument("--csv", metavar="FILE", help="write a line for each row and implementation")
    files.add_argument(
        "--plot",
        metavar="FILE.svg",
        help="draw one operation over size, or several compared with Gloo and MPI (needs matplotlib)",
    )
    sizes = Parser(add_help=False)
    sizes.add_argument("--sizes", "--bytes", type=arguments.size, nargs="+", metavar="S", help="8 64KiB 1MiB ...")
    kinds = Parser(add_help=False)
    kinds.add_argument("--dtypes", type=arguments.dtype, nargs="+", default=["float32"], metavar="D", help="float32 bfloat16 ...")
    ways = Parser(add_help=False)
    ways.add_argument(
        "--impl", dest="ways", nargs="+", choices=list(WAYS), metavar="I", help=f"implementations: {' '.join(WAYS)}; default all"
    )
    ways.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where the tensors are; default cpu")
    for what in [*COLLECTIVES, *MESSAGES]:
        parents = [common, files, ways] if what in EMPTY else [common, files, ways, sizes, kinds]
        command = commands.add_parser(what, parents=parents, help=HELP.get(what))
        if what in COLLECTIVES:
            command.add_argument(
                "--bandwidth",
                type=arguments.bandwidth,
                metavar="GB/s",
                help="bandwidth of the network card of a node in each direction, or `measure`, by one stream of messages: adds "
                "the column of the bandwidth limit",
            )
        if what in REDUCTIONS:
            command.add_argument("--ops", nargs="+", default=["SUM"], choices=patterns.OPS, metavar="OP", help="SUM AVG MAX ...")
    rest = {
        "overlap": [common, files, sizes],
        "step": [common, files],
        "ddp": [common, files, sizes],
        "rpc": [common, sizes],
        "ranks": [],
        "summary": [],
    }
    rest |= {what: [common, files] for what in ("startup", "all", "check", "tune")}
    parsers = {what: commands.add_parser(what, parents=rest[what], help=HELP[what]) for what in HELP if what in rest}
    parsers["step"].add_argument(
        "--rows", nargs="+", choices=steps.NAMES, default=steps.NAMES, metavar="ROW", help=f"{' '.join(steps.NAMES)}; default all"
    )
    parsers["startup"].add_argument(
        "--ranks", type=arguments.count, default=4, metavar="N", help="ranks of the jobs that it starts; default 4"
    )
    parsers["ranks"].add_argument(
        "--ranks",
        type=arguments.count,
        nargs="+",
        default=[2, 4, 8, 16, 32],
        metavar="N",
        help="of the jobs; default 2 4 8 16 32",
    )
    parsers["rpc"].add_argument("--width", type=int, default=64, help="width of the network; 64 is ResNet50, less is faster")
    parsers["all"].add_argument("--markdown", action="store_true", help="print the table of targets in Markdown")
    parsers["tune"].add_argument("--out", metavar="FILE", default=tune.FILE, help=f"file to write; default {tune.FILE}")
    parsers["summary"].add_argument("runs", nargs="+", metavar="FILE.json", help="written by all --json or step --json")
    parsers["summary"].add_argument("--markdown", action="store_true", help="print the tables in Markdown")
    return parser


def read(words: Sequence[str], description: str) -> argparse.Namespace:
    """The parsed command line. Exits with status 2 if it asks for something that cannot be measured."""
    parser = make_parser(description)
    if not words or words[0].startswith("-"):
        words = ["all_reduce", *words]
    args = parser.parse_args(words)
    if args.what in ("ranks", "summary"):
        return args
    if hasattr(args, "device"):
        _check_device(parser, args)
    if getattr(args, "sizes", None) is None:
        args.sizes = _sizes(args)
    else:
        _check_sizes(parser, args)
    if args.what == "all" and args.plot is None and not args.quick and plot.available():
        args.plot = PLOT
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
    if args.what in OWN_SIZES:
        return OWN_SIZES[args.what][: 1 if args.quick else None]
    widest = max(getattr(torch, dtype).itemsize for dtype in getattr(args, "dtypes", ["float32"]))
    sizes = QUICK_SIZES if args.quick else [size for size in SIZES if size <= MOST.get(args.what, SIZES[-1])]
    return [size for size in sizes if size % widest == 0]


def _check_sizes(parser: Parser, args: argparse.Namespace) -> None:
    for dtype in getattr(args, "dtypes", ["float32"]):
        itemsize = getattr(torch, dtype).itemsize
        for size in args.sizes:
            if size % itemsize:
                parser.error(f"--sizes {size}: sizes of {dtype} tensors are multiples of {itemsize}")
    if args.what == "ddp" and not set(args.sizes) <= set(OWN_SIZES["ddp"]):
        parser.error("--sizes of ddp are out of " + " ".join(formulas.spell(size).replace(" ", "") for size in OWN_SIZES["ddp"]))


def _check_files(parser: Parser, args: argparse.Namespace) -> None:
    for option in ("json", "csv", "plot", "out"):
        file = getattr(args, option, None)
        if file is not None and not Path(file).absolute().parent.is_dir():
            parser.error(f"--{option} {file}: there is no such folder")
    if getattr(args, "plot", None) is not None and not plot.available():
        parser.error(plot.REMEDY)

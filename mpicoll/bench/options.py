"""The command line. Errors are found before anything starts, and only rank 0 prints them, in one line.

``--help`` needs neither torch nor MPI: they are loaded only where their names are checked.
"""

from __future__ import annotations

import argparse
import time
from argparse import ArgumentTypeError
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NoReturn

from mpicoll._base import launcher
from mpicoll.bench import formulas
from mpicoll.bench.formulas import EMPTY, OPS, REDUCTIONS
from mpicoll.bench.row import API, BACKEND, GLOO, NCCL, RAW

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
KIB, MIB = 1 << 10, 1 << 20
SIZES = [4, 8, 64, 256, KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB]
# Largest default sizes. A call of bandwidth moves 64 times as much.
MOST = {"latency": 64 * MIB, "exchange": 64 * MIB, "bandwidth": 4 * MIB}
QUICK_SIZES = [8, 64 * KIB]
WAYS = {"mpicoll": API, "torch": BACKEND, "gloo": GLOO, "nccl": NCCL, "mpi4py": RAW}
TUNING_FILE = "mpicoll-tuning.json"
OF_ALL = ("repeat", "quick", "threads", "json")  # options that each benchmark has


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


def make_parser(prog: str = "mpicoll bench", description: str | None = None) -> Parser:
    listed = [f"    {what:24}{text or ''}".rstrip() for what, text in HELP.items()]
    text = "\n".join([*([description] if description else []), "WHAT, one of:", *listed])
    parser = Parser(prog=prog, description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("what", nargs="?", default="all_reduce", choices=list(HELP), metavar="WHAT", help="what to measure; default all_reduce")
    add("--sizes", "--bytes", type=size, nargs="+", metavar="S", help="8 64KiB 1MiB ...")
    add("--dtypes", type=dtype, nargs="+", metavar="D", help="float32 bfloat16 ...")
    add("--ops", nargs="+", choices=OPS, metavar="OP", help="SUM AVG MAX ...")
    implementations = f"implementations: {' '.join(WAYS)}; default all"
    add("--impl", nargs="+", choices=list(WAYS), metavar="I", help=implementations)
    add("--device", choices=["cpu", "cuda"], help="where the tensors are; default cpu")
    rounds = "rounds, each of all implementations in turn; default 15 (tune: 7), fewer for slow operations"
    add("--repeat", type=count, metavar="N", help=rounds)
    add("--quick", action="store_true", help="a quick test: few and short rounds, small sizes")
    add("--threads", type=count, default=1, metavar="T", help="threads of torch in each rank; default 1")
    add("--json", metavar="FILE", help="write all figures, with the time of every round")
    add("--out", metavar="FILE", help=f"file to write; default {TUNING_FILE}")
    return parser


def takes(what: str, option: str) -> bool:
    """Whether this benchmark has this option."""
    if option == "out" or what == "tune":
        return (option == "out") == (what == "tune") or option in OF_ALL
    return what in REDUCTIONS if option == "ops" else what not in EMPTY or option not in ("sizes", "dtypes")


def parsed(words: Sequence[str], prog: str, description: str | None = None) -> tuple[Parser, argparse.Namespace]:
    """The command line. Exits with status 2 if it is wrong; what needs torch or MPI is not checked."""
    parser = make_parser(prog, description)
    args = parser.parse_args(words)
    for option, value in vars(args).items():
        if option != "what" and value is not None and not takes(args.what, option):
            parser.error(f"{args.what} has no option --{option}")
    _check_files(parser, args)
    return parser, args


def read(words: Sequence[str], prog: str = "python -m mpicoll.bench") -> argparse.Namespace:
    """The parsed command line. Exits with status 2 if it asks for something that cannot be measured."""
    parser, args = parsed(words, prog)
    args.out, args.device = args.out or TUNING_FILE, args.device or "cpu"
    args.dtypes, args.ops = args.dtypes or ["float32"], args.ops or ["SUM"]
    _check_device(parser, args)
    if args.sizes is None:
        args.sizes = _sizes(args)
    else:
        _check_sizes(parser, args)
    return args


def _check_device(parser: Parser, args: argparse.Namespace) -> None:
    from mpicoll._device import streams

    if args.device == "cuda" and not streams.available():
        parser.error("--device cuda: torch sees no GPU here")
    if args.device == "cpu" and "nccl" in (args.impl or []):
        parser.error("--impl nccl: NCCL takes a GPU's tensors only, with --device cuda")
    args.impl = args.impl or [way for way in WAYS if way != "nccl" or args.device == "cuda"]


def _itemsizes(args: argparse.Namespace) -> dict[str, int]:
    import torch

    return {dtype: getattr(torch, dtype).itemsize for dtype in args.dtypes}


def _sizes(args: argparse.Namespace) -> list[int]:
    """The default sizes."""
    widest = max(_itemsizes(args).values())
    sizes = QUICK_SIZES if args.quick else [size for size in SIZES if size <= MOST.get(args.what, SIZES[-1])]
    return [size for size in sizes if size % widest == 0]


def _check_sizes(parser: Parser, args: argparse.Namespace) -> None:
    for dtype, itemsize in _itemsizes(args).items():
        for size in args.sizes:
            if size % itemsize:
                parser.error(f"--sizes {size}: sizes of {dtype} tensors are multiples of {itemsize}")


def _check_files(parser: Parser, args: argparse.Namespace) -> None:
    for option in ("json", "out"):
        file = getattr(args, option)
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


def dtype(text: str) -> str:
    import torch

    if not isinstance(getattr(torch, text, None), torch.dtype):
        raise ArgumentTypeError(f"{text!r} is no dtype of torch: write float32, bfloat16, int64")
    return str(getattr(torch, text)).removeprefix("torch.")

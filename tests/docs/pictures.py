"""``python -m tests.docs.pictures`` draws the pictures of docs/examples anew, or only those that are named; needs matplotlib.

The examples draw them, most by their option ``--plot``; all but profile_step, which measures, draw the same each time. Others are
drawn here: the numbers that a page shows as the output of an example.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.docs import programs
from tests.support import ROOT, run

FOLDER = ROOT / "docs" / "img" / "examples"
DATE = re.compile(rb" *<dc:date>.*?</dc:date>\n")
COORDINATE = re.compile(rb"(?<=[ML ])(\d+\.\d\d)\d+(?= |\n)")  # of a path; two decimals are enough
SETTINGS = {"svg.hashsalt": "mpicoll"}  # names in the file that are the same each time
NUMBER = re.compile(r"\d+(?:\.\d+)?")
TIME_LIMIT_S = 120

# The name of the example: ranks, program, option.
RUN = {
    "digits_by_hand": (2, "examples/digits_by_hand.py", "--plot"),
    "digits_ddp": (2, "examples/digits_ddp.py", "--plot"),
    "digits_torch_ddp": (2, "examples/digits_torch_ddp.py", "--plot"),
    "halo_convolution": (4, "examples/halo_convolution.py", "--plot"),
    "insitu_mpi4py": (4, "examples/insitu_mpi4py.py", "--plot"),
    "profile_step": (2, "examples/profile_step.py", "--plot"),
    "transformer_fsdp2": (2, "tests/docs/scripts/draw_transformer.py", "--plot"),
}


def draw_numbers(name: str, picture: Path) -> None:
    figure = Figure(figsize=(8, 4), layout="constrained")
    DRAWN[name](figure.subplots(), list(numbers(name)))
    with matplotlib.rc_context(SETTINGS):
        figure.savefig(picture)


def numbers(name: str) -> Iterator[list[float]]:
    """The numbers of each line that has at least two."""
    for line in programs.shown(ROOT / "examples" / f"{name}.py").shown:
        found = [float(number) for number in NUMBER.findall(line)]
        if len(found) > 1:
            yield found


def ping_pong(axes: Axes, lines: list[list[float]]) -> None:
    _, *rows = lines  # the first names the ranks
    nbytes, _, one_way, _, both_ways = zip(*rows, strict=True)
    axes.loglog(nbytes, both_ways, "o-", label="isend/irecv, two messages cross")
    axes.loglog(nbytes, one_way, "o-", label="send/recv, one message at a time")
    axes.set(title="Ping-pong between two ranks of one machine", xlabel="bytes of a message", ylabel="MB/s")
    axes.legend()


def rpc_reinforce(axes: Axes, lines: list[list[float]]) -> None:
    *rounds, _ = lines  # the last sums up
    number, steps, _ = zip(*rounds, strict=True)
    axes.plot(number, steps, "o-")
    axes.set(xticks=number, title="An agent learns to balance a pole", xlabel="round", ylabel="steps for which the pole stands")


DRAWN: dict[str, Callable[[Axes, list[list[float]]], None]] = {"ping_pong": ping_pong, "rpc_reinforce": rpc_reinforce}

PICTURES = sorted({*RUN, *DRAWN})


def draw(name: str, folder: Path) -> Path:
    """Draws the picture of the example of this name, and returns its file."""
    picture = folder / f"{name}.svg"
    if name in RUN:
        run_to_draw(name, picture)
    else:
        draw_numbers(name, picture)
    picture.write_bytes(COORDINATE.sub(rb"\1", DATE.sub(b"", picture.read_bytes())))
    return picture


def run_to_draw(name: str, picture: Path) -> None:
    ranks, program, option = RUN[name]
    settings = picture.with_name("matplotlibrc")
    settings.write_text("".join(f"{key}: {value}\n" for key, value in SETTINGS.items()))
    words = ["-m", "mpicoll.run", "-n", str(ranks), program, option, str(picture)]
    done = run([sys.executable, *words], TIME_LIMIT_S, env={"MATPLOTLIBRC": str(settings)})
    settings.unlink()
    assert done.returncode == 0, done.stdout + done.stderr


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for asked in sys.argv[1:] or PICTURES:
        print(draw(asked, FOLDER))

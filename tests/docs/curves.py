"""Pictures of the numbers that a page in docs/examples shows as the output of an example."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tests.docs import programs
from tests.support import ROOT

SETTINGS = {"svg.hashsalt": "mpicoll"}  # names in the file that are the same each time
NUMBER = re.compile(r"\d+(?:\.\d+)?")


def draw(name: str, picture: Path) -> None:
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

"""Every ``MPICOLL_*`` environment variable: name, type, default, unit, meaning. Nothing else in mpicoll reads one.

    timeout_s = config.get("MPICOLL_PROBE_TIMEOUT")    # the value, or the default; a ValueError says what is allowed

A new variable is one more row in `VARIABLES`. The environment is read at each call, so a test may set it after import.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


@dataclass(frozen=True)
class Variable:
    """One environment variable. ``default`` has type ``kind``, or is None where unset means something of its own (the
    meaning says what).
    """

    name: str
    kind: type[bool] | type[int] | type[float] | type[str]
    default: bool | int | float | str | None
    unit: str
    meaning: str
    choices: tuple[str, ...] = ()  # for a str: the words allowed
    minimum: float | None = None  # for a number: the least value allowed

    def parse(self, text: str) -> bool | int | float | str:
        """The value that ``text`` means. Raises ValueError: it means none."""
        word = text.strip()
        if self.kind is bool:
            if word.lower() not in TRUE + FALSE:
                raise ValueError(f"{self.name}={text!r} is not allowed; use 1 or 0")
            return word.lower() in TRUE
        if self.kind is str:
            if not self.choices:
                return word
            if word.lower() not in self.choices:
                raise ValueError(f"{self.name}={text!r} is not allowed; use one of {', '.join(self.choices)}")
            return word.lower()
        try:
            number: int | float | None = int(word) if self.kind is int else float(word)
        except ValueError:
            number = None
        if number is None or number != number or (self.minimum is not None and number < self.minimum):
            what = "a whole number" if self.kind is int else "a number"
            least = f" of at least {self.minimum:g}" if self.minimum is not None else ""
            unit = f" ({self.unit})" if self.unit else ""
            raise ValueError(f"{self.name}={text!r} is not allowed; use {what}{least}{unit}")
        return number


VARIABLES = (
    Variable(
        name="MPICOLL_OVERRIDE_MPI",
        kind=bool,
        default=False,
        unit="",
        meaning="take the backend name 'mpi' also from a torch that was built with MPI",
    ),
    Variable(
        name="MPICOLL_BACKEND",
        kind=str,
        default=None,
        unit="",
        meaning="the backend of torch.distributed.init_process_group, and of init_device_mesh alone, where the program names "
        "none (`mpicoll run --backend`); unset: what torch takes, gloo or nccl",
        choices=("mpi", "cpu:mpi,cuda:nccl"),
    ),
    Variable(
        name="MPICOLL_CUDA_AWARE",
        kind=bool,
        default=None,
        unit="",
        meaning="whether this MPI takes GPU memory, for `mpicoll.doctor` and, on rank 0, for a world in which ranks have GPUs; "
        "unset: as the evidence says, a trial by two ranks included",
    ),
    Variable(
        name="MPICOLL_CUDA_IPC",
        kind=bool,
        default=True,
        unit="",
        meaning="whether ranks of one node open each other's GPU memory where MPI does not take it (rank 0's counts)",
    ),
    Variable(
        name="MPICOLL_LOG",
        kind=str,
        default=None,
        unit="",
        meaning="prints to standard error: info, once and on rank 0, what was found (MPI, launcher, ranks, nodes, GPU path); "
        "debug, on every rank, also which algorithm each operation takes; unset: nothing",
        choices=("info", "debug"),
    ),
    Variable(
        name="MPICOLL_PROBE_TIMEOUT",
        kind=float,
        default=60.0,
        unit="seconds",
        meaning="how long mpicoll.run and mpicoll.doctor wait for MPI to load and start in a trial process",
        minimum=0.1,
    ),
    Variable(
        name="MPICOLL_WINDOW_BYTES",
        kind=int,
        default=64 << 20,
        unit="bytes",
        meaning="the most shared memory that one group takes on a node, on first use; 0: none, MPI carries everything "
        "(rank 0's counts)",
        minimum=0,
    ),
    Variable(
        name="MPICOLL_WINDOW_FROM",
        kind=int,
        default=None,
        unit="bytes",
        meaning="the size from which operations go through shared memory, between nodes by all of their ranks, and fp16 and "
        "bf16 as they are; unset: as measured (rank 0's counts)",
        minimum=1,
    ),
    Variable(
        name="MPICOLL_NODE_SIZE",
        kind=int,
        default=0,
        unit="ranks",
        meaning="pretends that every so many ranks of a host are a node of their own, to try what happens between nodes; 0: "
        "nodes as they are (rank 0's counts)",
        minimum=0,
    ),
    Variable(
        name="MPICOLL_TUNING",
        kind=str,
        default="",
        unit="",
        meaning="a table that `python -m mpicoll.bench tune` has written for this machine (rank 0's counts)",
    ),
)

_BY_NAME = {variable.name: variable for variable in VARIABLES}


def get(name: str, environ: Mapping[str, str] = os.environ) -> Any:
    """The value of variable ``name``: from the environment if it is set and not empty, else the default.

    Raises: KeyError: no such variable in the table; ValueError: the environment holds something that is not allowed.
    """
    variable = _BY_NAME.get(name)
    if variable is None:
        raise KeyError(f"{name} is no variable of mpicoll; those are {', '.join(_BY_NAME)}")
    text = environ.get(name, "")
    return variable.parse(text) if text.strip() else variable.default


def choices(name: str) -> tuple[str, ...]:
    """The words that variable ``name`` allows; empty: any."""
    return _BY_NAME[name].choices


def problems(environ: Mapping[str, str] = os.environ) -> list[str]:
    """What is wrong with the MPICOLL_* variables that are set: misspelt names and values that are not allowed, one
    sentence each.
    """
    found = []
    for name in sorted(name for name in environ if name.startswith("MPICOLL_")):
        try:
            get(name, environ)
        except KeyError:
            found.append(f"{name} is set, but mpicoll has no such variable; those are {', '.join(_BY_NAME)}")
        except ValueError as error:
            found.append(str(error))
    return found


def table() -> str:
    """The variables as a Markdown table, for the documentation."""
    rows = ["| variable | type | default | meaning |", "|---|---|---|---|"]
    for variable in VARIABLES:
        default = (
            "unset" if variable.default is None else str(int(variable.default) if variable.kind is bool else variable.default)
        )
        unit = f" {variable.unit}" if variable.unit else ""
        rows.append(f"| `{variable.name}` | {variable.kind.__name__} | {default}{unit} | {variable.meaning} |")
    return "\n".join(rows)

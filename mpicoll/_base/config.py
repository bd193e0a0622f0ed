"""The ``MPICOLL_*`` environment variables: name, type, default, unit, meaning. No other module reads them from the environment.

    timeout_s = config.get("MPICOLL_PROBE_TIMEOUT")    # the value or the default; a ValueError says what is allowed

A new variable is a new row in `VARIABLES`. Each call reads the environment, so a test may set a variable after the import.
"""

from __future__ import annotations

import contextlib
import math
import os
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

TRUE, FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


class Variable(NamedTuple):
    """One environment variable. default: a value of type ``kind``; None: unset has a meaning of its own, see ``meaning``."""

    name: str
    kind: type[bool] | type[int] | type[float] | type[str]
    meaning: str
    default: bool | int | float | str | None = None
    unit: str = ""
    choices: tuple[str, ...] = ()  # allowed words, for a str
    minimum: float | None = None  # smallest allowed value, for a number

    def parse(self, text: str) -> bool | int | float | str:
        """The value of ``text``. Raises ValueError if it is not allowed."""
        word = text.strip()
        if self.kind is bool:
            if word.lower() not in TRUE + FALSE:
                raise ValueError(f"{self.name}={text!r} is not allowed; use 1 or 0")
            return word.lower() in TRUE
        if self.kind is str:
            if self.choices and word.lower() not in self.choices:
                raise ValueError(f"{self.name}={text!r} is not allowed; use one of {', '.join(self.choices)}")
            return word.lower() if self.choices else word
        try:
            number = int(word) if self.kind is int else float(word)
        except ValueError:
            number = math.nan
        least = -math.inf if self.minimum is None else self.minimum
        if not least <= number < math.inf:  # also for nan
            what = "a whole number" if self.kind is int else "a number"
            limit = "" if self.minimum is None else f" of at least {least:g}"
            unit = f" ({self.unit})" if self.unit else ""
            raise ValueError(f"{self.name}={text!r} is not allowed; use {what}{limit}{unit}")
        return number

    def spell(self, value: bool | int | float | str) -> str:
        """The value as it may be set, with the unit."""
        return f"{value:d}" if isinstance(value, bool) else f"{value} {self.unit}".rstrip()


VARIABLES = (
    Variable(
        "MPICOLL_OVERRIDE_MPI",
        bool,
        default=False,
        meaning="use the backend name 'mpi' for mpicoll even if torch was built with MPI",
    ),
    Variable(
        "MPICOLL_BACKEND",
        str,
        meaning="backend of torch.distributed.init_process_group, and of a lone init_device_mesh, where the program names "
        "none, or names torch's default of a device (`mpicoll run --backend`); unset: the default of torch, gloo or nccl",
        choices=("mpi", "cpu:mpi,cuda:nccl"),
    ),
    Variable(
        "MPICOLL_REPLACE_GLOO",
        bool,
        default=False,
        meaning="1: the backend name 'gloo' stands for mpi, too, for programs and packages that name it in their own code; "
        "get_backend still answers 'gloo'",
    ),
    Variable(
        "MPICOLL_CHECK",
        bool,
        meaning="1: ranks compare their calls before each collective; 0: they never do; unset: the ranks of a node compare them "
        "once a second, and before each collective if TORCH_DISTRIBUTED_DEBUG=DETAIL (rank 0 decides)",
    ),
    Variable(
        "MPICOLL_CUDA_AWARE",
        bool,
        meaning="whether this MPI takes GPU memory (for `mpicoll.doctor`, and on rank 0 for a world whose ranks have GPUs); "
        "unset: decided by evidence and by a trial of two ranks",
    ),
    Variable(
        "MPICOLL_CUDA_IPC",
        bool,
        default=True,
        meaning="whether ranks of one node open the GPU memory of each other where MPI does not take it (rank 0 decides)",
    ),
    Variable(
        "MPICOLL_DUMP_DIR",
        str,
        meaning="folder in which every rank writes what it has called last when an operation expires, or when the file `request` "
        "in it is touched; unset: no record on expiry",
    ),
    Variable(
        "MPICOLL_LOG",
        str,
        meaning="prints to standard error; info: one line on rank 0 about MPI, launcher, ranks, nodes and GPU path; debug: on "
        "every rank, also the algorithm of each operation; unset: nothing",
        choices=("info", "debug"),
    ),
    Variable(
        "MPICOLL_ON_TIMEOUT",
        str,
        default="end",
        meaning="what a blocking operation does at the timeout; end: the job ends; raise: OperationTimeout (10 to 40 us more)",
        choices=("end", "raise"),
    ),
    Variable(
        "MPICOLL_PROBE_TIMEOUT",
        float,
        default=60.0,
        unit="seconds",
        meaning="time limit of mpicoll.run and mpicoll.doctor for loading and starting MPI or torch in a trial process",
        minimum=0.1,
    ),
    Variable(
        "MPICOLL_TIMEOUT",
        float,
        unit="seconds",
        meaning="timeout of groups for which the program gives none, and limit of init_rpc without options; unset: the defaults "
        "of torch, 1800 seconds for groups and 60 for init_rpc",
        minimum=0.001,
    ),
    Variable(
        "MPICOLL_WINDOW_BYTES",
        int,
        default=64 << 20,
        unit="bytes",
        meaning="maximum of shared memory of one group on a node, taken on first use; 0: none, MPI moves all data "
        "(rank 0 decides)",
        minimum=0,
    ),
    Variable(
        "MPICOLL_WINDOW_FROM",
        int,
        unit="bytes",
        meaning="message size from which mpicoll's own algorithms replace those of MPI (shared memory, rails between nodes, "
        "direct exchange); unset: as measured (rank 0 decides)",
        minimum=1,
    ),
    Variable(
        "MPICOLL_TUNING",
        str,
        default="",
        meaning="path of a table that `python -m mpicoll.bench tune` has written for this machine (rank 0 decides)",
    ),
)

_BY_NAME = {variable.name: variable for variable in VARIABLES}


def get(name: str, environ: Mapping[str, str] = os.environ) -> Any:
    """The value of variable ``name``: from the environment if it is set and not empty, else the default.

    Raises:
        KeyError: The table has no such variable.
        ValueError: The value in the environment is not allowed.
    """
    variable = _BY_NAME[name]
    text = environ.get(name, "")
    return variable.parse(text) if text.strip() else variable.default


def in_force(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The value of each variable: set, or the default. Leaves out variables that have a value that is not allowed."""
    values = {}
    for name in _BY_NAME:
        with contextlib.suppress(ValueError):  # `problems` names it
            values[name] = get(name, environ)
    return values


def choices(name: str) -> tuple[str, ...]:
    """The allowed words of variable ``name``; empty: any."""
    return _BY_NAME[name].choices


def problems(environ: Mapping[str, str] = os.environ) -> list[str]:
    """A sentence for each MPICOLL_* variable that is set and has an unknown name or a value that is not allowed."""
    sentences = []
    for name in sorted(name for name in environ if name.startswith("MPICOLL_")):
        try:
            get(name, environ)
        except KeyError:
            sentences.append(f"{name} is set, but mpicoll has no such variable; those are {', '.join(_BY_NAME)}")
        except ValueError as error:
            sentences.append(str(error))
    return sentences


def described(width: int) -> Iterator[str]:
    """The variables with their values here and their meaning, as lines of a terminal of this width; then what is wrong."""
    for variable in VARIABLES:
        text, default = os.environ.get(variable.name, "").strip(), variable.default
        unset = "unset" if default in (None, "") else f"unset: {variable.spell(default)}"
        yield f"{variable.name}={text}" if text else f"{variable.name}  {unset}"
        yield from textwrap.wrap(variable.meaning, width, initial_indent="    ", subsequent_indent="    ")
    yield from problems()

"""The workers, by name and rank, and how an exception travels from one to another."""

from __future__ import annotations

import pickle
import re
import sys
import traceback
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

NAME = re.compile(r"[A-Za-z0-9_:-]{1,127}")
NEWLINE = re.compile(r"(?<!\\)\\n")  # as repr writes a newline


@dataclass(frozen=True)
class WorkerInfo:
    """A worker.

    Attributes:
        name: Unique among the workers.
        id: Its rank.
    """

    name: str
    id: int

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise RuntimeError(
                "Worker name must match ^[A-Za-z0-9-_:]*$, and must be non-empty and shorter than 128 chars, but got "
                f"{self.name!r}"
            )

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"


class Workers:
    """All workers.

    Args:
        entries: Name and rank of each worker.

    Attributes:
        all: In the order of their ranks.
        left: For each worker that has ended before the others, by rank, the reason.

    Raises:
        RuntimeError: A name is invalid or not unique.
    """

    def __init__(self, entries: list[Any]) -> None:
        self.all = [WorkerInfo(name, rank) for name, rank in sorted(entries, key=lambda entry: entry[1])]
        self.by_name = {worker.name: worker for worker in self.all}
        self.left: dict[int, str] = {}
        twice = [name for name, count in Counter(worker.name for worker in self.all).items() if count > 1]
        if twice:
            ranks = [worker.id for worker in self.all if worker.name == twice[0]]
            raise RuntimeError(f"RPC worker name {twice[0]!r} is not unique: it is the name of ranks {ranks}; each needs its own")

    def find(self, to: WorkerInfo | str | int) -> WorkerInfo:
        """Returns the worker of this name or rank.

        Raises:
            RuntimeError: There is no such worker.
            ValueError: ``to`` is neither a name nor a rank.
        """
        if isinstance(to, WorkerInfo):
            to = to.name
        if isinstance(to, str):
            if to in self.by_name:
                return self.by_name[to]
            names = ", ".join(map(repr, self.by_name))
            raise RuntimeError(f"could not find destination: unknown destination worker {to!r}; the workers are {names}")
        if isinstance(to, int) and not isinstance(to, bool):
            if 0 <= to < len(self.all):
                return self.all[to]
            raise RuntimeError(
                f"could not find destination: unknown destination worker {to}; the workers' ids are 0 to {len(self.all) - 1}"
            )
        raise ValueError(f"Cannot get WorkerInfo from name {to}")


@dataclass(frozen=True)
class RemoteError:
    """An exception that travels to the caller: its type, and its text with the traceback."""

    kind: type[BaseException]
    text: str

    def __reduce__(self) -> Any:
        return _rebuild, (_reference(self.kind), self.text)

    def exception(self) -> BaseException:
        """Returns an exception of that type if its constructor accepts a text, otherwise a RuntimeError with the text."""
        text = self.text
        try:
            error = self.kind(text)
        except BaseException as failure:  # noqa: BLE001  a constructor of the user
            text = (
                f"Failed to create original exception type. Error msg was {failure} "
                f"Original exception on remote side was {self.text}"
            )
            error = RuntimeError(text)
        error = error if isinstance(error, Exception) else RuntimeError(text)
        error._mpicoll_text = text  # type: ignore[attr-defined]
        return error


def report(error: BaseException, by: WorkerInfo) -> RemoteError:
    """Returns what `describe` returns, and prints it: as in torch, the error is also in the log of the worker that raised it."""
    remote_error = describe(error, by)
    print(remote_error.text, file=sys.stderr)
    return remote_error


def describe(error: BaseException, by: WorkerInfo) -> RemoteError:
    """Returns type, worker and traceback of an exception. One that has come from another worker keeps its text.

    Removes the traceback: its frames may refer to a future that keeps the exception, and garbage collection does not find a
    circle through C++.
    """
    text = getattr(error, "_mpicoll_text", None)
    if text is None:
        trace = "".join(traceback.format_exception(error))
        text = f"On {by}:\n{NEWLINE.sub(chr(10), repr(error))}\n{trace}"
    error.__traceback__ = error.__context__ = error.__cause__ = None
    kind = RuntimeError if isinstance(error, torch.jit.Error) else type(error)  # as in torch
    return RemoteError(kind, text)


def _reference(kind: type[BaseException]) -> Any:
    """Returns the pickled class, or the first of its base classes that can be pickled."""
    for candidate in kind.__mro__:
        try:
            return pickle.dumps(candidate)
        except (pickle.PicklingError, AttributeError):
            continue
    return pickle.dumps(RuntimeError)


def _rebuild(reference: bytes, text: str) -> RemoteError:
    try:
        kind = pickle.loads(reference)
    except (ImportError, AttributeError):  # this worker does not have the class
        kind = RuntimeError
    return RemoteError(kind, text)

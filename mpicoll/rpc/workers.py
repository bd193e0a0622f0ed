"""Who takes part: names, numbers, and what a worker's exception looks like elsewhere."""

from __future__ import annotations

import pickle
import re
import traceback
from collections import Counter
from dataclasses import dataclass
from typing import Any

NAME = re.compile(r"[A-Za-z0-9_:-]{1,127}")


@dataclass(frozen=True)
class WorkerInfo:
    """A worker's name, and its id: its rank."""

    name: str
    id: int

    def __repr__(self) -> str:
        return f"WorkerInfo(id={self.id}, name={self.name})"


class Workers:
    """All of them, by name and by rank. ``left``: why, by rank, for those that have ended before the others."""

    def __init__(self, entries: list[Any]) -> None:
        self.all = [WorkerInfo(name, rank) for name, rank in sorted(entries, key=lambda entry: entry[1])]
        self.by_name = {worker.name: worker for worker in self.all}
        self.left: dict[int, str] = {}
        twice = [name for name, count in Counter(worker.name for worker in self.all).items() if count > 1]
        if twice:
            ranks = [worker.id for worker in self.all if worker.name == twice[0]]
            raise RuntimeError(f"init_rpc: worker names must be unique, but ranks {ranks} are all called {twice[0]!r}")

    def find(self, to: WorkerInfo | str | int) -> WorkerInfo:
        """Raises: RuntimeError: there is no such worker. ValueError: ``to`` is neither."""
        if isinstance(to, WorkerInfo):
            to = to.name
        if isinstance(to, str):
            if to in self.by_name:
                return self.by_name[to]
            names = ", ".join(map(repr, self.by_name))
            raise RuntimeError(f"unknown destination worker {to!r}; the workers are {names}")
        if isinstance(to, int) and not isinstance(to, bool):
            if 0 <= to < len(self.all):
                return self.all[to]
            raise RuntimeError(f"unknown destination worker {to}; the workers' ids are 0 to {len(self.all) - 1}")
        raise ValueError(f"Cannot get WorkerInfo from name {to}")


def check_name(name: object) -> str:
    """Raises: TypeError, ValueError: not a worker's name, as torch has them."""
    if not isinstance(name, str):
        raise TypeError(f"init_rpc: name must be a str, got {type(name).__name__}")
    if not NAME.fullmatch(name):
        raise ValueError(f"init_rpc: {name!r} is no worker's name: fewer than 128 letters, digits, '_', ':' and '-'")
    return name


@dataclass(frozen=True)
class RemoteError:
    """An exception on its way to the caller: its type, and what it said, with the traceback from there."""

    kind: type[BaseException]
    text: str

    def __reduce__(self) -> Any:
        return _rebuild, (_reference(self.kind), self.text)

    def exception(self) -> BaseException:
        """Of the same type where that can be made of a text, else a RuntimeError."""
        try:
            error = self.kind(self.text)
        except Exception:  # noqa: BLE001  a constructor of the user's own
            error = RuntimeError(self.text)
        error = error if isinstance(error, Exception) else RuntimeError(self.text)
        error._mpicoll_text = self.text  # type: ignore[attr-defined]
        return error


def described(error: BaseException, by: WorkerInfo) -> RemoteError:
    """What is told of an exception: type, worker and traceback; one that has come from a worker says what it said there.

    Takes the traceback away: where a future keeps the exception, the traceback's frames would keep what they were working on,
    the future among it, in a circle through C++ that no garbage collection finds.
    """
    text = getattr(error, "_mpicoll_text", None)
    if text is None:
        trace = "".join(traceback.format_exception(error))
        text = f"On {by}:\n{error!r}\n{trace}"
    error.__traceback__ = error.__context__ = error.__cause__ = None
    return RemoteError(type(error), text)


def _reference(kind: type[BaseException]) -> Any:
    """The class, if it can be found by its name on the other side; else the first of its bases that can."""
    for candidate in kind.__mro__:
        try:
            return pickle.dumps(candidate)
        except (pickle.PicklingError, AttributeError):
            continue
    return pickle.dumps(RuntimeError)


def _rebuild(reference: bytes, text: str) -> RemoteError:
    try:
        kind = pickle.loads(reference)
    except (ImportError, AttributeError):  # a class that this worker does not have
        kind = RuntimeError
    return RemoteError(kind, text)

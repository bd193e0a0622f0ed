"""Who takes part: names, numbers, and what a worker's exception looks like elsewhere."""

from __future__ import annotations

import os
import pickle
import re
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from mpicoll._base import processes
from mpicoll._base.processes import ENDED

NAME = re.compile(r"[A-Za-z0-9_:-]{1,127}")
NEWLINE = re.compile(r"(?<!\\)\\n")  # as repr writes it


@dataclass(frozen=True)
class WorkerInfo:
    """A worker's name, and its id: its rank. `mpicoll.rpc.get_worker_info` returns the real ones (not collective).

    Args:
        name: Letters, digits, '_', ':' and '-'.
        id: The rank.

    Raises:
        RuntimeError: The name is none.

    Example:
        >>> rpc.WorkerInfo("worker1", 1) == rpc.get_worker_info("worker1")
        True
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


class Process(NamedTuple):
    """The process of a worker. ``node``: equal on processes that see each other in /proc."""

    pid: int
    hostname: str
    node: tuple[str, ...]


def this_process(hostname: str) -> Process:
    """Returns the process that calls this."""
    return Process(os.getpid(), hostname, (hostname, processes.boot(), str(processes.namespace("pid"))))


class Workers:
    """All of them, by name and by rank.

    Args:
        names: By rank.
        processes: By rank.
        me: The rank of this worker.
    """

    def __init__(self, names: Sequence[str], processes: Sequence[Process], me: int) -> None:
        self.all = [WorkerInfo(name, rank) for rank, name in enumerate(names)]
        self.by_name = {worker.name: worker for worker in self.all}
        self._processes, self._me = processes, me
        twice = [worker.name for worker in self.all if self.by_name[worker.name] is not worker]
        if twice:
            ranks = [worker.id for worker in self.all if worker.name == twice[0]]
            raise RuntimeError(f"RPC worker name {twice[0]!r} is not unique: it is the name of ranks {ranks}; each needs its own")

    def find(self, to: WorkerInfo | str | int) -> WorkerInfo:
        """Raises: RuntimeError: there is no such worker. ValueError: ``to`` is neither."""
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

    def has_ended(self, rank: int) -> bool:
        """Returns whether the process of a worker is gone, as far as this node can tell."""
        return self._state(rank) == ENDED

    def process(self, rank: int) -> str:
        """Returns in words where the process of a worker is and, on this node, how it is."""
        pid, hostname, _ = self._processes[rank]
        return f"its process {pid} on host {hostname} {self._state(rank) or 'cannot be seen from this node'}"

    def _state(self, rank: int) -> str:
        pid, _, node = self._processes[rank]
        return processes.state(pid) if node == self._processes[self._me].node else ""


@dataclass(frozen=True)
class RemoteError:
    """An exception on its way to the caller: its type, and what it said, with the traceback from there."""

    kind: type[BaseException]
    text: str

    def __reduce__(self) -> Any:
        return _rebuild, (_reference(self.kind), self.text)

    def exception(self) -> BaseException:
        """Of the same type where that can be made of a text, else a RuntimeError with the text."""
        text = self.text
        try:
            error = self.kind(text)
        except BaseException as failure:  # noqa: BLE001  a constructor of the user's own
            text = (
                f"Failed to create original exception type. Error msg was {failure} "
                f"Original exception on remote side was {self.text}"
            )
            error = RuntimeError(text)
        error = error if isinstance(error, Exception) else RuntimeError(text)
        error._mpicoll_text = text  # type: ignore[attr-defined]
        return error


def report(error: BaseException, by: WorkerInfo) -> RemoteError:
    """The same as `describe`, and printed: the worker's own log tells of it, as torch's does."""
    remote_error = describe(error, by)
    print(remote_error.text, file=sys.stderr)
    return remote_error


def describe(error: BaseException, by: WorkerInfo) -> RemoteError:
    """What is remote_error of an exception: type, worker and traceback; one that has come from a worker says what it said there.

    Takes the traceback away: where a future keeps the exception, the traceback's frames would keep what they were working on,
    the future among it, in a circle through C++ that no garbage collection finds.
    """
    text = getattr(error, "_mpicoll_text", None)
    if text is None:
        trace = "".join(traceback.format_exception(error))
        text = f"On {by}:\n{NEWLINE.sub(chr(10), repr(error))}\n{trace}"
    error.__traceback__ = error.__context__ = error.__cause__ = None
    return RemoteError(type(error), text)


def _reference(kind: type[BaseException]) -> Any:
    """The class, if it can be found by its name on the other side; else the first of its bases that can."""
    for candidate in kind.__mro__:
        with suppress(pickle.PicklingError, AttributeError):
            return pickle.dumps(candidate)
    return pickle.dumps(RuntimeError)


def _rebuild(reference: bytes, text: str) -> RemoteError:
    try:
        kind = pickle.loads(reference)
    except (ImportError, AttributeError):  # a class that this worker does not have
        kind = RuntimeError
    return RemoteError(kind, text)

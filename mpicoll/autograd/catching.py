"""Takes the gradients of received messages out of a run of torch's engine while the run goes on.

They are sent on at once. They must not wait for the end of the run: DDP ends the run only after all ranks have reduced their
gradients, and another rank may need these gradients for that. The engine numbers its runs; a catcher learns the number of its run
from a marker, a node of its own among the roots.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor

Gradients = list[Tensor | None]


class _Runs:
    """The catchers of this process, by the number of the run that each belongs to."""

    def __init__(self) -> None:
        self._guard = threading.Lock()  # guards what follows
        self._open = 0  # catchers that are open, with or without a number
        self._catchers: dict[int, Catcher] = {}
        self._early: dict[int, list[tuple[Any, Gradients]]] = {}  # gradients that came before the marker of their run

    def open(self) -> None:
        """Counts a catcher: from now on early gradients are kept."""
        with self._guard:
            self._open += 1

    def begin(self, number: int, catcher: Catcher) -> list[tuple[Any, Gradients]]:
        """Notes the catcher of this run. Returns the messages and gradients that came before."""
        with self._guard:
            self._catchers[number] = catcher
            return self._early.pop(number, [])

    def close(self, number: int | None) -> None:
        with self._guard:
            self._open -= 1
            if number is not None:
                del self._catchers[number]
            if not self._open:
                self._early.clear()

    def find(self, number: int, message: Any, gradients: Gradients) -> Catcher | None:
        """Returns the catcher of this run. None: it has none so far; keeps the gradients in case it gets one."""
        with self._guard:
            catcher = self._catchers.get(number)
            if catcher is None and self._open:
                self._early.setdefault(number, []).append((message, gradients))
        return catcher


_runs = _Runs()


class Catcher:
    """Passes the gradients of messages to ``send``, once for each message, in the thread that has computed them."""

    def __init__(self, messages: Collection[Any], send: Callable[[Any, Gradients], None]) -> None:
        self._guard = threading.Lock()  # guards left and _held
        self.left = set(messages)  # that the run has not reached
        self._send = send
        self._held: list[Gradients] = []  # kept, so that the engine does not reuse their memory before they have been sent
        self._number: int | None = None

    @contextlib.contextmanager
    def open(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the marker, which must be a root of the run, and the leaf that it depends on, which must be an input."""
        _runs.open()
        leaf = torch.zeros((), device="cpu", requires_grad=True)
        try:
            yield _Marker.apply(leaf, self), leaf  # type: ignore[no-untyped-call]
        finally:
            _runs.close(self._number)

    def begin(self, number: int) -> None:
        self._number = number
        for message, gradients in _runs.begin(number, self):
            self.take(message, gradients)

    def take(self, message: Any, gradients: Gradients) -> None:
        """Passes on the gradients of a message, if it is one of this run that has not been passed on."""
        with self._guard:
            if message not in self.left:
                return
            self.left.remove(message)
            self._held.append(gradients)
        self._send(message, gradients)


class _Marker(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor, catcher: Catcher) -> Tensor:
        ctx.catcher = catcher
        return leaf.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        ctx.catcher.begin(torch._C._current_graph_task_id())
        return None, None


def caught(message: Any, gradients: Gradients) -> None:
    """Called when a run of the engine reaches a received message. Does nothing in a run of the program's own."""
    catcher = _runs.find(torch._C._current_graph_task_id(), message, gradients)
    if catcher is not None:
        catcher.take(message, gradients)

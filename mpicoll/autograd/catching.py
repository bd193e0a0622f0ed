"""Gradients of received messages, caught while a run of torch's engine goes on, and sent on at once.

They must not wait for the end of the run: DDP ends it when all ranks have reduced their gradients, and another rank may need
these for that. The engine numbers its runs; a run learns its number from a marker, a node of its own among its roots.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor

Gradients = list[Tensor | None]

_guard = threading.Lock()  # guards what follows
_open = 0  # catchers that are open
_catchers: dict[int, Catcher] = {}  # by number of the run
_early: dict[int, list[tuple[Any, Gradients]]] = {}  # came before the marker of their run


class Catcher:
    """Gives ``send`` the gradients of these messages, once for each, in the thread that has computed them."""

    def __init__(self, messages: Collection[Any], send: Callable[[Any, Gradients], None]) -> None:
        self._left = set(messages)
        self._send = send
        self._held: list[Gradients] = []  # so that nobody takes their memory for a sum before they have been sent

    @contextlib.contextmanager
    def open(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the marker, a root for the run, and the leaf that it depends on, an input."""
        global _open
        with _guard:
            _open += 1
        leaf = torch.zeros((), device="cpu", requires_grad=True)
        self._number: int | None = None
        try:
            yield _Marker.apply(leaf, self), leaf  # type: ignore[no-untyped-call]
        finally:
            with _guard:
                _open -= 1
                if self._number is not None:
                    del _catchers[self._number]
                if not _open:
                    _early.clear()

    def begin(self, number: int) -> None:
        """The run of this number is this catcher's."""
        with _guard:
            self._number = number
            _catchers[number] = self
            early = _early.pop(number, [])
        for message, gradients in early:
            self.take(message, gradients)

    def take(self, message: Any, gradients: Gradients) -> None:
        """Not a message of this run: it has been sent before, and its gradients have too."""
        with _guard:
            if message not in self._left:
                return
            self._left.remove(message)
            self._held.append(gradients)
        self._send(message, gradients)

    def rest(self) -> list[Any]:
        """The messages that the run has not reached."""
        return list(self._left)


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
    """A run of the engine has come to a received message. Nothing happens in runs without a catcher: they are the program's."""
    number = torch._C._current_graph_task_id()
    with _guard:
        catcher = _catchers.get(number)
        if catcher is None and _open:
            _early.setdefault(number, []).append((message, gradients))
    if catcher is not None:
        catcher.take(message, gradients)

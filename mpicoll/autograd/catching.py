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

_guard = threading.Lock()  # guards what follows, and what a catcher knows
_open: set[Catcher] = set()
_early: dict[int, list[tuple[Any, Gradients]]] = {}  # by run: what came before its marker, if it has one


class Catcher:
    """Passes the gradients of messages to ``send``, once for each message, in the thread that has computed them."""

    def __init__(self, messages: Collection[Any], send: Callable[[Any, Gradients], None]) -> None:
        self.left = set(messages)  # that the run has not reached
        self.run: int | None = None  # its number
        self._send = send
        self._held: list[Gradients] = []  # kept, so that the engine does not reuse their memory before they have been sent

    @contextlib.contextmanager
    def open(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the marker, which must be a root of the run, and the leaf that it depends on, which must be an input."""
        leaf = torch.zeros((), device="cpu", requires_grad=True)
        with _guard:
            _open.add(self)
        try:
            yield _Marker.apply(leaf, self), leaf  # type: ignore[no-untyped-call]
        finally:
            with _guard:
                _open.remove(self)
                if not _open:
                    _early.clear()

    def begin(self, run: int) -> None:
        with _guard:
            self.run = run
            early = _early.pop(run, [])
        for message, gradients in early:
            self.take(message, gradients)

    def take(self, message: Any, gradients: Gradients) -> None:
        """Passes on the gradients of a message, if it is one of this run that has not been passed on."""
        with _guard:
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
    run = torch._C._current_graph_task_id()
    with _guard:
        catcher = next((catcher for catcher in _open if catcher.run == run), None)
        if catcher is None and _open:
            _early.setdefault(run, []).append((message, gradients))
    if catcher is not None:
        catcher.take(message, gradients)

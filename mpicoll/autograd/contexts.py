"""What a worker remembers of a distributed forward pass: which tensors it has sent, and which it has received.

worker a                                  worker b
x ---- sends[7] = [x] ----- message ----> _Received ---> its copy of x, which requires grad
backward: gradients flow into that node on b, from there to a, into what was sent, and on (see passes.py).
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.futures import Future

from mpicoll.autograd.catching import caught

WORKER_BITS = 48  # a context's id: number of the worker that made it, then its own count

MessageId = tuple[int, int]  # worker that sent it, its count


@dataclass(eq=False)
class Receipt:
    """A message whose tensors take part in autograd here. ``count``: of its tensors that require grad."""

    sender: int
    message: MessageId
    count: int


class _Received(torch.autograd.Function):
    """Gives received tensors a place in the graph, where a pass stops and takes their gradients for the sender."""

    @staticmethod
    def forward(ctx: Any, receipt: Receipt, token: Tensor, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        ctx.receipt = receipt
        ctx.set_materialize_grads(False)
        return tuple(tensors)  # they are in a list, so that they are outputs like any other, not views of inputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        caught(ctx.receipt, list(gradients))
        return None, None, None  # a backward pass of this worker's alone ends here


@dataclass(eq=False)
class Context:
    """One distributed forward and backward pass on this worker. ``guard`` guards everything in it."""

    id: int
    sends: dict[MessageId, list[GradientEdge]] = field(default_factory=dict)
    gradients: dict[Tensor, Tensor] = field(default_factory=dict)
    workers: set[int] = field(default_factory=set)  # that know of it through this one
    passes: dict[MessageId, Any] = field(default_factory=dict)  # backward passes under way, by worker and number
    guard: threading.RLock = field(default_factory=threading.RLock)

    def _context_id(self) -> int:
        return self.id

    def _known_worker_ids(self) -> set[int]:
        return set(self.workers)


Call = Callable[[int, Callable[..., Any], tuple[Any, ...]], Future[Any]]


class Registry:
    """The contexts of this process, and the way to call functions on other workers.

    Attributes:
        worker_id: Rank of this worker, set by `connect`.
    """

    def __init__(self) -> None:
        self.worker_id = 0
        self._call: Call | None = None
        self._contexts: dict[int, Context] = {}
        self._guard = threading.Lock()  # guards _contexts
        self._count = itertools.count()  # of contexts
        self._messages = itertools.count()

    def connect(self, worker_id: int, call: Call) -> None:
        """Registers this worker's rank, and the function that calls a function on another worker. Done by init_rpc."""
        self.worker_id, self._call = worker_id, call

    @property
    def is_connected(self) -> bool:
        """Whether `connect` has been called."""
        return self._call is not None

    def call(self, worker: int, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Calls a function of this package on another worker, outside of every context and graph."""
        assert self._call is not None
        with entered(None), torch.no_grad():
            return self._call(worker, function, arguments)

    def new(self) -> Context:
        """Returns a new context, made by this worker."""
        with self._guard:
            context = Context((self.worker_id << WORKER_BITS) + next(self._count))
            self._contexts[context.id] = context
        return context

    def new_message_id(self) -> MessageId:
        """Returns the id of a message that this worker sends, or of a backward pass that it begins."""
        return self.worker_id, next(self._messages)

    def get(self, context_id: int) -> Context | None:
        """Returns the context of this id. None: it has ended, or was never made."""
        return self._contexts.get(context_id)

    def find(self, context_id: int) -> Context:
        """Returns the context of this id.

        Raises:
            RuntimeError: It has ended, or was never made.
        """
        context = self.get(context_id)
        if context is None:
            raise RuntimeError(f"Could not find autograd context with id: {context_id}")
        return context

    def find_or_make(self, context_id: int) -> Context:
        """Returns the context that another worker's message names."""
        with self._guard:
            return self._contexts.setdefault(context_id, Context(context_id))

    def all(self) -> list[Context]:
        """Returns all contexts that this worker knows."""
        with self._guard:
            return list(self._contexts.values())

    def forget(self, context_id: int) -> Context | None:
        """Removes and returns a context. The graph that it holds is freed with it."""
        with self._guard:
            return self._contexts.pop(context_id, None)

    def clear(self) -> None:
        """Removes all contexts, at the end of RPC."""
        with self._guard:
            self._contexts.clear()


registry = Registry()
_thread = threading.local()  # context: the one that this thread's calls and answers belong to


def current() -> Context | None:
    """This thread's."""
    return getattr(_thread, "context", None)


def enter(context: Context | None) -> Context | None:
    """This thread's calls and answers belong to it from here on. Returns the one that they belonged to."""
    before = current()
    _thread.context = context
    return before


@contextlib.contextmanager
def entered(context: Context | None) -> Iterator[None]:
    """While it lasts, this thread's calls and answers belong to this context."""
    before = enter(context)
    try:
        yield
    finally:
        enter(before)


class _Touch(torch.autograd.Function):
    """A node behind any tensor. Torch's own way to the node of a leaf makes a view, which sparse tensors do not have."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return torch.empty(0)


def edge_of(tensor: Tensor) -> GradientEdge:
    """Where its gradient enters the graph."""
    if tensor.layout is torch.strided:
        return get_gradient_edge(tensor)
    with torch.enable_grad():
        touched: Any = _Touch.apply(tensor)  # type: ignore[no-untyped-call]
    node, index = touched.grad_fn.next_functions[0]
    return GradientEdge(node, index, touched)  # which keeps the node alive


Extra = tuple[int, MessageId, list[int]] | None  # context, message, which of its tensors require grad


def attach(tensors: list[Tensor], to: int) -> Extra:
    """For a message that is about to leave: remembers those of its tensors that require grad; what the receiver must know."""
    context = current()
    if context is None:
        return None
    message = registry.new_message_id()
    needed = [i for i, tensor in enumerate(tensors) if tensor.requires_grad]
    with context.guard:
        context.workers.add(to)
        if needed:
            context.sends[message] = [edge_of(tensors[i]) for i in needed]
    return context.id, message, needed


def accept(tensors: list[Tensor], extra: Extra, sender: int) -> list[Tensor]:
    """For a message that has arrived: puts those tensors into this worker's graph."""
    if extra is None or not extra[2]:
        return tensors
    context_id, message, needed = extra
    context = registry.find_or_make(context_id)
    receipt = Receipt(sender, message, len(needed))
    token = torch.zeros((), device="cpu", requires_grad=True)  # makes what is received require grad
    with torch.enable_grad():
        plain = [tensors[i].detach() for i in needed]
        wrapped = _Received.apply(receipt, token, plain)  # type: ignore[no-untyped-call]
    with context.guard:
        context.workers.add(sender)
    answer = list(tensors)
    for i, tensor in zip(needed, wrapped, strict=True):
        answer[i] = tensor
    return answer

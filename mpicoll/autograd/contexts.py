"""Distributed autograd contexts: what a worker remembers of a forward pass, which tensors it has sent and received.

worker a                                  worker b
x ---- sends[7] = [x] ----- message ----> _Received ---> its copy of x, which requires grad
backward: gradients flow into that node on b, travel to a, and flow on from the tensors that a has sent (see passes.py).
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.futures import Future

WORKER_BITS = 48  # id of a context: rank of the worker that made it, shifted by this, plus a count

MessageId = tuple[int, int]  # rank of the worker that sent it, and that worker's count


@dataclass(eq=False)
class Receipt:
    """A received message with tensors that require grad: ``count`` of them."""

    sender: int
    message: MessageId
    count: int


class _Received(torch.autograd.Function):
    """The node of received tensors in the graph: a pass stops here and takes their gradients for the sender."""

    @staticmethod
    def forward(ctx: Any, receipt: Receipt, token: Tensor, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        ctx.receipt = receipt
        ctx.set_materialize_grads(False)
        return tuple(tensors)  # passed in a list, so that they are ordinary outputs and not views of inputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        catcher = _catcher()
        if catcher is not None:
            catcher.take(ctx.receipt, list(gradients))
        return None, None, None  # a backward pass of this worker alone ends here


# The catcher of this thread. torch's engine hands it on to the threads of the runs that this thread starts.
CATCHER = "mpicoll.autograd.contexts.Catcher"


def _catcher() -> Catcher | None:
    return torch._C._get_obj_in_tls(CATCHER) if torch._C._is_key_in_tls(CATCHER) else None


def _set_catcher(catcher: Catcher | None) -> None:
    """None: removes it, as torch does, because a thread that ends with such an object may block. torch <= 2.12 cannot."""
    remove = getattr(torch._C, "_remove_obj_from_tls", None)
    if catcher is None and remove is not None:
        remove(CATCHER)
    else:
        torch._C._stash_obj_in_tls(CATCHER, catcher)


class Catcher:
    """Passes the gradients of received messages to ``send`` while a run of the engine goes on, once for each message.

    They must not wait for the end of the run: DDP ends the run only after all ranks have reduced their gradients, and another
    rank may need these gradients for that.
    """

    def __init__(self, receipts: Collection[Receipt], send: Callable[[Receipt, list[Tensor | None]], None]) -> None:
        self.left = set(receipts)  # that the run has not reached
        self._send = send
        self._guard = threading.Lock()  # guards left
        self._held: list[list[Tensor | None]] = []  # kept, so that the engine does not reuse their memory before they are sent

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Catches in the runs that this thread starts in the ``with`` block."""
        before = _catcher()
        _set_catcher(self)
        try:
            yield
        finally:
            _set_catcher(before)

    def take(self, receipt: Receipt, gradients: list[Tensor | None]) -> None:
        with self._guard:
            if receipt not in self.left:
                return
            self.left.remove(receipt)
            self._held.append(gradients)
        self._send(receipt, gradients)


@dataclass(eq=False)
class Context:
    """One distributed forward and backward pass on this worker. `context` makes it; programs do not (not collective).

    Attributes:
        id: Its id, equal on all workers.
        gradients: By leaf.

    Example:
        >>> with dist_autograd.context() as context_id:
        ...     isinstance(dist_autograd._current_context(), dist_autograd.DistAutogradContext)
        True
    """

    id: int
    sends: dict[MessageId, list[GradientEdge]] = field(default_factory=dict)  # where gradients of its tensors enter the graph
    gradients: dict[Tensor, Tensor] = field(default_factory=dict)  # by leaf
    workers: set[int] = field(default_factory=set)  # ranks of those that learned of it from this one, or this one from them
    passes: dict[MessageId, Any] = field(default_factory=dict)  # backward passes under way
    guard: threading.RLock = field(default_factory=threading.RLock)  # guards everything in the context

    def _context_id(self) -> int:
        return self.id

    def _known_worker_ids(self) -> set[int]:
        return set(self.workers)


Call = Callable[[int, Callable[..., Any], tuple[Any, ...]], Future[Any]]


class Registry:
    """The state of distributed autograd in this process: its contexts, and the way to call functions on other workers.

    ``worker_id``: rank of this worker. ``ddp_modules``: see observed.py. ``lent``: see runs.py.
    """

    def __init__(self) -> None:
        self.worker_id = 0
        self._call: Call | None = None
        self._contexts: dict[int, Context] = {}  # each method makes one operation with it, which is atomic
        self._count = itertools.count()  # of contexts
        self._messages = itertools.count()
        self.ddp_modules: weakref.WeakSet[Any] = weakref.WeakSet()
        self.lent: set[int] = set()  # leaves whose ``.grad`` is lent, by `id`
        self.lent_changed = threading.Condition()  # guards lent

    def connect(self, worker_id: int, call: Call) -> None:
        """Registers this worker's rank, and the function that calls a function on another worker. Done by init_rpc."""
        self.worker_id, self._call = worker_id, call

    def call(self, worker: int, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Calls a function of this package on another worker, outside of every context and graph."""
        assert self._call is not None
        with entered(None), torch.no_grad():
            return self._call(worker, function, arguments)

    def new(self) -> Context:
        return self.find_or_make((self.worker_id << WORKER_BITS) + next(self._count))

    def new_message_id(self) -> MessageId:
        """Returns the id of a message that this worker sends, or of a backward pass that it begins."""
        return self.worker_id, next(self._messages)

    def get(self, context_id: int) -> Context | None:
        """Returns the context of this id. None: it has ended, or was never made."""
        return self._contexts.get(context_id)

    def find(self, context_id: int) -> Context:
        """Returns the context of this id. Raises RuntimeError if it has ended, or was never made."""
        context = self.get(context_id)
        if context is None:
            raise RuntimeError(f"Could not find autograd context with id: {context_id}")
        return context

    def find_or_make(self, context_id: int) -> Context:
        """Returns the context that another worker's message names."""
        return self._contexts.setdefault(context_id, Context(context_id))

    def all(self) -> list[Context]:
        return list(self._contexts.values())

    def forget(self, context_id: int) -> Context | None:
        """Removes and returns a context. The graph that it holds is freed with it."""
        return self._contexts.pop(context_id, None)

    def clear(self) -> None:
        self._contexts.clear()


registry = Registry()


def release(context_id: int) -> None:
    """Forgets the context on this worker, and on the workers that learned of it from this one."""
    context = registry.forget(context_id)
    if context is None:
        return
    for worker in context.workers - {registry.worker_id}:
        with contextlib.suppress(RuntimeError):  # a worker that has left has forgotten it
            registry.call(worker, release, context_id)


_thread = threading.local()  # context: the one that this thread's calls and answers belong to


def current() -> Context | None:
    return getattr(_thread, "context", None)


def enter(context: Context | None) -> Context | None:
    """Makes this thread's calls and answers belong to a context. Returns the one before."""
    before = current()
    _thread.context = context
    return before


@contextlib.contextmanager
def entered(context: Context | None) -> Iterator[None]:
    """`enter`, for the duration of the ``with`` block."""
    before = enter(context)
    try:
        yield
    finally:
        enter(before)


class _Touch(torch.autograd.Function):
    """A node behind any tensor. get_gradient_edge makes a view of a leaf to find its node, and sparse tensors have no views."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return torch.empty(0)


def edge_of(tensor: Tensor) -> GradientEdge:
    if tensor.layout is torch.strided:
        return get_gradient_edge(tensor)
    with torch.enable_grad():
        touched: Any = _Touch.apply(tensor)  # type: ignore[no-untyped-call]
    node, index = touched.grad_fn.next_functions[0]
    return GradientEdge(node, index, touched)  # ``touched`` keeps the node alive


Extra = tuple[int, MessageId, list[int]] | None  # id of the context, the message, indices of the tensors that require grad


def attach(tensors: list[Tensor], to: int) -> Extra:
    """Remembers the tensors of an outgoing message that require grad. Returns what the receiver must know."""
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


def of(extra: Extra) -> Context | None:
    """Returns the context of a received message. None: it belongs to none."""
    return None if extra is None else registry.find_or_make(extra[0])


def accept(tensors: list[Tensor], extra: Extra, sender: int) -> list[Tensor]:
    """Returns the tensors of a received message, with those that require grad in this worker's graph."""
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
    replaced = dict(zip(needed, wrapped, strict=True))
    return [replaced.get(i, tensor) for i, tensor in enumerate(tensors)]

"""The distributed backward pass: gradients travel the way back of the messages, and end up in the context.

    [1] find     from the roots, each worker walks its part of the graph to the messages that it had received, and asks their
                 senders to do the same from what they had sent. Afterwards everybody knows which messages take part, so that
                 an output that no loss depends on keeps nobody waiting.
    [2] flow     a worker that has all gradients that can reach a received message runs torch's engine as far as that message,
                 and sends its gradients back, once. Leaves take part in the run in which an output is used for the first time.
    [3] an answer is given when all that it has caused has been answered: when the caller has its answers, all is done.

The set-up is that of "SMART mode" in PyTorch's notes on distributed autograd, which torch itself does not have.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.futures import Future

from mpicoll.autograd import contexts
from mpicoll.autograd.contexts import Context, MessageId, Receipt

ROOTS: MessageId = (-1, -1)  # stands for the roots of the pass, among the messages

_count = itertools.count()
_accumulating = threading.Lock()

Call = Callable[[int, Callable[..., Any], tuple[Any, ...]], Future[Any]]
call: Call | None = None  # runs a function on another worker; set by init_rpc


@dataclass(eq=False)
class Pass:
    """One backward pass on one worker. Guarded by its context's guard.

    ``reaches``: for each received message, the outputs here from which it is reached; ``places``: where its tensors enter the
    graph; ``leaves``: for each output, the leaves.
    """

    outputs: dict[MessageId, list[GradientEdge]] = field(default_factory=dict)
    leaves: dict[MessageId, list[Tensor]] = field(default_factory=dict)
    reaches: dict[Receipt, set[MessageId]] = field(default_factory=dict)
    places: dict[Receipt, list[GradientEdge]] = field(default_factory=dict)
    arrived: dict[MessageId, list[Tensor | None]] = field(default_factory=dict)
    used: set[MessageId] = field(default_factory=set)  # outputs whose leaves have their share
    done: set[Receipt] = field(default_factory=set)


def backward(context_id: int, roots: Sequence[Tensor], retain_graph: bool = False) -> None:
    """Computes the gradients of the sum of the roots for every leaf on every worker, and adds them to the context's there.

    Args:   roots: tensors of one element that require grad. retain_graph: keep what a second pass needs.
    Raises: RuntimeError: no such context, roots that are no scalars or require no grad, a graph that is gone; what went wrong
            on another worker, with its own type.
    """
    context = contexts.find(context_id)
    roots = _checked(roots)
    number = (contexts.worker_id, next(_count))
    here = Pass()
    with context.guard:
        context.passes[number] = here
        here.outputs[ROOTS] = [get_gradient_edge(root) for root in roots]
    try:
        _walk(context, here, number, [ROOTS]).wait()
        _take(context, here, number, ROOTS, [torch.ones_like(root) for root in roots]).wait()
    finally:
        _end(context, number, retain_graph)


def _checked(roots: Sequence[Tensor]) -> list[Tensor]:
    if isinstance(roots, Tensor) or not all(isinstance(root, Tensor) for root in roots):
        raise TypeError("backward: roots must be a list of tensors")
    if not roots:
        raise RuntimeError("backward: no roots were given")
    for root in roots:
        if not root.requires_grad:
            raise RuntimeError("backward: a root does not require grad: requires_grad not set on root")
        if root.numel() != 1:
            raise RuntimeError(f"backward: a root has {root.numel()} elements; roots are scalars: sum it, say")
    return list(roots)


# -- [1] find ----------------------------------------------------------------------------------------------------------


def _find(number: MessageId, context_id: int, messages: list[MessageId]) -> Future[Any]:
    """Runs on the sender of these messages."""
    context = contexts.find(context_id)
    with context.guard:
        here = context.passes.setdefault(number, Pass())
        for message in messages:
            edges = context.sends.get(message)
            if edges is None:
                raise RuntimeError(
                    "Trying to backward through the graph a second time: a pass with retain_graph=False has freed what worker "
                    f"{contexts.worker_id} had sent in context {context_id}"
                )
            here.outputs[message] = edges
    return _walk(context, here, number, messages)


def _walk(context: Context, here: Pass, number: MessageId, outputs: list[MessageId]) -> Future[Any]:
    """Notes what these outputs depend on, and asks on where that was received."""
    asked: dict[int, list[MessageId]] = {}
    with context.guard:
        for output in outputs:
            leaves: dict[Tensor, None] = {}
            for node in _nodes(here.outputs[output]):
                receipt = getattr(node, "receipt", None)
                if isinstance(receipt, Receipt):
                    if receipt not in here.reaches:
                        asked.setdefault(receipt.sender, []).append(receipt.message)
                        here.places[receipt] = [GradientEdge(node, i) for i in range(receipt.count)]
                    here.reaches.setdefault(receipt, set()).add(output)
                elif (variable := getattr(node, "variable", None)) is not None:
                    leaves[variable] = None
            here.leaves[output] = list(leaves)
    return _all(_call(sender, _find, number, context.id, messages) for sender, messages in asked.items())


def _nodes(edges: Iterable[GradientEdge]) -> list[Any]:
    """Every node that gradients from these edges reach, except the tokens of received messages."""
    stack = [edge.node for edge in edges]
    seen = set(stack)
    found = []
    while stack:
        node = stack.pop()
        found.append(node)
        if isinstance(getattr(node, "receipt", None), Receipt):
            continue
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return found


# -- [2] flow ----------------------------------------------------------------------------------------------------------


def _flow(number: MessageId, context_id: int, message: MessageId, gradients: list[Tensor | None]) -> Future[Any]:
    """Runs on the sender of this message."""
    context = contexts.find(context_id)
    return _take(context, context.passes[number], number, message, gradients)


def _take(context: Context, here: Pass, number: MessageId, output: MessageId, gradients: list[Tensor | None]) -> Future[Any]:
    """Gradients of an output are here: runs what had waited for them."""
    answers = []
    with context.guard:
        here.arrived[output] = gradients
        runs: dict[frozenset[MessageId], list[Receipt]] = {}
        for receipt, needs in here.reaches.items():
            if receipt not in here.done and needs <= here.arrived.keys():
                here.done.add(receipt)
                runs.setdefault(frozenset(needs), []).append(receipt)
        if not any(output in needs for needs in here.reaches.values()):
            runs[frozenset([output])] = []
        plans = [_plan(here, needs, receipts) for needs, receipts in runs.items()]
    for plan in plans:
        for outputs, receipts, leaves in plan:
            gradients_of = _run(context, here, outputs, receipts, leaves)
            for receipt in receipts:
                answers.append(_call(receipt.sender, _flow, number, context.id, receipt.message, gradients_of[receipt]))
    return _all(answers)


_function: Any
for _function in (_find, _flow):  # answered when their future is, see mpicoll.rpc.functions.async_execution
    _function._wrapped_async_rpc_function = _function

Run = tuple[list[MessageId], list[Receipt], list[Tensor]]


def _plan(here: Pass, needs: frozenset[MessageId], receipts: list[Receipt]) -> list[Run]:
    """The engine's runs for these receipts: one, unless some of the outputs have given the leaves their share before."""
    fresh = [output for output in needs if output not in here.used]
    here.used.update(fresh)
    leaves = list(dict.fromkeys(leaf for output in fresh for leaf in here.leaves[output]))
    if len(fresh) == len(needs):
        return [(fresh, receipts, leaves)]
    return [(list(needs), receipts, []), (fresh, [], leaves)]


def _run(
    context: Context, here: Pass, outputs: list[MessageId], receipts: list[Receipt], leaves: list[Tensor]
) -> dict[Receipt, list[Tensor | None]]:
    """The leaves' gradients go to the context; returns those of the received messages."""
    pairs = [
        (edge, gradient)
        for output in outputs
        for edge, gradient in zip(here.outputs[output], here.arrived[output], strict=True)
        if gradient is not None
    ]
    inputs = [*(place for receipt in receipts for place in here.places[receipt]), *leaves]
    if not pairs or not inputs:
        return {receipt: [None] * receipt.count for receipt in receipts}
    edges, given = zip(*pairs, strict=True)
    with torch.enable_grad():  # a handler's thread may be under no_grad
        answers = torch.autograd.grad(edges, inputs, given, retain_graph=True, allow_unused=True)  # type: ignore[arg-type]
    found: list[Tensor | None] = list(answers)
    del answers  # see _held_by_nobody_else
    received = {receipt: [found.pop(0) for _ in range(receipt.count)] for receipt in receipts}
    with _accumulating:
        for leaf in reversed(leaves):
            _add(context.gradients, leaf, found)
    return received


def _add(gradients: dict[Tensor, Tensor], leaf: Tensor, found: list[Tensor | None]) -> None:
    """Takes the last of ``found``. Never changes what was there before, which somebody may have been given."""
    before, alone = gradients.get(leaf), _held_by_nobody_else(found)
    new = found.pop()
    if new is None:
        return
    if before is None:
        gradients[leaf] = new.detach() if alone and new.is_contiguous() else new.detach().clone()
    elif alone and before.layout is torch.strided:
        gradients[leaf] = new.detach().add_(before)  # fresh memory would cost more than the sum
    else:
        gradients[leaf] = before + new


def _held_by_nobody_else(found: list[Tensor | None]) -> bool:
    """Whether the last of them is in no other hands: not in Python's, C++'s (a graph that has saved it), or under a view."""
    if sys.getrefcount(found[-1]) > 2:  # the list and the call
        return False
    gradient = found[-1]
    if gradient is None or gradient.layout is not torch.strided or gradient._use_count() > 1:  # type: ignore[attr-defined]
        return False
    storage = gradient.untyped_storage()
    return bool(torch._C._storage_Use_Count(storage._cdata) <= 2)  # the tensor and ``storage``


# -- [3] the end -------------------------------------------------------------------------------------------------------


def _end(context: Context, number: MessageId, retain_graph: bool) -> None:
    """Forgets the pass here and on every worker that took part, and what it used, unless it is to be retained."""
    with context.guard:
        here = context.passes.pop(number, None)
        if here is None:
            return
        if not retain_graph:
            for message in here.outputs:
                context.sends.pop(message, None)
    for sender in {receipt.sender for receipt in here.reaches}:
        _call(sender, _end_there, number, context.id, retain_graph).wait()


def _end_there(number: MessageId, context_id: int, retain_graph: bool) -> None:
    context = contexts._contexts.get(context_id)
    if context is not None:
        _end(context, number, retain_graph)


def _call(worker: int, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
    assert call is not None
    with contexts.entered(None), torch.no_grad():  # gradients are no part of the graph
        return call(worker, function, arguments)


def _all(futures: Iterable[Future[Any]]) -> Future[Any]:
    """One future of no value; the first error among them is its error."""
    waiting = list(futures)
    whole: Future[Any] = Future()
    errors: list[Exception] = []
    left = itertools.count(len(waiting) - 1, -1)

    def ended(future: Future[Any]) -> None:
        try:
            future.value()
        except Exception as error:  # noqa: BLE001  it is the whole's
            error.__traceback__ = None  # its frames hold the future that holds it
            errors.append(error)
        if next(left) == 0:
            if errors:
                whole.set_exception(errors[0])
            else:
                whole.set_result(None)

    for future in waiting:
        future.add_done_callback(ended)
    if not waiting:
        whole.set_result(None)
    return whole

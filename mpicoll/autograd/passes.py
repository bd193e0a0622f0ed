"""The distributed backward pass: gradients travel back along the messages and are collected in the context.

    [1] find     From the roots, each worker walks its part of the graph to the messages that it received, and asks their senders
                 to do the same from the tensors that they sent. Afterwards every worker knows which messages take part, so that
                 it does not wait for the gradient of an output that no loss depends on.
    [2] flow     A worker waits until it has all gradients that can reach a received message. Then it runs torch's engine as far
                 as that message and sends the gradients back, once. Leaves take part in the first run that uses an output they
                 lead to. Leaves that DDP or hooks observe take part once, in a run that has their whole gradients (observed.py).
    [3] end      A call is answered after all calls that it has caused have been answered. So when the caller has its answers,
                 the whole pass is done, and every worker forgets it.

This is the "SMART mode" of PyTorch's notes on distributed autograd, which torch itself does not implement.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.futures import Future

from mpicoll._base.errors import MpicollError
from mpicoll.autograd import contexts
from mpicoll.autograd.contexts import Context, MessageId, Receipt
from mpicoll.autograd.observed import Observed, Observers, install
from mpicoll.autograd.runs import Run

_collect_all = torch._C._collect_all  # torch's, which waits for all: that of mpicoll.rpc ends at the first error
ROOTS: MessageId = (-1, -1)  # stands for the roots of the pass, among the messages

install()


@dataclass(eq=False)
class Pass:
    """One backward pass on one worker. Guarded by the guard of its context.

    An output is a group of tensors that this worker has sent, or the roots; it is named by its message.
    """

    outputs: dict[MessageId, list[GradientEdge]] = field(default_factory=dict)  # where their gradients enter the graph
    leaves: dict[MessageId, list[Tensor]] = field(default_factory=dict)  # that an output leads to, and that nothing observes
    reaches: dict[Receipt | Observed, set[MessageId]] = field(default_factory=dict)  # the outputs that lead to each target
    places: dict[Receipt, list[GradientEdge]] = field(default_factory=dict)  # where received tensors are in the graph
    arrived: dict[MessageId, list[Tensor | None]] = field(default_factory=dict)  # gradients of outputs, once they are here
    used: set[MessageId] = field(default_factory=set)  # outputs whose gradients the leaves have received
    done: set[Receipt | Observed] = field(default_factory=set)  # targets whose run has begun
    observers: Observers = field(default_factory=Observers)


def backward(context_id: int, roots: Sequence[Tensor], retain_graph: bool = False) -> None:
    """Computes the gradients of the sum of the roots for every leaf on every worker, and adds them to the context there.

    Returns when all workers have done their part. One worker calls it (not collective); the others take part in their threads.

    Args:
        context_id: From `context`.
        roots: Tensors of one element that depend on a tensor that requires grad.
        retain_graph: Keep what a second pass needs.

    Raises:
        RuntimeError: There is no such context; a root has several elements or depends on nothing; the graph has been freed; or
            another worker failed: "Error on Node 2: ...", with its traceback. An error on this worker keeps its type.
        TypeError: The roots are not a list of tensors, or context_id is not an int.

    Example:
        >>> x = torch.tensor([2.0], requires_grad=True)
        >>> with dist_autograd.context() as context_id:
        ...     y = rpc.rpc_sync("worker1", torch.mul, (x, x))
        ...     dist_autograd.backward(context_id, [y])
        ...     dist_autograd.get_gradients(context_id)[x]
        tensor([4.])
    """
    if not isinstance(context_id, int):
        raise TypeError(f"backward(): incompatible function arguments: context_id must be an int, got {context_id!r}")
    context = contexts.registry.find(context_id)
    roots = _checked(roots)
    number = contexts.registry.new_message_id()
    current = Pass()
    with context.guard:
        context.passes[number] = current
        current.outputs[ROOTS] = [contexts.edge_of(root) for root in roots]
    try:
        with torch.profiler.record_function("torch::distributed::autograd::backward"):
            _walk(context, current, number, [ROOTS]).wait()
            _take(context, current, number, ROOTS, [torch.ones_like(root) for root in roots]).wait()
    finally:
        _end(number, context_id, retain_graph)


def _checked(roots: Sequence[Tensor]) -> list[Tensor]:
    """Returns the roots. Error texts are torch's, because programs match them."""
    if not isinstance(roots, Iterable) or isinstance(roots, Tensor) or not all(isinstance(root, Tensor) for root in roots):
        kinds = type(roots).__name__ if isinstance(roots, Tensor) or not isinstance(roots, Iterable) else [*map(type, roots)]
        raise TypeError(f"backward(): incompatible function arguments: roots must be a list of tensors, got {kinds}")
    if not roots:
        raise RuntimeError("backward: No tensors provided for gradient computation: roots is empty")
    for root in roots:
        if not root.requires_grad:
            raise RuntimeError("backward: requires_grad not set on a root: it does not depend on anything that requires grad")
        if root.numel() != 1:
            raise RuntimeError(
                f"backward: a root of shape {tuple(root.shape)} is not a scalar, all roots need to be scalar; sum it, say"
            )
        if root.grad_fn is None:
            raise RuntimeError("backward: a root does not have a valid gradient function: it is a leaf, the result of nothing")
    return list(roots)


# -- [1] find ----------------------------------------------------------------------------------------------------------


def _called_by_receiver(function: Any) -> Any:
    """Lets the call be answered later (async_execution of mpicoll.rpc.functions, which is above). Errors name this worker."""

    @functools.wraps(function)
    def named(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except MpicollError:  # a worker has left, or RPC has ended
            raise
        except Exception as error:
            raise RuntimeError(f"Error on Node {contexts.registry.worker_id}: {error}") from error

    named._wrapped_async_rpc_function = function  # type: ignore[attr-defined]
    return named


@_called_by_receiver
def _find(number: MessageId, context_id: int, messages: list[MessageId]) -> Future[Any]:
    context = contexts.registry.find(context_id)
    with context.guard:
        current = context.passes.get(number) or context.passes.setdefault(number, Pass())
        for message in messages:
            edges = context.sends.get(message)
            if edges is None:
                raise RuntimeError(
                    "Trying to backward through the graph a second time: a pass with retain_graph=False has freed what worker "
                    f"{contexts.registry.worker_id} had sent in context {context_id}"
                )
            current.outputs[message] = edges
    return _walk(context, current, number, messages)


def _walk(context: Context, current: Pass, number: MessageId, outputs: list[MessageId]) -> Future[Any]:
    """Notes what these outputs lead to, and asks the senders of the received messages among it to do the same."""
    asked: dict[int, list[MessageId]] = {}
    with context.guard:
        for output in outputs:
            leaves: dict[Tensor, None] = {}
            for node in _nodes(current.outputs[output]):
                receipt = getattr(node, "receipt", None)
                if isinstance(receipt, Receipt):
                    if receipt not in current.reaches:
                        asked.setdefault(receipt.sender, []).append(receipt.message)
                        current.places[receipt] = [GradientEdge(node, i) for i in range(receipt.count)]
                    current.reaches.setdefault(receipt, set()).add(output)
                elif (variable := getattr(node, "variable", None)) is not None:
                    observed = current.observers.of(variable, node)
                    if observed is None:
                        leaves[variable] = None
                    else:
                        current.reaches.setdefault(observed, set()).add(output)
            current.leaves[output] = list(leaves)
    return _all(contexts.registry.call(sender, _find, number, context.id, messages) for sender, messages in asked.items())


def _nodes(edges: Iterable[GradientEdge]) -> list[Any]:
    """Returns every node that gradients from these edges reach. Does not go beyond the nodes of received messages."""
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


@_called_by_receiver
def _flow(number: MessageId, context_id: int, message: MessageId, gradients: list[Tensor | None]) -> Future[Any]:
    context = contexts.registry.find(context_id)
    current = context.passes.get(number)
    if current is None:
        raise RuntimeError("the backward pass has ended; an error on another worker has ended it")
    return _take(context, current, number, message, gradients)


def _take(context: Context, current: Pass, number: MessageId, output: MessageId, gradients: list[Tensor | None]) -> Future[Any]:
    """Adds the gradients of an output, and runs everything that has waited for them."""
    answers: list[Future[Any]] = []

    def send(receipt: Receipt, gradients: list[Tensor | None]) -> None:
        answers.append(contexts.registry.call(receipt.sender, _flow, number, context.id, receipt.message, gradients))

    with context.guard:
        current.arrived[output] = gradients
        runs: dict[frozenset[MessageId], list[Receipt | Observed]] = {}
        for target, needs in current.reaches.items():
            if target not in current.done and needs <= current.arrived.keys():
                current.done.add(target)
                runs.setdefault(frozenset(needs), []).append(target)
        if not any(output in needs for needs in current.reaches.values()):
            runs[frozenset([output])] = []
        plans = [run for needs, targets in runs.items() for run in _plan(current, needs, targets)]
    for run in plans:
        run(context, send)
    return _all(answers)


def _plan(current: Pass, needs: frozenset[MessageId], targets: list[Receipt | Observed]) -> list[Run]:
    """Returns the runs of the engine for these targets: one, or two if the leaves have received some of the gradients before."""
    _check_static(current, needs, targets)
    fresh = [output for output in needs if output not in current.used]
    current.used.update(fresh)
    leaves = list(dict.fromkeys(leaf for output in fresh for leaf in current.leaves[output]))
    places = {target: current.places[target] for target in targets if isinstance(target, Receipt)}
    observed = [target for target in targets if isinstance(target, Observed)]
    if len(fresh) == len(needs):
        return [Run(_roots(current, fresh), places, leaves, observed)]
    return [Run(_roots(current, needs), places, [], observed), Run(_roots(current, fresh), {}, leaves)]


def _roots(current: Pass, outputs: Iterable[MessageId]) -> list[tuple[GradientEdge, Tensor]]:
    return [
        (edge, gradient)
        for output in outputs
        for edge, gradient in zip(current.outputs[output], current.arrived[output], strict=True)
        if gradient is not None
    ]


def _check_static(current: Pass, needs: frozenset[MessageId], targets: list[Receipt | Observed]) -> None:
    """Checks that one run reaches all of a DDP module with a static graph: DDP reduces it at the end of the first run."""
    for target, others in current.reaches.items():
        if isinstance(target, Observed) and target not in targets and needs & others and target.queues_reduction():
            raise RuntimeError(
                "backward: DistributedDataParallel(static_graph=True) in a distributed autograd context: in its first iteration, "
                f"the gradients of its outputs must reach this worker together, but they come by {len(others)} messages; return "
                "what the module computes in one answer, or leave static_graph out"
            )


# -- [3] the end -------------------------------------------------------------------------------------------------------


def _end(number: MessageId, context_id: int, retain_graph: bool) -> None:
    """Forgets the pass on every worker that took part, and the graph that it used unless ``retain_graph``."""
    context = contexts.registry.get(context_id)
    if context is None:
        return
    with context.guard:
        current = context.passes.pop(number, None)
        if current is None:
            return
        if not retain_graph:
            for message in current.outputs:
                context.sends.pop(message, None)
    for sender in {receipt.sender for receipt in current.places}:
        contexts.registry.call(sender, _end, number, context_id, retain_graph).wait()


def _all(futures: Iterable[Future[Any]]) -> Future[Any]:
    """Returns a future that completes without a value after all of these, or with the first error among them."""
    whole: Future[Any] = Future()

    def ended(collected: torch._C.Future[Any]) -> None:
        try:
            for future in collected.value():
                future.value()
            whole.set_result(None)
        except Exception as error:  # noqa: BLE001  raised where the result is waited for
            error.__traceback__ = None  # its frames hold the future that holds it
            whole.set_exception(error)

    _collect_all(list(futures)).add_done_callback(ended)
    return whole

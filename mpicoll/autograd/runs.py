"""One run of torch's engine in a backward pass: from the gradients of outputs to received messages and leaves.

If nothing observes the leaves, `torch.autograd.grad` computes their gradients without touching ``.grad``, so that passes of many
contexts can run at the same time. Otherwise see Note [DDP in a distributed backward pass] in observed.py.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from mpicoll.autograd.contexts import Catcher, Context, Receipt, registry
from mpicoll.autograd.observed import Observed, check_reduced

Send = Callable[[Receipt, list[Tensor | None]], None]


@contextlib.contextmanager
def lent(leaves: Sequence[Tensor], gradients: Sequence[Tensor | None], overwritten: bool = False) -> Iterator[None]:
    """Sets the ``.grad`` of each leaf to this gradient, and back to the earlier one at the end.

    A leaf is lent to one user at a time: an optimizer's step, or a run that writes to it. Waits until none of the leaves is lent,
    then holds all of them. Never some, so two users cannot wait in a circle.

    Args:
        overwritten: The memory of the earlier ``.grad`` will be written to; keep a copy of it.
    """
    ids = {id(leaf) for leaf in leaves}
    with registry.lent_changed:
        registry.lent_changed.wait_for(lambda: registry.lent.isdisjoint(ids))
        registry.lent.update(ids)
    before = [leaf.grad for leaf in leaves]
    try:
        if overwritten:
            before = [None if gradient is None else gradient.clone() for gradient in before]
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient
        yield
    finally:
        for leaf, gradient in zip(leaves, before, strict=True):
            leaf.grad = gradient
        with registry.lent_changed:
            registry.lent.difference_update(ids)
            registry.lent_changed.notify_all()


@dataclass(eq=False)
class Run:
    """What to compute gradients for: received messages and leaves."""

    roots: list[tuple[GradientEdge, Tensor]]  # outputs with their gradients
    places: dict[Receipt, list[GradientEdge]] = field(default_factory=dict)  # received messages, and where they are in the graph
    leaves: list[Tensor] = field(default_factory=list)  # that nothing observes
    observed: list[Observed] = field(default_factory=list)  # leaves that DDP or hooks observe

    def __call__(self, context: Context, send: Send) -> None:
        """Runs. Adds the gradients of the leaves to the context, and calls ``send`` once for each received message."""
        leaves = [*self.leaves, *(leaf for those in self.observed for leaf in those.leaves)]
        if not self.roots or not (self.places or leaves):
            for receipt in self.places:
                send(receipt, [None] * receipt.count)
            return
        with torch.enable_grad():  # the thread may be in no_grad mode
            if any(those.lent for those in self.observed):
                self._accumulate(context, leaves, send)
            else:
                self._take(context, leaves, send)

    def _take(self, context: Context, leaves: list[Tensor], send: Send) -> None:
        edges, given = zip(*self.roots, strict=True)
        inputs: list[Any] = [*(place for places in self.places.values() for place in places), *leaves]
        answers = torch.autograd.grad(edges, inputs, given, retain_graph=True, allow_unused=True)
        found: list[Tensor | None] = list(answers)
        del answers  # see _held_by_nobody_else
        received = {receipt: [found.pop(0) for _ in places] for receipt, places in self.places.items()}
        with context.guard:
            for leaf in reversed(leaves):
                _add(context.gradients, leaf, found)
        for receipt, gradients in received.items():
            send(receipt, gradients)

    def _accumulate(self, context: Context, leaves: list[Tensor], send: Send) -> None:
        edges, given = zip(*self.roots, strict=True)
        inputs: list[Any] = [*(places[0] for places in self.places.values()), *leaves]
        whole = list(dict.fromkeys(parameter for those in self.observed for parameter in those.lent))
        others = [leaf for leaf in leaves if leaf not in set(whole)]
        with context.guard:
            start = [context.gradients.get(leaf) for leaf in whole]
        # AccumulateGrad adds in place, and the program may hold the earlier gradient.
        start = [None if gradient is None else gradient.clone() for gradient in start]
        overwrites = any(those.overwrites() for those in self.observed)
        before = [times for those in self.observed for times in those.ready()]
        catcher = Catcher(self.places, send)
        with lent([*whole, *others], [*start, *[None] * len(others)], overwrites):
            with catcher.open():
                torch.autograd.backward(edges, given, retain_graph=True, inputs=inputs)
            check_reduced(before)
            with context.guard:
                context.gradients.update((leaf, leaf.grad) for leaf in whole if leaf.grad is not None)
                for leaf in others:
                    found, leaf.grad = [leaf.grad], None
                    _add(context.gradients, leaf, found)
        for receipt in catcher.left:
            send(receipt, [None] * receipt.count)


def _add(gradients: dict[Tensor, Tensor], leaf: Tensor, found: list[Tensor | None]) -> None:
    """Removes the last gradient of ``found`` and adds it. Never changes the earlier gradient, which the program may hold."""
    before, alone = gradients.get(leaf), _held_by_nobody_else(found)
    new = found.pop()
    if new is None:
        return
    if before is None:
        gradients[leaf] = _handed_on(new.detach()) if alone else new.detach().clone()
    elif alone and before.layout is new.layout is torch.strided:
        gradients[leaf] = new.detach().add_(before)  # fresh memory would cost more than the sum
    else:
        gradients[leaf] = before + new if before.layout is torch.strided else new + before  # torch takes the dense one first


def _handed_on(new: Tensor) -> Tensor:
    """Returns it contiguous, if possible without a copy. Indices of a sparse one are copied: they may be input of the program."""
    if new.layout is torch.strided:
        return new if new.is_contiguous() else new.clone()
    indices, values = new._indices().clone(), new._values()
    if not values.is_contiguous():
        values = values.clone(memory_format=torch.contiguous_format)
    return torch.sparse_coo_tensor(indices, values, new.shape, is_coalesced=new.is_coalesced(), check_invariants=False)


def _held_by_nobody_else(found: list[Tensor | None]) -> bool:
    """Returns whether no Python object, C++ object (a graph) or view refers to the last (if sparse: to its values)."""
    if sys.getrefcount(found[-1]) > 2:  # the list and the argument
        return False
    gradient = found[-1]
    if gradient is None or gradient._use_count() > 1:  # type: ignore[attr-defined]
        return False
    if gradient.layout is torch.strided:
        storage, holders = gradient.untyped_storage(), 2  # the tensor and ``storage``
    elif gradient.layout is torch.sparse_coo:
        values = gradient._values()
        storage, holders = values.untyped_storage(), 3  # the sparse tensor's values, the view of them, and ``storage``
    else:
        return False
    return bool(torch._C._storage_Use_Count(storage._cdata) <= holders)

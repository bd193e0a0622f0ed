"""Lends the ``.grad`` of leaves to one user at a time: an optimizer's step, or a run of torch's engine that writes to it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

from torch import Tensor


class _Lender:
    """Knows the leaves whose ``.grad`` is lent, by `id`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()  # guards _lent
        self._lent: set[int] = set()

    @contextlib.contextmanager
    def lent(self, leaves: Sequence[Tensor], gradients: Sequence[Tensor | None], overwritten: bool = False) -> Iterator[None]:
        """Sets the ``.grad`` of each leaf to this gradient, and back to the earlier one at the end.

        Waits until none of the leaves is lent, then holds all of them. Never some, so two users cannot wait in a circle.

        Args:
            overwritten: The memory of the earlier ``.grad`` will be written to; keep a copy of it.
        """
        ids = {id(leaf) for leaf in leaves}
        with self._changed:
            self._changed.wait_for(lambda: self._lent.isdisjoint(ids))
            self._lent.update(ids)
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
            with self._changed:
                self._lent.difference_update(ids)
                self._changed.notify_all()


lent = _Lender().lent

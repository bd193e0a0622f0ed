"""The ``.grad`` of leaves, lent to one user at a time: an optimizer's step, or a run of torch's engine that writes to it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence

from torch import Tensor

_changed = threading.Condition()  # guards _lent
_lent: set[int] = set()  # ids of the leaves whose .grad is lent


@contextlib.contextmanager
def lent(leaves: Sequence[Tensor], gradients: Sequence[Tensor | None], overwritten: bool = False) -> Iterator[None]:
    """While it lasts, each leaf's ``.grad`` starts as this gradient; afterwards it is what it was before.

    Waits until none of the leaves is lent. It takes all of them or none, so that two users never wait for each other.

    Args:
        overwritten: The memory of the earlier ``.grad`` will be written to; keep a copy of it.
    """
    ids = {id(leaf) for leaf in leaves}
    with _changed:
        _changed.wait_for(lambda: _lent.isdisjoint(ids))
        _lent.update(ids)
    try:
        before = [leaf.grad for leaf in leaves]
        if overwritten:
            before = [None if gradient is None else gradient.clone() for gradient in before]
        try:
            for leaf, gradient in zip(leaves, gradients, strict=True):
                leaf.grad = gradient
            yield
        finally:
            for leaf, gradient in zip(leaves, before, strict=True):
                leaf.grad = gradient
    finally:
        with _changed:
            _lent.difference_update(ids)
            _changed.notify_all()

"""Distributed autograd over mpicoll.rpc: ``import mpicoll.autograd as dist_autograd`` in the place of torch.distributed.autograd.

contexts.py remembers which tensors went from worker to worker, passes.py takes gradients the way back.
"""

from __future__ import annotations

from types import TracebackType

from torch import Tensor

from mpicoll.autograd import contexts as _contexts
from mpicoll.autograd.passes import backward
from mpicoll.autograd.release import release

__all__ = ["backward", "context", "get_gradients", "is_available"]


def is_available() -> bool:
    """True: mpicoll.rpc is all that it needs."""
    return True


def get_gradients(context_id: int) -> dict[Tensor, Tensor]:
    """This worker's gradients of that context, by leaf. Raises: RuntimeError: there is no such context."""
    return dict(_contexts.find(context_id).gradients)


class context:
    """``with context() as context_id:`` around the forward and backward pass; its gradients are gone afterwards, everywhere."""

    def __enter__(self) -> int:
        if _contexts.current() is not None:
            raise RuntimeError("Already have an autograd context id for this thread")
        self._context = _contexts.new()
        self._entered = _contexts.entered(self._context)
        self._entered.__enter__()
        return self._context.id

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._entered.__exit__(kind, error, trace)
        release(self._context.id)

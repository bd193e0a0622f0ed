"""Distributed autograd over mpicoll.rpc: ``import mpicoll.autograd as dist_autograd`` in the place of torch.distributed.autograd.

contexts.py remembers which tensors went from worker to worker, passes.py takes gradients the way back.
"""

from __future__ import annotations

from types import TracebackType

from torch import Tensor

from mpicoll.autograd import contexts as _contexts
from mpicoll.autograd.contexts import Context as DistAutogradContext
from mpicoll.autograd.passes import backward
from mpicoll.autograd.release import release as _release

__all__ = ["DistAutogradContext", "backward", "context", "get_gradients", "is_available"]


def is_available() -> bool:
    """True: mpicoll.rpc is all that it needs."""
    return True


def get_gradients(context_id: int) -> dict[Tensor, Tensor]:
    """This worker's gradients of that context, by leaf. Raises: RuntimeError: there is no such context."""
    return dict(_contexts.registry.find(context_id).gradients)


class context:
    """``with context() as context_id:`` around the forward and backward pass; its gradients are gone afterwards, everywhere."""

    def __enter__(self) -> int:
        self.autograd_context = _new_context()
        return self.autograd_context.id

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _release_context(self.autograd_context.id)


# -- what torch's module has besides, for programs that use it ---------------------------------------------------------


def _new_context() -> DistAutogradContext:
    """One for this thread. Raises: RuntimeError: it has one."""
    if _contexts.current() is not None:
        raise RuntimeError("Already have an autograd context id for this thread")
    made = _contexts.registry.new()
    _contexts.enter(made)
    return made


def _release_context(context_id: int) -> None:
    """Forgets it, everywhere."""
    now = _contexts.current()
    if now is not None and now.id == context_id:
        _contexts.enter(None)
    _release(context_id)


def _current_context() -> DistAutogradContext:
    """This thread's. Raises: RuntimeError: it has none."""
    now = _contexts.current()
    if now is None:
        raise RuntimeError(
            "Couldn't retrieve the autograd context: this thread is in none; use `with mpicoll.autograd.context() as context_id:`"
        )
    return now


def _retrieve_context(context_id: int) -> DistAutogradContext:
    return _contexts.registry.find(context_id)


def _is_valid_context(context_id: int) -> None:
    """Raises: RuntimeError: there is none of this id."""
    _contexts.registry.find(context_id)


def _get_max_id() -> int:
    """The last id that this worker could give."""
    return (_contexts.registry.worker_id << _contexts.WORKER_BITS) + (1 << _contexts.WORKER_BITS) - 1


def _get_debug_info() -> dict[str, str]:
    """How many there are on this worker."""
    contexts = _contexts.registry.all()
    passes = sum(len(context.passes) for context in contexts)
    return {"num_current_backward_passes": str(passes), "num_autograd_contexts": str(len(contexts))}

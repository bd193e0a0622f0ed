"""Distributed autograd over mpicoll.rpc: ``import mpicoll.autograd as dist_autograd`` instead of torch.distributed.autograd.

contexts.py remembers which tensors travelled from worker to worker, and passes.py sends their gradients back.
"""

from __future__ import annotations

from torch import Tensor

from mpicoll.autograd import contexts as _contexts
from mpicoll.autograd.contexts import Context as DistAutogradContext
from mpicoll.autograd.passes import backward

__all__ = ["DistAutogradContext", "backward", "context", "get_gradients", "is_available"]


def is_available() -> bool:
    """Returns True (not collective): it needs only mpicoll.rpc.

    Example:
        >>> dist_autograd.is_available()
        True
    """
    return True


def get_gradients(context_id: int) -> dict[Tensor, Tensor]:
    """Returns the gradients that this worker has in a context, by leaf (not collective).

    Args:
        context_id: From `context`.

    Returns:
        A new dictionary. Leaves without a gradient are not in it. ``.grad`` is not touched.

    Raises:
        RuntimeError: There is no such context.

    Example:
        >>> weight = torch.ones(2, requires_grad=True)
        >>> with dist_autograd.context() as context_id:
        ...     loss = rpc.rpc_sync("worker1", torch.mul, (weight, 3.0)).sum()
        ...     dist_autograd.backward(context_id, [loss])
        ...     dist_autograd.get_gradients(context_id)[weight]
        tensor([3., 3.])
    """
    return dict(_contexts.registry.find(context_id).gradients)


class context:
    """A context manager for one distributed forward and backward pass; gives the id of the context (not collective).

    Remote calls of this thread inside the block take part in autograd. When the block ends, every worker forgets the context and
    its gradients.

    Raises:
        RuntimeError: This thread is in a context already.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> with dist_autograd.context() as context_id:
        ...     loss = rpc.rpc_sync("worker1", torch.add, (x, x)).sum()
        ...     dist_autograd.backward(context_id, [loss])
    """

    def __enter__(self) -> int:
        self.autograd_context = _new_context()
        return self.autograd_context.id

    def __exit__(self, *error: object) -> None:
        _release_context(self.autograd_context.id)


# -- private names of torch's module, for programs that use them ---------------------------------------------------------


def _new_context() -> DistAutogradContext:
    if _contexts.current() is not None:
        raise RuntimeError("Already have an autograd context id for this thread")
    made = _contexts.registry.new()
    _contexts.enter(made)
    return made


def _release_context(context_id: int) -> None:
    now = _contexts.current()
    if now is not None and now.id == context_id:
        _contexts.enter(None)
    _contexts.release(context_id)


def _current_context() -> DistAutogradContext:
    now = _contexts.current()
    if now is None:
        raise RuntimeError(
            "Couldn't retrieve the autograd context: this thread is in none; use `with mpicoll.autograd.context() as context_id:`"
        )
    return now


_retrieve_context = _contexts.registry.find


def _is_valid_context(context_id: int) -> None:
    _contexts.registry.find(context_id)


def _get_max_id() -> int:
    """Returns the largest id that a context of this worker can have."""
    return (_contexts.registry.worker_id << _contexts.WORKER_BITS) + (1 << _contexts.WORKER_BITS) - 1


def _get_debug_info() -> dict[str, str]:
    contexts = _contexts.registry.all()
    passes = sum(len(context.passes) for context in contexts)
    return {"num_current_backward_passes": str(passes), "num_autograd_contexts": str(len(contexts))}

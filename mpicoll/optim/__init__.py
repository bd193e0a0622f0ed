"""torch.distributed.optim, with a DistributedOptimizer for RRefs of mpicoll.rpc. All other names are torch's own objects.

It is one optimizer for parameters on many workers: a local optimizer on each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mpicoll import autograd, rpc
from mpicoll.autograd.runs import lent
from mpicoll.rpc import RRef

__all__ = ["DistributedOptimizer", "PostLocalSGDOptimizer", "ZeroRedundancyOptimizer", "as_functional_optim"]

if TYPE_CHECKING:
    from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer, as_functional_optim
else:  # with this function, a name that is not there would be of type Any to a type checker

    def __getattr__(name: str) -> Any:
        if name == "optimizer":
            raise AttributeError("module 'mpicoll.optim' has no attribute 'optimizer': torch's is for its own RPC")
        import torch.distributed.optim

        return getattr(torch.distributed.optim, name)


class _Local:
    """The optimizer of one worker, for the parameters that it owns."""

    def __init__(self, kind: Any, rrefs: Sequence[RRef[Tensor]], *arguments: Any, **keywords: Any) -> None:
        self.parameters = [rref.local_value() for rref in rrefs]
        self.optimizer: torch.optim.Optimizer = kind(self.parameters, *arguments, **keywords)

    def step(self, context_id: int) -> None:
        """Makes one step with the gradients of the context. ``.grad`` keeps its value."""
        gradients = autograd.get_gradients(context_id)
        with lent(self.parameters, [gradients.get(parameter) for parameter in self.parameters]):
            self.optimizer.step()


class DistributedOptimizer:
    """Optimizes parameters on any workers, with the gradients of a distributed autograd context (not collective).

    Args:
        optimizer_class: Any torch optimizer. One is made on each worker that owns some of the parameters.
        params_rref: RRefs to the parameters.
        args: Further arguments of the optimizer.
        kwargs: Keyword arguments of the optimizer.

    Raises:
        ValueError: ``params_rref`` is empty.
        Exception: What the constructor of an optimizer raised, with its type.

    Example:
        >>> weight = torch.ones(2, requires_grad=True)
        >>> optimizer = dist.optim.DistributedOptimizer(torch.optim.SGD, [rpc.RRef(weight)], lr=0.5)
        >>> with dist_autograd.context() as context_id:
        ...     dist_autograd.backward(context_id, [rpc.rpc_sync("worker1", torch.mul, (weight, 2.0)).sum()])
        ...     optimizer.step(context_id)
        >>> weight.tolist()
        [0.0, 0.0]
    """

    def __init__(self, optimizer_class: Any, params_rref: Sequence[RRef[Tensor]], *args: Any, **kwargs: Any) -> None:
        by_owner: dict[Any, list[RRef[Tensor]]] = {}
        for rref in params_rref:
            by_owner.setdefault(rref.owner(), []).append(rref)
        if not by_owner:
            raise ValueError("DistributedOptimizer: params_rref is empty")
        self.remote_optimizers = [
            rpc.remote(owner, _Local, (optimizer_class, rrefs, *args), kwargs) for owner, rrefs in by_owner.items()
        ]
        for optimizer in self.remote_optimizers:
            optimizer._get_type()  # raises what its constructor raised

    def step(self, context_id: int) -> None:
        """Makes one step on every worker and waits for all of them. On each worker, concurrent steps run one after the other.

        Args:
            context_id: From mpicoll.autograd.context.

        Raises:
            RuntimeError: There is no such context.
            Exception: What a local optimizer raised, with its type.
        """
        autograd.get_gradients(context_id)
        steps = [optimizer.rpc_async().step(context_id) for optimizer in self.remote_optimizers]
        for future in steps:
            future.wait()

"""One optimizer for parameters on many workers: a local one on each, all stepped at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mpicoll import autograd, rpc
from mpicoll.autograd.lending import lent
from mpicoll.rpc import RRef


class _Local:
    """A worker's own optimizer, for the parameters that are there."""

    def __init__(self, kind: Any, rrefs: Sequence[RRef[Tensor]], *arguments: Any, **keywords: Any) -> None:
        self.parameters = [rref.local_value() for rref in rrefs]
        self.optimizer: torch.optim.Optimizer = kind(self.parameters, *arguments, **keywords)

    def step(self, context_id: int) -> None:
        """With the context's gradients in the place of ``.grad``, which is what it was afterwards."""
        gradients = autograd.get_gradients(context_id)
        with lent(self.parameters, [gradients.get(parameter) for parameter in self.parameters]):
            self.optimizer.step()


class DistributedOptimizer:
    """Steps parameters wherever they are, with the gradients of a distributed autograd context.

    Args:   optimizer_class: any torch optimizer; one is made on each worker that owns some of the parameters.
            params_rref: RRefs to the parameters. The rest goes to the optimizer.
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
            optimizer._get_type()  # raises here what its constructor has raised there

    def step(self, context_id: int) -> None:
        """One step on every worker; returns when all have made it. Concurrent steps take turns on each worker.

        Raises: RuntimeError: there is no such context; what went wrong on a worker.
        """
        autograd.get_gradients(context_id)
        steps = [optimizer.rpc_async().step(context_id) for optimizer in self.remote_optimizers]
        for future in steps:
            future.wait()

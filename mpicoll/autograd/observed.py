"""Leaves whose gradient something else looks at while torch's engine accumulates it: DDP, hooks.

# Note [DDP in a distributed backward pass]
# DDP's reducer is C++. It has a hook behind the AccumulateGrad node of each of its parameters, reads the parameter's gradient
# there, all-reduces buckets of them while the backward pass goes on, and writes the result back when the engine's run ends. It
# reads and writes ``parameter.grad``, or the gradient in a context of torch.distributed.autograd; it cannot know our contexts.
# `torch.autograd.grad` ends before AccumulateGrad, so none of this happens there, and the gradients are not reduced.
#
# So a run that reaches a DDP module is a `torch.autograd.backward`, in which AccumulateGrad runs. For its duration the ``.grad``
# of all parameters of the module is lent (lending.py): it starts as what the context has already, and what it is at the end
# goes to the context. So whatever DDP does in a backward pass of one process (buckets, hooks of communication, no_sync, join,
# static graphs, unused parameters that other ranks have used) works here, and overlaps with the backward pass as it does there.
#
# The hooks count: each AccumulateGrad must run once in a pass, with the whole gradient. So the parameters of a module wait until
# every output that depends on one of them has its gradient. Where these do not arrive together, what lies between is computed
# a second time, for the parameters.
"""

from __future__ import annotations

import functools
import gc
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

Ready = list[tuple[DistributedDataParallel, list[int]]]

_modules: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


@dataclass(eq=False)
class Observed:
    """Leaves that are reached in one run of a pass, with their whole gradients.

    ``lent``: the parameters that DDP may write to in that run, or the leaf that has hooks at its AccumulateGrad node; none:
    the leaf has hooks of its own only, which run wherever its gradient is taken. ``modules``: the DDP modules.
    """

    leaves: dict[Tensor, None] = field(default_factory=dict)
    lent: list[Tensor] = field(default_factory=list)
    modules: list[DistributedDataParallel] = field(default_factory=list)

    def queues_reduction(self) -> bool:
        """Whether the next run through a module reduces all of its gradients at its end, be they complete or not."""
        return any(module.static_graph and not module._static_graph_delay_allreduce_enqueued for module in self.modules)

    def overwrites(self) -> bool:
        """Whether the run writes to the memory of gradients of earlier backward passes: views of the buckets are overwritten."""
        return any(module.gradient_as_bucket_view for module in self.modules)

    def ready(self) -> Ready:
        """For each module that the run comes to, and that is to reduce: when each gradient was ready the last time."""
        return [
            (module, module.reducer.get_backward_stats())
            for module in self.modules
            if module.require_forward_param_sync  # the last forward pass was not in no_sync
            and getattr(module, "reducer", None) is not None
            and not (module.static_graph and not module._static_graph_delay_allreduce_enqueued)  # it notes no times then
            and any(parameter in self.leaves for parameter in module._module_parameters)
        ]


def check_reduced(before: Ready) -> None:
    """DDP leaves gradients as they are, and says nothing, if it has reduced since its last forward pass."""
    for module, times in before:
        if module.reducer.get_backward_stats() == times:
            raise RuntimeError(
                f"backward: DistributedDataParallel did not reduce the gradients of {type(module.module).__name__}: it reduces "
                "in one backward pass after each forward pass, and there has been one (in another context, in this one with "
                "retain_graph, or without a context). Let each backward pass follow its forward pass; for passes that should not "
                "reduce, run the forward pass in `no_sync()`"
            )


class Observers:
    """What one pass knows of the leaves that are observed. Built when the pass begins on a worker."""

    def __init__(self) -> None:
        self._found: dict[int, Observed] = {}
        for module in list(_modules):
            parameters: list[Tensor] = getattr(module, "_module_parameters", [])  # none: it is being built
            self._add(module, [parameter for parameter in parameters if parameter.requires_grad])

    def _add(self, module: DistributedDataParallel, parameters: list[Tensor]) -> None:
        """Modules that share a parameter are one."""
        together = Observed(lent=list(parameters), modules=[module])
        for other in {id(found): found for p in parameters if (found := self._found.get(id(p))) is not None}.values():
            together.lent += other.lent
            together.modules += other.modules
        together.lent = list(dict.fromkeys(together.lent))
        self._found.update(dict.fromkeys(map(id, together.lent), together))

    def of(self, leaf: Tensor, node: Any) -> Observed | None:
        """Those that this leaf belongs to; None: nothing observes it. ``node``: its AccumulateGrad."""
        found = self._found.get(id(leaf))
        if found is None:
            hooked = _has_hooks(node)
            if not hooked and not leaf._backward_hooks:
                return None
            found = self._found[id(leaf)] = Observed(lent=[leaf] if hooked else [])
        found.leaves[leaf] = None
        return found


def _has_hooks(node: Any) -> bool:
    """Whether Python has registered hooks at this node. Torch shows them only to those who register one."""
    for register in (node.register_hook, node.register_prehook):
        handle = register(_no_hook)
        count = len(handle.hooks_dict_ref())
        handle.remove()
        if count > 1:
            return True
    return False


def _no_hook(*gradients: Any) -> None:
    """Is there for a moment only, see `_has_hooks`."""


# -- DDP modules -------------------------------------------------------------------------------------------------------


@functools.cache
def install() -> None:
    """Has every DDP module, of any backend, make itself known; finds those that are there already."""
    original: Any = DistributedDataParallel._ddp_init_helper

    @functools.wraps(original)
    def _ddp_init_helper(self: Any, *arguments: Any, **keywords: Any) -> Any:
        answer = original(self, *arguments, **keywords)
        _modules.add(self)
        return answer

    DistributedDataParallel._ddp_init_helper = _ddp_init_helper  # type: ignore[method-assign]
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        _modules.update(found for found in gc.get_objects() if issubclass(type(found), DistributedDataParallel))

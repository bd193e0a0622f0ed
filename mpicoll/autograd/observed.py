"""Leaves whose gradient is observed while torch's engine accumulates it: by DDP, or by hooks.

# Note [DDP in a distributed backward pass]
# DDP's reducer is C++ code. Its hook behind the AccumulateGrad node of each parameter reads the gradient of the parameter. It
# all-reduces buckets of gradients during the backward pass, and writes the result back when the run of the engine ends. It reads
# and writes ``parameter.grad``, or the gradient in a context of torch.distributed.autograd; it does not know mpicoll's contexts.
# `torch.autograd.grad` ends before AccumulateGrad, so there the hooks do not run and the gradients are not reduced.
#
# So a run that reaches a DDP module is a `torch.autograd.backward`, in which AccumulateGrad runs. For its duration the ``.grad``
# of all parameters of the module is lent (runs.py): it starts as the gradient in the context, and its value at the end goes
# to the context. So everything that DDP does in a backward pass of one process (buckets, communication hooks, no_sync, join,
# static graphs, unused parameters that other ranks have used) works here, and overlaps with the backward pass as usual.
#
# The hooks count: each AccumulateGrad must run once in a pass, with the whole gradient. So the parameters of a module wait until
# every output that depends on one of them has its gradient. If these do not arrive together, the part of the graph between the
# outputs and the parameters is computed a second time.
"""

from __future__ import annotations

import functools
import gc
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from mpicoll.autograd.contexts import registry

Ready = list[tuple[DistributedDataParallel, list[int]]]


@dataclass(eq=False)
class Observed:
    """Leaves that one run of a pass must reach together, with their whole gradients.

    ``lent``: parameters that DDP may write to in that run, or the leaf with hooks at its AccumulateGrad node. Empty: the leaf has
    only tensor hooks, which run wherever its gradient is computed.
    """

    leaves: dict[Tensor, None] = field(default_factory=dict)  # an ordered set
    lent: list[Tensor] = field(default_factory=list)
    modules: list[DistributedDataParallel] = field(default_factory=list)

    def queues_reduction(self) -> bool:
        """Returns whether the next run through a module reduces all of its gradients at its end, even if some are incomplete."""
        return any(module.static_graph and not module._static_graph_delay_allreduce_enqueued for module in self.modules)

    def overwrites(self) -> bool:
        """Returns whether the run overwrites the gradients of earlier backward passes, because they are views of buckets."""
        return any(module.gradient_as_bucket_view for module in self.modules)

    def ready(self) -> Ready:
        """Returns, for each module that the run must reduce, when each gradient was ready the last time."""
        return [
            (module, module.reducer.get_backward_stats())
            for module in self.modules
            if module.require_forward_param_sync  # the last forward pass was not in no_sync
            and getattr(module, "reducer", None) is not None
            and not (module.static_graph and not module._static_graph_delay_allreduce_enqueued)  # it records no times then
            and any(parameter in self.leaves for parameter in module._module_parameters)
        ]


def check_reduced(before: Ready) -> None:
    """Checks that DDP has reduced. If it has done so since its last forward pass, it silently does not do it again."""
    for module, times in before:
        if module.reducer.get_backward_stats() == times:
            raise RuntimeError(
                f"backward: DistributedDataParallel did not reduce the gradients of {type(module.module).__name__}: it reduces "
                "in one backward pass after each forward pass, and there has been one (in another context, in this one with "
                "retain_graph, or without a context). Let each backward pass follow its forward pass; for passes that should not "
                "reduce, run the forward pass in `no_sync()`"
            )


class Observers:
    """The observed leaves of one pass, found when the pass begins on a worker."""

    def __init__(self) -> None:
        self._found: dict[int, Observed] = {}
        for module in list(registry.ddp_modules):
            parameters: list[Tensor] = getattr(module, "_module_parameters", [])  # none while it is being built
            together = Observed(lent=[parameter for parameter in parameters if parameter.requires_grad], modules=[module])
            # Modules that share a parameter are observed together.
            for other in {id(found): found for p in together.lent if (found := self._found.get(id(p))) is not None}.values():
                together.lent += other.lent
                together.modules += other.modules
            together.lent = list(dict.fromkeys(together.lent))
            self._found.update(dict.fromkeys(map(id, together.lent), together))

    def of(self, leaf: Tensor, node: Any) -> Observed | None:
        """Returns the observed leaves that this leaf belongs to. None: nothing observes it. ``node``: its AccumulateGrad node."""
        found = self._found.get(id(leaf))
        if found is None:
            hooked = _has_hooks(node)
            if not hooked and not leaf._backward_hooks:
                return None
            found = self._found[id(leaf)] = Observed(lent=[leaf] if hooked else [])
        found.leaves[leaf] = None
        return found


def _has_hooks(node: Any) -> bool:
    """Returns whether Python hooks are registered at this node. torch shows them only to code that registers one."""
    for register in (node.register_hook, node.register_prehook):
        handle = register(lambda *gradients: None)  # for a moment only
        count = len(handle.hooks_dict_ref())
        handle.remove()
        if count > 1:
            return True
    return False


# -- DDP modules -------------------------------------------------------------------------------------------------------


@functools.cache
def install() -> None:
    """Makes every new DDP module, of any backend, register itself. Finds the existing ones."""
    original: Any = DistributedDataParallel._ddp_init_helper

    @functools.wraps(original)
    def _ddp_init_helper(self: Any, *arguments: Any, **keywords: Any) -> Any:
        answer = original(self, *arguments, **keywords)
        registry.ddp_modules.add(self)
        return answer

    DistributedDataParallel._ddp_init_helper = _ddp_init_helper  # type: ignore[method-assign]
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        registry.ddp_modules.update(found for found in gc.get_objects() if issubclass(type(found), DistributedDataParallel))

"""The adapter for torch <= 2.13, which takes a subclass of ProcessGroup from a Python backend and nothing else."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.distributed import ProcessGroup

from mpicoll._c10d.names import devices
from mpicoll._c10d.operations import Operations
from mpicoll._engine.work import Work

if TYPE_CHECKING:
    from mpicoll._engine.communicator import Communicator


class MpiProcessGroup(Operations, ProcessGroup):  # type: ignore[misc]  # names and their order are as torch calls them
    """One process group of torch.

    Calls from Python (``dist.all_reduce``) arrive directly. Calls from C++ (DDP's reducer, functional collectives) arrive through
    torch's trampoline, which finds methods by name and needs those for the group's name and description too.
    """

    supports_splitting = False
    supports_coalescing = False
    supports_shrinking = False
    supports_time_estimate = False

    def __init__(self, communicator: Communicator, on_close: Callable[[Communicator], None]) -> None:
        ProcessGroup.__init__(self, communicator.rank, communicator.size)  # type: ignore[call-arg]  # stub lacks this form
        self.communicator, self.on_close = communicator, on_close
        self._name = communicator.name
        self._description = "undefined"

    def __repr__(self) -> str:
        return f"<MpiProcessGroup over {self.communicator!r}>"

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(name) for name in devices()]

    def _get_backend(self, device: Any) -> MpiProcessGroup:  # type: ignore[override]
        """The group is its own backend, for every device."""
        return self

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description


# Note [Overloads]
# Libraries call methods of a group in all forms that torch's class takes: allreduce(tensor, op), allreduce([tensor], op=...,
# timeout=...), broadcast(tensor, root), ... torch.distributed and C++ use one form, whose last argument is an options object.
# The other forms are converted to this form here. The methods of torch's class do this as well, but only over a backend in C++.
_OPTIONS = frozenset(kind for name, kind in vars(c10d).items() if name.endswith("Options") and isinstance(kind, type))
_OUTPUTS, _INPUTS = ("output_tensors", "output_tensor", "output"), ("input_tensors", "input_tensor", "input")
_SPLITS = (("output_split_sizes",), ("input_split_sizes",))

# Of each method with several forms: its options, the names of its tensors and splits, and what the form without options takes.
_FORMS: dict[str, tuple[Any, tuple[tuple[str, ...], ...], tuple[str, ...]]] = {
    "allreduce": (c10d.AllreduceOptions, (("tensors", "tensor"),), ("op", "timeout")),
    "broadcast": (c10d.BroadcastOptions, (("tensors", "tensor"),), ("root", "timeout")),
    "reduce": (c10d.ReduceOptions, (("tensors", "tensor"),), ("root", "op", "timeout")),
    "allgather": (c10d.AllgatherOptions, (_OUTPUTS, _INPUTS), ("timeout",)),
    "gather": (c10d.GatherOptions, (_OUTPUTS, _INPUTS), ("root", "timeout")),
    "scatter": (c10d.ScatterOptions, (_OUTPUTS, _INPUTS), ("root", "timeout")),
    "reduce_scatter": (c10d.ReduceScatterOptions, (_OUTPUTS, _INPUTS), ("op", "timeout")),
    "alltoall_base": (c10d.AllToAllOptions, (_OUTPUTS, _INPUTS, *_SPLITS), ("timeout",)),
    "all_to_all_single": (c10d.AllToAllOptions, (_OUTPUTS, _INPUTS, *_SPLITS), ("timeout",)),
    "barrier": (c10d.BarrierOptions, (), ("timeout",)),
}
_IN_OPTIONS = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}


def _overloaded(name: str) -> Callable[..., Any]:
    kind, tensors, others = _FORMS[name]
    places = {alias: place for place, aliases in enumerate((*tensors, *((other,) for other in others))) for alias in aliases}

    ours = getattr(Operations, name)

    @functools.wraps(ours)
    def method(self: MpiProcessGroup, *arguments: Any, **named: Any) -> Any:
        if arguments and type(arguments[-1]) is kind and not named:
            return ours(self, *arguments)
        if not arguments and len(named) == 1 and "opts" in named:  # a barrier of torch.distributed
            return ours(self, **named)
        if arguments and type(arguments[-1]) in _OPTIONS:
            *arguments, named["opts"] = arguments  # type: ignore[assignment]
        options = named.pop("opts", None) or kind()
        given = dict(enumerate(arguments))
        for word, value in named.items():
            if word not in places or places[word] in given:
                raise TypeError(f"{name}(): there is no argument {word!r}, or it is given twice")
            given[places[word]] = value
        if given and max(given) >= len(tensors) + len(others):
            raise TypeError(f"{name}() takes at most {len(tensors) + len(others)} arguments, got {len(arguments)}")
        values = [given[place] for place in range(len(tensors)) if place in given]
        if len(values) == 2 and isinstance(values[0], Tensor) is not isinstance(values[1], Tensor):  # one tensor, and a list
            values = [value if isinstance(value, Tensor) else [value] if value else [] for value in values]
        rest = {word: given.get(place) for place, word in enumerate(others, len(tensors))}
        for word, value in rest.items():
            if value is not None:
                setattr(options, _IN_OPTIONS[word], value)
        work = ours(self, *values, options)
        if isinstance(work, Work):
            work.limit(rest["timeout"])
        return work

    return method


for _name in _FORMS:
    setattr(MpiProcessGroup, _name, _overloaded(_name))

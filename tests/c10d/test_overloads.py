"""Calls a group's methods in every form that the docstrings of torch's class list. The results are those of Gloo."""

import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from tests.support import agree
from tests.support.torch_backend import of_rank, same

pytestmark = pytest.mark.usefixtures("world")

PARAMETER = re.compile(r"(?:^|, )(\w+): (.+?)(?= = |, \w+: |$)")
NOT_HERE = ("send", "recv", "recv_anysource", "_end_coalescing", "reconfigure")  # one form each; they need more than one call
NOT_OF_GLOO = ("alltoall", "gather_single", "gather_into_tensor")


class Tensors:
    """The arguments of a call on this rank, and those that the call writes."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.written: list[Tensor] = []

    def own(self, blocks: int = 1) -> Tensor:
        return of_rank(self.rank, 2 * blocks)

    def both(self) -> Tensor:
        """A tensor that is read and written."""
        self.written.append(self.own())
        return self.written[-1]

    def new(self, blocks: int = 1) -> Tensor:
        self.written.append(torch.zeros(2 * blocks))
        return self.written[-1]

    def for_each(self, make: Callable[[], Tensor]) -> list[Tensor]:
        return [make() for _ in range(self.size)]

    def on_root(self, make: Callable[[], Any]) -> Any:
        return make() if self.rank == 0 else []


def in_place(t: Tensors) -> list[Any]:
    return [t.both()]


def in_place_list(t: Tensors) -> list[Any]:
    return [[t.both()]]


def from_root(t: Tensors) -> list[Any]:
    return [t.both(), 0]


def gathered_flat(t: Tensors) -> list[Any]:
    return [t.new(t.size), t.own()]


def gathered_flat_on_root(t: Tensors) -> list[Any]:
    return [t.new(t.size) if t.rank == 0 else torch.empty(0), t.own()]


def gathered_flat_lists(t: Tensors) -> list[Any]:
    return [[t.new(t.size)], [t.own()]]


def scattered_flat(t: Tensors) -> list[Any]:
    return [t.new(), t.own(t.size)]


def scattered_flat_lists(t: Tensors) -> list[Any]:
    return [[t.new()], [t.own(t.size)]]


def exchanged_flat(t: Tensors) -> list[Any]:
    return [t.new(t.size), t.own(t.size), [], []]


# The arguments that have no default, by method and names of all parameters.
FORMS: dict[str, Callable[[Tensors], list[Any]]] = {
    "allreduce(tensors, opts)": in_place_list,
    "allreduce(tensors, op, timeout)": in_place_list,
    "allreduce(tensor, op, timeout)": in_place,
    "allreduce_coalesced(tensors, opts)": in_place_list,
    "broadcast(tensors, opts)": in_place_list,
    "broadcast(tensor, root, timeout)": from_root,
    "reduce(tensors, opts)": in_place_list,
    "reduce(tensor, root, op, timeout)": from_root,
    "allgather(output_tensors, input_tensors, opts)": lambda t: [[t.for_each(t.new)], [t.own()]],
    "allgather(output_tensors, input_tensor, timeout)": lambda t: [t.for_each(t.new), t.own()],
    "allgather_coalesced(output_lists, input_list, opts)": lambda t: [[[each] for each in t.for_each(t.new)], [t.own()]],
    "_allgather_base(output, input, opts)": gathered_flat,
    "all_gather_single(output, input, opts)": gathered_flat,
    "all_gather_single_coalesced(outputs, inputs, opts)": gathered_flat_lists,
    "allgather_into_tensor_coalesced(outputs, inputs, opts)": gathered_flat_lists,
    "gather(output_tensors, input_tensors, opts)": lambda t: [t.on_root(lambda: [t.for_each(t.new)]), [t.own()]],
    "gather(output_tensors, input_tensor, root, timeout)": lambda t: [t.on_root(lambda: t.for_each(t.new)), t.own(), 0],
    "gather_single(output, input, opts)": gathered_flat_on_root,
    "gather_into_tensor(output, input, opts)": gathered_flat_on_root,
    "scatter(output_tensors, input_tensors, opts)": lambda t: [[t.new()], t.on_root(lambda: [t.for_each(t.own)])],
    "scatter(output_tensor, input_tensors, root, timeout)": lambda t: [t.new(), t.on_root(lambda: t.for_each(t.own)), 0],
    "reduce_scatter(output_tensors, input_tensors, opts)": lambda t: [[t.new()], [t.for_each(t.own)]],
    "reduce_scatter(output, input, op, timeout)": lambda t: [t.new(), t.for_each(t.own)],
    "_reduce_scatter_base(outputTensor, inputTensor, opts)": scattered_flat,
    "reduce_scatter_single(outputTensor, inputTensor, opts)": scattered_flat,
    "reduce_scatter_single_coalesced(outputs, inputs, opts)": scattered_flat_lists,
    "reduce_scatter_tensor_coalesced(outputs, inputs, opts)": scattered_flat_lists,
    "alltoall(output_tensors, input_tensors, opts)": lambda t: [t.for_each(t.new), t.for_each(t.own)],
    "alltoall_base(output, input, output_split_sizes, input_split_sizes, opts)": exchanged_flat,
    "alltoall_base(output, input, output_split_sizes, input_split_sizes, timeout)": exchanged_flat,
    "all_to_all_single(output, input, output_split_sizes, input_split_sizes, opts)": exchanged_flat,
    "all_to_all_single(output, input, output_split_sizes, input_split_sizes, timeout)": exchanged_flat,
    "barrier(opts)": lambda t: [],
    "barrier(timeout)": lambda t: [],
}


def overloads() -> Iterator[tuple[str, dict[str, str]]]:
    """The name of each method that returns a Work, and the types of its parameters."""
    for method in sorted(set(dir(dist.ProcessGroup)) - set(NOT_HERE)):
        text = getattr(dist.ProcessGroup, method).__doc__ or ""
        for parameters in re.findall(rf"\b{method}\(self: [\w.]+, (.*)\) -> c10d::Work", text):
            yield method, dict(PARAMETER.findall(parameters))


def optional(name: str, kind: str) -> Any:
    """A value for a parameter that has a default."""
    if name == "opts":
        return getattr(c10d, kind.rpartition(".")[2])()
    return {"op": dist.ReduceOp.MAX, "timeout": timedelta(seconds=20)}[name]


def outcome(group: Any, method: str, kinds: dict[str, str], named: bool, rank: int, size: int) -> list[Tensor]:
    tensors = Tensors(rank, size)
    required = FORMS[f"{method}({', '.join(kinds)})"](tensors)
    if named:
        values = dict(zip(kinds, required, strict=False))
        values |= {name: optional(name, kind) for name, kind in kinds.items() if name not in values}
        work = getattr(group, method)(**values)
    else:
        work = getattr(group, method)(*required)
    assert work.wait()
    assert work.is_completed() or group is not dist.group.WORLD  # Gloo's has not, for some operations
    return tensors.written if method != "reduce" or rank == 0 else []  # Gloo changes those of the other ranks


@pytest.mark.parametrize("named", [False, True])
def test_every_form(named: bool, rank: int, size: int) -> None:
    gloo = dist.new_group(backend="gloo")
    wrong = []
    for method, kinds in overloads():
        found = outcome(dist.group.WORLD, method, kinds, named, rank, size)
        if method not in NOT_OF_GLOO and not all(map(same, found, outcome(gloo, method, kinds, named, rank, size))):
            wrong.append((method, list(kinds), found))
    agree(not wrong, wrong)


def test_forms_that_torch_does_not_have(size: int) -> None:
    x, group = torch.ones(2), dist.group.WORLD
    assert group is not None
    calls: list[Callable[[], Any]] = [
        lambda: group.allreduce(x, opp=dist.ReduceOp.SUM),  # type: ignore[call-overload]
        lambda: group.allreduce(x, tensor=x),  # type: ignore[call-overload]
        lambda: group.broadcast(x, 0, timedelta(seconds=1), 2),  # type: ignore[call-overload]
        lambda: group.allgather([x]),  # type: ignore[call-overload]
    ]
    for call in calls:
        with pytest.raises(TypeError):
            call()
    group.allreduce(x).wait()
    agree(x.tolist() == [size, size])


def test_the_time_limit_of_a_call(rank: int) -> None:
    work = dist.group.WORLD.allreduce(torch.ones(1), timeout=timedelta(seconds=7))  # type: ignore[union-attr]
    agree(work.wait() and getattr(work, "_timeout_s", 7) == 7)

"""A training step over one implementation, and its gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.steps.models import Task, loss

RATE = 1e-6  # of SGD


@dataclass(frozen=True)
class Means:
    """What a step communicates with. group: None if nothing is communicated; nothing: torch's fake group, for this case."""

    rank: int
    size: int
    group: Any
    nothing: Any

    def mesh(self) -> DeviceMesh:
        """A mesh of the group, or of the fake one.

        DTensor keeps the plans of operations, which hold a mesh, and takes them for each mesh that is equal. Meshes are equal
        whatever their groups are: without names of their own, all implementations would communicate over the first one.
        """
        group = self.nothing if self.group is None else self.group
        return DeviceMesh.from_group(group, "cpu", mesh_dim_names=(f"group {group.group_name}",))


class Step:
    """Forward, backward and SGD.

    Args:
        model: Its parameters are those of this rank.
        passes: Forward and backward.
    """

    def __init__(self, model: nn.Module, passes: Callable[[], object]) -> None:
        self.model, self.passes = model, passes
        self.optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.passes()

    def __call__(self) -> None:
        self.backward()
        self.optimizer.step()

    def gradients(self) -> dict[str, Tensor]:
        """The full gradients of the parameters that this rank has, by name (collective, after `backward`)."""
        found = {}
        for name, parameter in self.model.named_parameters():
            gradient: Any = parameter.grad
            assert gradient is not None, name
            found[name] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        return found


@dataclass(frozen=True)
class Workload:
    """One row: a task, and how ranks share it.

    Attributes:
        make: The step over one implementation (collective).
        batches: How many batches of the task a step takes, by number of ranks. The loss is the mean of their losses.
        traffic: Operations of torch.distributed and their bytes, by number of ranks: what the floor copies.
        alone: Factor of the time of computation alone, by number of ranks: a pipeline computes only while it is filled.
        tolerance: Relative, of the norm of a gradient.
        why_not: By number of ranks, why so many ranks cannot share the task; "" if they can.
    """

    name: str
    task: Task
    make: Callable[[Task, Means], Step]
    batches: Callable[[int], int]
    traffic: Callable[[Task, int], Sequence[tuple[str, int]]]
    alone: Callable[[int], float] = lambda size: 1.0
    tolerance: float = 1e-3
    why_not: Callable[[int], str] = lambda size: ""

    def samples(self, size: int) -> int:
        """Images or tokens in a step of all ranks."""
        return self.task.per_batch * self.batches(size)


def weight_bytes(task: Task) -> int:
    return sum(parameter.nbytes for parameter in task.model().parameters())


def reference(task: Task, batches: int) -> dict[str, Tensor]:
    """The gradients of one process that sees all batches."""
    model = task.model()
    for number in range(batches):
        (loss(model(task.batch(number))) / batches).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def compare(label: str, gradients: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float) -> None:
    """Raises AssertionError if a gradient differs from the expected one by more than ``tolerance`` of its norm."""
    for name, gradient in gradients.items():
        difference = (gradient - expected[name]).norm()
        if not difference <= tolerance * expected[name].norm() + 1e-7:
            raise AssertionError(f"{label}: the gradient of {name} differs from that of one process by {difference:g}")

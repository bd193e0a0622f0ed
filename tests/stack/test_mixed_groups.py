"""One group with two backends: each operation goes to the backend of the device that its tensors are on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import mpicoll
from mpicoll._c10d.names import BACKEND_SUBCLASSES
from tests.stack.exercise import exercise, total
from tests.support import agree, everyone

SECTION = "Mixed backends and debugging"
BOTH = ["cpu:mpi,cuda:gloo", "cpu:gloo,cuda:mpi"]

pytestmark = [
    pytest.mark.feature("two backends in one group: 'cpu:mpi,cuda:gloo', 'cpu:gloo,cuda:mpi'"),
    pytest.mark.filterwarnings("ignore:.*all_gather_tensor.*deprecated:FutureWarning"),
]


@pytest.fixture(params=BOTH)
def mixture(request: pytest.FixtureRequest, no_world: None) -> str:
    """The world is made with this backend string."""
    dist.init_process_group(request.param)
    return request.param  # type: ignore[no-any-return]


def test_it_is_what_was_asked_for(mixture: str, rank: int, size: int) -> None:
    """Names, devices, and who carries CPU tensors."""
    world: Any = dist.group.WORLD
    carrier = world._get_backend(torch.device("cpu"))
    agree(dist.get_backend() == mixture and dist.get_backend_config() == mixture, (dist.get_backend(), dist.get_backend_config()))
    agree(("gloo" in carrier.name().lower() if mixture.startswith("cpu:gloo") else hasattr(carrier, "communicator")), carrier)
    agree({device.type for device in world._device_types} == {"cpu", "cuda"}, world._device_types)


def test_every_kind_of_operation(mixture: str, rank: int, size: int) -> None:
    """Collectives, lists, messages, objects, C++ callers and both doors, on CPU tensors; a group that inherits the mixture."""
    groups = [dist.group.WORLD, dist.new_group(list(range(size)))]
    wrong = [exercise(group, rank, size) for group in groups]
    ours = torch.tensor([float(rank + 1)])
    mpicoll.all_reduce(ours)
    agree(not any(wrong) and ours.item() == size * (size + 1) / 2, (wrong, ours))


def test_ddp(mixture: str, rank: int, size: int) -> None:
    """The reducer finds the CPU's backend from C++."""
    model = DistributedDataParallel(torch.nn.Linear(4, 1, bias=False))
    model(torch.full((1, 4), float(rank))).sum().backward()
    gradients = everyone(model.module.weight.grad.tolist())
    agree(gradients[0] == [[(size - 1) / 2] * 4] and gradients.count(gradients[0]) == size, gradients)


def test_an_error_leaves_nothing(no_world: None, rank: int, size: int) -> None:
    """A backend that this torch does not have: torch's or our words, and the next init works."""
    with pytest.raises((RuntimeError, AssertionError, ValueError)):
        dist.init_process_group("cpu:mpi,cuda:there_is_no_such_backend")
    agree(not dist.is_initialized())
    with pytest.raises(ValueError, match="device"):
        dist.init_process_group("cpu:mpi,cpu:gloo")
    agree(not dist.is_initialized())
    dist.init_process_group("mpi")
    agree(total() == size)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_nccl_without_a_gpu_says_so(no_world: None, rank: int, size: int) -> None:
    """The string is accepted and handed to NCCL, which has the last word."""
    with pytest.raises((RuntimeError, ValueError), match=r"NCCL|GPU|nccl"):
        dist.init_process_group("cpu:mpi,cuda:nccl")
    agree(not dist.is_initialized(), BACKEND_SUBCLASSES)

"""How many functions of mpicoll an all_reduce calls before memory moves: the numbers in docs/architecture.md.

A *hop* is one call of a Python function of mpicoll. The program's call is the first hop. Hops are counted on its thread until
memory moves: until a function of an MPI communicator is called, or until this rank copies its first bytes into the window.
Not counted: C functions, functions of torch and of Python, and comprehensions (newer versions of Python inline them).
The *depth* is the number of these functions that have not returned when memory moves; the other ones only prepare.

The group has run the operation before, so nothing is counted that happens on first use. Nor is a look at the other ranks counted,
which is due before few calls of a quick succession (_faults/late_ranks.py), nor the ring that wakes a rank which came long ago.
"""

import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed

import mpicoll as dist
from mpicoll._c10d.names import BACKEND_SUBCLASSES
from mpicoll._engine.communicator import Communicator
from mpicoll._engine.registry import registry
from mpicoll._host.algorithm_choice import NEVER
from mpicoll._tensors.buffers import Known
from tests.gpu.fake_gpu import Gpu
from tests.gpu.ways import gpu, group_that_goes, on_gpu
from tests.support import ROOT, agree

__all__ = ["gpu"]

pytestmark = pytest.mark.usefixtures("world")

PACKAGE = str(Path(dist.__file__).parent)
Counted = tuple[int, int]  # hops, depth


def stated(way: str) -> Counted:
    """The numbers in the page's row of this way."""
    row = re.search(rf"^\| {re.escape(way)} +\| (\d+) \| (\d+) \|", (ROOT / "docs/architecture.md").read_text(), re.MULTILINE)
    assert row is not None, f"docs/architecture.md has no row {way!r}"
    return int(row[1]), int(row[2])


def is_hop(frame: FrameType) -> bool:
    file, name = frame.f_code.co_filename, frame.f_code.co_name
    return file.startswith(PACKAGE) and not name.startswith("<") and not file.endswith("bell.py")


class Tracer:
    """Counts the hops of one call. Moves of memory are seen in the functions that `watch` wraps."""

    hops: list[str]
    depth: int

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.hops, self.depth = [], 0

    def watch(self, move: Callable[..., Any]) -> Callable[..., Any]:
        """``move``, which ends the count when it is called."""

        def moved(*arguments: Any) -> Any:
            if not self.depth:
                sys.setprofile(None)
                frame: FrameType | None = sys._getframe()
                while frame is not None and frame.f_code is not Tracer.count.__code__:  # mpicoll.run may have started this rank
                    self.depth += is_hop(frame)
                    frame = frame.f_back
            return move(*arguments)

        return moved

    def count(self, operation: Callable[[], object]) -> Counted:
        sys.setprofile(self._event)
        try:
            operation()
        finally:
            sys.setprofile(None)
        return len(self.hops), self.depth

    def _event(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and is_hop(frame):
            self.hops.append(f"{Path(frame.f_code.co_filename).relative_to(PACKAGE)}: {frame.f_code.co_name}")


def world_communicator() -> Communicator:
    found = registry.find(dist.group.WORLD.group_name)
    assert found is not None
    return found


@pytest.fixture
def tracer(monkeypatch: pytest.MonkeyPatch) -> Tracer:
    made = Tracer()
    channel = world_communicator().channel
    monkeypatch.setattr(world_communicator().attendance, "due", math.inf)
    monkeypatch.setattr(channel, "Allreduce", made.watch(channel.Allreduce))
    monkeypatch.setattr(world_communicator().host, "known", Known())  # it calls the function from before
    return made


def test_a_small_tensor(tracer: Tracer) -> None:
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    tracer.reset()
    counted = tracer.count(lambda: dist.all_reduce(tensor))
    agree(counted == stated("8 bytes, CPU"), f"{counted}: {tracer.hops}")


@pytest.mark.one_node
def test_a_large_tensor(tracer: Tracer, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a window (on one rank, or at MPI_THREAD_SERIALIZED) it goes as a small one goes."""
    host = world_communicator().host
    monkeypatch.setattr(host.storages, "count", 0)  # a group that has shared memory asks for it first
    least = host.thresholds.least["all_reduce"]
    nbytes = 64 << 20 if least == NEVER else max(64 << 20, least)
    tensor = torch.ones(nbytes // 4)
    dist.all_reduce(tensor)
    tensor.fill_(1.0)
    tracer.reset()
    window = host.windows.window
    if window is not None:
        monkeypatch.setattr(window, "copy", tracer.watch(window.copy))
    dist.barrier()
    counted = tracer.count(lambda: dist.all_reduce(tensor))
    row = "8 bytes, CPU" if window is None else "64 MiB, CPU, 2 ranks of a node" if size == 2 else "64 MiB, CPU, one node"
    expected = stated(row)
    agree(counted == expected and torch.all(tensor == size), f"{counted}: {tracer.hops}")


def test_a_small_tensor_through_torch(tracer: Tracer) -> None:
    tensor = torch.ones(2)
    torch.distributed.all_reduce(tensor)
    tracer.reset()
    counted = tracer.count(lambda: torch.distributed.all_reduce(tensor))
    version = ">= 2.14" if BACKEND_SUBCLASSES else "<= 2.13"
    agree(counted == stated(f"8 bytes, CPU, through torch {version}"), f"{counted}: {tracer.hops}")


def test_a_small_tensor_on_a_gpu(gpu: Gpu, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pretended GPU, which is a subclass of Tensor. So this begins at the communicator, and counts no hop of _device."""
    communicator = group_that_goes("staged", monkeypatch)
    assert communicator.devices is not None
    tensor, tracer, communicator.attendance.due = on_gpu(rank, 2), Tracer(), math.inf
    communicator.all_reduce(tensor)
    channel = communicator.devices.host.channel
    monkeypatch.setattr(channel, "Allreduce", tracer.watch(channel.Allreduce))
    counted = tracer.count(lambda: communicator.all_reduce(tensor))
    communicator.barrier()
    communicator.close()
    agree(counted == stated("8 bytes, GPU, staged, from the communicator on"), f"{counted}: {tracer.hops}")

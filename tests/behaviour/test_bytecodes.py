"""How many bytecodes of mpicoll a small operation executes: its time, without the noise of a clock.

An operation of 8 bytes takes some microseconds, of which MPI takes one. The rest is the interpreter's: 1,000 bytecodes take 15 to
30 us. Only functions of mpicoll are counted, on the thread of the program. The group has run the operation before, and no look at
the other ranks is due. Who makes an operation shorter lowers its limit.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest
import torch
import torch.distributed

import mpicoll as dist
from mpicoll._api import groups
from mpicoll._c10d.names import BACKEND_SUBCLASSES
from tests.support import agree

pytestmark = pytest.mark.usefixtures("world")

PACKAGE = str(Path(dist.__file__).parent)
ROUNDS = 20
OTHER_PYTHON = 1.2  # versions of Python compile to more or fewer bytecodes than 3.11

# Through mpicoll, through torch.distributed of torch <= 2.13, and of later versions.
LIMITS = {
    "all_reduce": (219, 251, 277),
    "broadcast": (271, 235, 261),
    "barrier": (218, 241, 265),
    "isend and irecv": (916, 805, 1001),
    "send and recv": (554, 805, 1001),
}


def counted(operation: Callable[[], object]) -> Counter[str]:
    """The bytecodes of one call by function."""
    found: Counter[str] = Counter()

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            found[f"{Path(frame.f_code.co_filename).relative_to(PACKAGE)}: {frame.f_code.co_name}"] += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        operation()
    finally:
        sys.settrace(before)
    return found


def ended(request: Any, status: Any = None) -> bool:
    request.Wait(status)
    return True


@pytest.mark.parametrize("module", [dist, torch.distributed], ids=lambda module: module.__name__)
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.min_ranks(1 + ("send" in name))) for name in LIMITS])
def test_a_small_operation(name: str, module: ModuleType, rank: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor, received = torch.ones(2), torch.ones(2)

    def messages() -> None:
        works = module.isend(tensor, (rank + 1) % size), module.irecv(received, (rank - 1) % size)
        for work in works:
            work.wait()

    def blocking() -> None:
        module.send(tensor, (rank + 1) % size)
        module.recv(received, (rank - 1) % size)

    operation: Callable[[], object] = {
        "all_reduce": lambda: module.all_reduce(tensor),
        "broadcast": lambda: module.broadcast(tensor, 0),
        "barrier": module.barrier,
        "isend and irecv": messages,
        "send and recv": blocking,
    }[name]
    world = groups.of(None)
    assert world is not None
    operation()
    monkeypatch.setattr(world.attendance, "due", math.inf)
    monkeypatch.setattr(world.receives, "due", math.inf)
    monkeypatch.setattr(world.host.windows, "window", None)  # an earlier test may have made it, and a barrier uses it then
    monkeypatch.setattr(world.channel, "test", ended)  # a second test would be a matter of time
    least = min((counted(operation) for _ in range(ROUNDS)), key=lambda each: each.total())
    limit = LIMITS[name][0 if module is dist else 1 + BACKEND_SUBCLASSES]
    scale = 1 if sys.version_info[:2] == (3, 11) else OTHER_PYTHON
    scale *= 2 if world.channel.runtime.serialized else 1  # MPI is called under a lock
    agree(least.total() <= limit * scale, f"{least.total()} bytecodes, at most {limit}: {least.most_common(12)}")

"""Large pages are asked for where they pay, and only there."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import pytest
import torch

from mpicoll.rpc import wire
from mpicoll.rpc.wire import WORTH_BYTES, ask_for_large

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
pytestmark = pytest.mark.skipif(not SETTING.exists(), reason="this kernel has no transparent huge pages")


def asked(address: int) -> bool:
    """What the kernel has noted of the memory there: "hg" is madvise(MADV_HUGEPAGE)."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            first, last = (int(end, 16) for end in head.split("-"))
            inside = first <= address < last
        elif inside and head == "VmFlags:":
            return "hg" in line.split()
    raise AssertionError(f"no memory at {address:#x}")


def test_for_whole_pages_within() -> None:
    memory = mmap.mmap(-1, WORTH_BYTES + 4 * mmap.PAGESIZE)
    start = np.frombuffer(memory, np.uint8).ctypes.data
    ask_for_large(start + 1, WORTH_BYTES + mmap.PAGESIZE)
    found = [asked(start), asked(start + mmap.PAGESIZE), asked(start + WORTH_BYTES), asked(start + WORTH_BYTES + mmap.PAGESIZE)]
    assert found == [False, True, True, False]


def test_not_for_small_memory() -> None:
    memory = mmap.mmap(-1, WORTH_BYTES)
    start = np.frombuffer(memory, np.uint8).ctypes.data
    ask_for_large(start, WORTH_BYTES - 1)
    assert not asked(start)


def test_for_what_a_message_brings() -> None:
    tensor = torch.rand(16 << 20)
    packed = wire.pack(0, 1, 2, tensor, lambda tensors: None, wire.PicklingState(0, {}))
    message = wire.copied(0, packed)
    assert asked(message.storages[0].data_ptr() + (8 << 20))
    assert torch.equal(wire.unpack(message, lambda tensors, extra: tensors), tensor)

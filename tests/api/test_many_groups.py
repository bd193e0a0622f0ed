"""Many groups at once: what they cost, and the error when MPI has no communicator left."""

import contextlib
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from mpi4py import MPI

import mpicoll
from mpicoll._engine.registry import registry
from mpicoll._mpi import errors
from tests.support import agree, is_open_mpi

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.timeout(180)]  # seconds on an idle machine; MPICH spins

GROUPS = 1500


def summed(group: Any = None) -> float:
    tensor = torch.ones(1)
    mpicoll.all_reduce(tensor, group=group)
    return tensor.item()


def resources() -> tuple[int, int, int]:
    """Bytes of memory, file descriptors, threads."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGESIZE"), len(os.listdir("/proc/self/fd")), threading.active_count()


def destroy(groups: list[Any]) -> None:
    for group in groups:
        mpicoll.destroy_process_group(group)


def test_1500_groups(size: int) -> None:
    """They work, and cost no descriptor, no thread and at most 100 KiB each until they are used."""
    destroy([mpicoll.new_group()])
    memory, files, threads = resources()
    groups = [mpicoll.new_group() for _ in range(GROUPS)]
    more_memory, more_files, more_threads = resources()
    sums = [summed(group) for group in (groups[0], groups[-1], None)]
    destroy(groups)
    agree(sums == [size] * 3, sums)
    agree(more_files <= files and more_threads <= threads, (files, more_files, threads, more_threads))
    agree((more_memory - memory) / GROUPS < 100 << 10, (more_memory - memory) / GROUPS)


@pytest.mark.parametrize("left", ["none", "others on each rank"])
def test_no_communicator_left(left: str, rank: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """MPICH has 2048 communicators; Open MPI's are too many to use up here. The error names the remedy, and it helps."""
    groups, others = [mpicoll.new_group() for _ in range(3)], []
    if is_open_mpi():
        monkeypatch.setattr(errors, "MANY_GROUPS", 3)
        monkeypatch.setattr(registry, "_channel", no_channel)
    else:
        with contextlib.suppress(MPI.Exception):
            others.extend(MPI.COMM_WORLD.Dup() for _ in range(2048))  # faster than groups
        if left == "others on each rank" and size > 1:
            others.pop(rank).Free()
    try:
        for door in (mpicoll, torch.distributed):
            with pytest.raises(mpicoll.errors.CommunicationError, match="destroy groups that you no longer need"):
                door.new_group()
        monkeypatch.undo()
        agree(summed() == summed(groups[-1]) == size)
        mpicoll.destroy_process_group(groups.pop())
        groups.append(mpicoll.new_group())
        again = summed(groups[-1])
    finally:
        for other in others:
            other.Free()
        destroy(groups)
    agree(again == size)


def no_channel(*arguments: Any) -> Any:
    raise MPI.Exception(MPI.ERR_INTERN)

"""dist.split_group on a world of MPI (torch >= 2.15 does it on the CPU): groups made by members of the parent alone."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mpicoll._engine.registry import registry
from tests.support import agree

SECTION = "Meshes and DTensor"
VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])
on_cpu = pytest.mark.skipif(VERSION < (2, 15), reason="needs torch >= 2.15")


def total(group: Any) -> float:
    tensor = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


@on_cpu
@pytest.mark.feature("`split_group`")
def test_parts_of_the_world(rank: int, size: int) -> None:
    """Each part in the order that was given; its ranks, timeout, description and name are those that torch means."""
    parts = [list(range(size))[start::2][::-1] for start in range(min(2, size))]
    mine = parts[rank % 2]
    for turn in range(2):  # the same ranks again: another group
        group = dist.split_group(split_ranks=parts, timeout=timedelta(seconds=77), group_desc="part")
        communicator = registry.find(group.group_name)
        told = (dist.get_process_group_ranks(group), dist.get_rank(group), dist.get_backend(group), group.group_desc)
        added, seconds = total(group), communicator.timeout_s if communicator else None
        dist.destroy_process_group(group)
        agree(told == (mine, mine.index(rank), dist.get_backend(), "part"), (turn, told))
        agree(added == sum(r + 1 for r in mine) and seconds == 77 and registry.find(group.group_name) is None, (added, seconds))


@on_cpu
@pytest.mark.feature("`split_group`")
@pytest.mark.min_ranks(2)
def test_those_left_over_and_a_part_of_a_part(rank: int, size: int) -> None:
    """Who is in no part gets torch's sentinel and waits for nobody; the ranks of a part of a part are those of the part."""
    upper = dist.split_group(split_ranks=[list(range(1, size))])
    agree((upper is dist.GroupMember.NON_GROUP_MEMBER) == (rank == 0), upper)
    if rank:
        last = dist.split_group(upper, [[size - 2]])  # the world's last rank
        added = total(upper)
        agree((last is dist.GroupMember.NON_GROUP_MEMBER) == (rank < size - 1), last)
        agree(added == sum(range(2, size + 1)) and (rank < size - 1 or total(last) == size), added)
        for group in (last, upper) if rank == size - 1 else (upper,):
            dist.destroy_process_group(group)
    else:
        agree(True)
        agree(True)


@pytest.fixture
def no_world(_end_of_world: None) -> Iterator[None]:
    """For tests that make a world of another kind; the usual one is made again by the next test."""
    level = dist.get_debug_level()
    dist.destroy_process_group()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.set_debug_level(level)


@on_cpu
@pytest.mark.feature("`split_group`")
@pytest.mark.parametrize("kind", ["bound to a device", "DETAIL", "cpu:mpi,cuda:gloo", "cpu:gloo,cuda:mpi"])
def test_worlds_of_all_kinds(kind: str, no_world: None, rank: int, size: int) -> None:
    """torch hides our half of the group in a wrapper, or another backend splits as well; on who is left over, too.

    With device_id new_group splits, too, and those who are not members are told.
    """
    if kind == "DETAIL":
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    device = torch.device("cpu:0") if kind == "bound to a device" else None
    dist.init_process_group(kind if ":" in kind else "mpi", device_id=device)
    made, split = dist.new_group([0]), dist.split_group(split_ranks=[[size - 1]])
    everyone = total(None)
    agree(everyone == size * (size + 1) / 2 and (rank != 0 or total(made) == 1), everyone)
    agree((split is dist.GroupMember.NON_GROUP_MEMBER) == (rank < size - 1), split)
    agree(rank < size - 1 or total(split) == size)

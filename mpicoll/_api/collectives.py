"""The collectives. Each returns None when it has ended, or with async_op=True a Work that completes by itself; None, with a
warning, on a rank outside the group. All ranks of the group must call, in the same order."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as torchs
from torch import Tensor

# Takes a list of tensors; mpicoll/_tensors/versions.py says why. Bound here, since a function of ours around it costs 1 % of a
# small operation.
from torch._C import _increment_version as count_writes
from torch.distributed import ProcessGroup, ReduceOp

from mpicoll._api import groups
from mpicoll._c10d import dynamo

if TYPE_CHECKING:
    from mpicoll._progress.work import Work
    from mpicoll._tensors.reductions import Op

SUM = ReduceOp.SUM


def broadcast(
    tensor: Tensor,
    src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """``src``'s tensor arrives in everybody's.

    Args:   src: global rank; group_src: group rank, in its place.
    """
    communicator = groups.of(group, tensor)
    if communicator is None:
        return torchs.broadcast(tensor, src, group, async_op, group_src)  # type: ignore[no-any-return]
    origin = groups.peer(communicator, "broadcast", "src", src, group_src)
    work = communicator.broadcast(tensor, origin, async_op)
    if communicator.rank != origin:
        count_writes((tensor,))
    return work


def all_reduce(tensor: Tensor, op: Op = SUM, group: ProcessGroup | None = None, async_op: bool = False) -> Work | None:
    """Reduces elementwise over all ranks, in place: same storage, same strides, the same bits on every rank.

    fp16 and bf16 are accumulated in fp32 and rounded once; MIN and MAX propagate NaN.

    Raises: UnsupportedReduction (a TypeError and a ValueError): dtype and op have no right answer together.
    """
    communicator = groups.of(group, tensor)
    if communicator is None:
        return torchs.all_reduce(tensor, op, group, async_op)  # type: ignore[no-any-return]
    work = communicator.all_reduce(tensor, op, async_op)
    count_writes((tensor,))
    return work


def reduce(
    tensor: Tensor,
    dst: int | None = None,
    op: Op = SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Reduces into ``dst``'s tensor; the other ranks' tensors stay as they were.

    Args:   dst: global rank; group_dst: group rank, in its place.
    """
    communicator = groups.of(group, tensor)
    if communicator is None:
        return torchs.reduce(tensor, dst, op, group, async_op, group_dst)  # type: ignore[no-any-return]
    to = groups.peer(communicator, "reduce", "dst", dst, group_dst)
    work = communicator.reduce(tensor, to, op, async_op)
    if communicator.rank == to:
        count_writes((tensor,))
    return work


def all_gather(
    tensor_list: list[Tensor], tensor: Tensor, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """Rank i's tensor arrives in everybody's ``tensor_list[i]``; the ranks' tensors may differ in shape."""
    communicator = groups.of(group, tensor)
    if communicator is None:
        return torchs.all_gather(tensor_list, tensor, group, async_op)  # type: ignore[no-any-return]
    work = communicator.all_gather(tensor_list, tensor, async_op)
    count_writes(tensor_list)
    return work


def all_gather_single(
    output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """Rank i's input arrives as the i-th block of everybody's output.

    Args:   output_tensor: world size times the input's numel, concatenated (n*k, ...) or stacked (n, k, ...); the input may be
                a slice of it.
    """
    communicator = groups.of(group, input_tensor)
    if communicator is None:
        return _all_gather_single(output_tensor, input_tensor, group, async_op)  # type: ignore[no-any-return]
    work = communicator.all_gather_single(output_tensor, input_tensor, async_op)
    count_writes((output_tensor,))
    return work


all_gather_into_tensor = all_gather_single
_all_gather_single: Any = getattr(torchs, "all_gather_single", torchs.all_gather_into_tensor)


def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = None,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Rank i's tensor arrives in ``gather_list[i]`` on ``dst``; the ranks' tensors may differ in shape.

    Args:   gather_list: on dst, one tensor per rank; elsewhere None. dst: global rank (default 0); group_dst: group rank.
    """
    communicator = groups.of(group, tensor)
    if communicator is None:
        return torchs.gather(tensor, gather_list, dst, group, async_op, group_dst)  # type: ignore[no-any-return]
    if dst is None and group_dst is None:
        dst = 0
    to = groups.peer(communicator, "gather", "dst", dst, group_dst)
    work = communicator.gather(tensor, gather_list, to, async_op)
    if gather_list:
        count_writes(gather_list)
    return work


def scatter(
    tensor: Tensor,
    scatter_list: list[Tensor] | None = None,
    src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """``scatter_list[i]`` on ``src`` arrives in rank i's tensor; the tensors may differ in shape.

    Args:   scatter_list: on src, one tensor per rank; elsewhere None. src: global rank (default 0); group_src: group rank.
    """
    communicator = groups.of(group, tensor)
    if communicator is None:
        return torchs.scatter(tensor, scatter_list, src, group, async_op, group_src)  # type: ignore[no-any-return]
    if src is None and group_src is None:
        src = 0
    origin = groups.peer(communicator, "scatter", "src", src, group_src)
    work = communicator.scatter(tensor, scatter_list, origin, async_op)
    count_writes((tensor,))
    return work


def reduce_scatter(
    output: Tensor, input_list: list[Tensor], op: Op = SUM, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """Rank i's output becomes the reduction of everybody's ``input_list[i]``; different i may differ in shape."""
    communicator = groups.of(group, output)
    if communicator is None:
        return torchs.reduce_scatter(output, input_list, op, group, async_op)  # type: ignore[no-any-return]
    work = communicator.reduce_scatter(output, input_list, op, async_op)
    count_writes((output,))
    return work


def reduce_scatter_single(
    output: Tensor, input: Tensor, op: Op = SUM, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """Rank i's output becomes the reduction of everybody's i-th block of ``input``.

    Args:   input: world size times the output's numel, concatenated or stacked; the output may be a slice of it.
    """
    communicator = groups.of(group, output)
    if communicator is None:
        return _reduce_scatter_single(output, input, op, group, async_op)  # type: ignore[no-any-return]
    work = communicator.reduce_scatter_single(output, input, op, async_op)
    count_writes((output,))
    return work


reduce_scatter_tensor = reduce_scatter_single
_reduce_scatter_single: Any = getattr(torchs, "reduce_scatter_single", torchs.reduce_scatter_tensor)


def all_to_all(
    output_tensor_list: list[Tensor],
    input_tensor_list: list[Tensor],
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """``input_tensor_list[j]`` of rank i arrives in ``output_tensor_list[i]`` of rank j; the tensors may differ in shape."""
    first = input_tensor_list[0] if isinstance(input_tensor_list, (list, tuple)) and input_tensor_list else None
    communicator = groups.of(group, first)
    if communicator is None:
        return torchs.all_to_all(output_tensor_list, input_tensor_list, group, async_op)  # type: ignore[no-any-return]
    work = communicator.all_to_all(output_tensor_list, input_tensor_list, async_op)
    count_writes(output_tensor_list)
    return work


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Rows of dim 0 travel: ``input_split_sizes[j]`` of them to rank j, ``output_split_sizes[j]`` of them from rank j.

    Args:   output_split_sizes, input_split_sizes: rows per rank, 0 allowed; None: equal shares.
    """
    communicator = groups.of(group, input)
    if communicator is None:
        return torchs.all_to_all_single(  # type: ignore[no-any-return]
            output, input, output_split_sizes, input_split_sizes, group, async_op
        )
    work = communicator.all_to_all_single(output, input, output_split_sizes, input_split_sizes, async_op)
    count_writes((output,))
    return work


def barrier(
    group: ProcessGroup | None = None, async_op: bool = False, device_ids: Any = None, timeout: timedelta | None = None
) -> Work | None:
    """Returns when every rank of the group has called it.

    Args:   device_ids: accepted and not used, as nothing happens on a device. timeout: None: the group's.
    Raises: OperationTimeout: not every rank came in time; the group is unusable afterwards.
    """
    communicator = groups.of(group)
    if communicator is None:
        limit = {} if timeout is None else {"timeout": timeout}  # torch < 2.13 has no timeout here
        return torchs.barrier(group, async_op, device_ids, **limit)  # type: ignore[no-any-return]
    return communicator.barrier(async_op, None if timeout is None else timeout.total_seconds())


def monitored_barrier(
    group: ProcessGroup | None = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
) -> None:
    """A barrier that names the ranks that did not come.

    Args:   timeout: a timedelta, or seconds; None: the group's. wait_all_ranks: name all missing ranks, not only the first.
    Raises: OperationTimeout, on every rank that came.
    """
    communicator = groups.of(group)
    if communicator is None:
        torchs.monitored_barrier(group, timeout, wait_all_ranks)
        return
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    communicator.monitored_barrier(seconds, wait_all_ranks)


dynamo.skip_frames(__name__)

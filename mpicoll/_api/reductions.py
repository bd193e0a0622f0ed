"""all_reduce, reduce, the two forms of reduce_scatter, and scan and exscan, which reduce over the ranks up to this one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as torch_dist
from torch import Tensor

# For a list of tensors; mpicoll/_tensors/buffers.py says why. A function of ours around it would cost 2 % of a small operation.
from torch._C import _increment_version as count_writes
from torch.distributed import ProcessGroup, ReduceOp, distributed_c10d
from torch.futures import Future

from mpicoll._api import groups
from mpicoll._c10d import dynamo, names

if TYPE_CHECKING:
    from mpicoll._engine.work import Work
    from mpicoll._tensors.reductions import Op

SUM = ReduceOp.SUM


def all_reduce(tensor: Tensor, op: Op = SUM, group: ProcessGroup | None = None, async_op: bool = False) -> Work | None:
    """Reduces the tensors of all ranks element by element; every rank gets the result, with the same bits (collective).

    Returns when ``tensor`` holds the result. Unlike Gloo's, it takes any strides and more dtypes (the page "Reductions").

    Args:
        tensor: Overwritten. Same number of elements and same dtype on all ranks; any shape and strides; on a device that the
            group serves. fp16 and bf16 are accumulated in fp32 and rounded once. MIN and MAX propagate NaN.
        op: SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR of ``dist.ReduceOp``, or a PREMUL_SUM.
        group: None means the default group.
        async_op: Return a Work at once instead of waiting.

    Returns:
        A Work with ``async_op=True``: leave ``tensor`` alone until its ``wait()`` has returned. Otherwise None.

    Raises:
        UnsupportedReduction: This ``op`` of this dtype has no right answer, such as AVG of bool. It is a TypeError and a
            ValueError. The page "Reductions" has the table.
        OperationTimeout: A rank has not called in time; the message names it. The group cannot be used any more.
        GroupFailed: An earlier operation of the group has failed.

    Example:
        >>> rank = dist.get_rank()  # 0 or 1
        >>> tensor = torch.tensor([1, 2]) * (rank + 1)  # [1, 2] and [2, 4]
        >>> dist.all_reduce(tensor)
        >>> tensor
        tensor([3, 6])
    """
    communicator = groups.of(group, tensor)
    if communicator is None:
        return groups.elsewhere(torch_dist.all_reduce, tensor, op, group, async_op)  # type: ignore[no-any-return]
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
    """Reduces the tensors of all ranks element by element; rank ``dst`` gets the result (collective).

    Returns when this rank has done its part. Unlike Gloo's, it leaves the tensors of the other ranks unchanged.

    Args:
        tensor: Overwritten on ``dst``, unchanged elsewhere. Otherwise as for `all_reduce`.
        dst: Global rank. Give this or ``group_dst``.
        op: As for `all_reduce`.
        group: None means the default group.
        async_op: Return a Work at once instead of waiting.
        group_dst: Rank within the group.

    Returns:
        A Work with ``async_op=True``: leave ``tensor`` alone until its ``wait()`` has returned. Otherwise None.

    Raises:
        ValueError: Neither or both of ``dst`` and ``group_dst`` are given, or the group has no such rank.
        UnsupportedReduction, OperationTimeout, GroupFailed: As for `all_reduce`.

    Example:
        >>> rank = dist.get_rank()  # 0 or 1
        >>> tensor = torch.tensor([1, 2]) * (rank + 1)  # [1, 2] and [2, 4]
        >>> dist.reduce(tensor, dst=0, op=dist.ReduceOp.MAX)
        >>> tensor  # on both ranks: rank 1 had the maximum and keeps its tensor
        tensor([2, 4])
    """
    communicator = groups.of(group, tensor)
    if communicator is None:
        return groups.elsewhere(torch_dist.reduce, tensor, dst, op, group, async_op, group_dst)  # type: ignore[no-any-return]
    to = groups.peer(communicator, "reduce", "dst", dst, group_dst)
    work = communicator.reduce(tensor, to, op, async_op)
    if communicator.rank == to:
        count_writes((tensor,))
    return work


def reduce_scatter(
    output: Tensor, input_list: list[Tensor], op: Op = SUM, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """Reduces lists of tensors over all ranks; rank i gets the result of the i-th tensors (collective).

    Returns when ``output`` holds the result. Unlike Gloo's, it takes any strides.

    Args:
        output: Overwritten with the reduction of ``input_list[i]`` over all ranks, on rank i. Any strides.
        input_list: One tensor per rank; their shapes may differ. The same shapes on all ranks, and one dtype.
        op: As for `all_reduce`.
        group: None means the default group.
        async_op: Return a Work at once instead of waiting.

    Returns:
        A Work with ``async_op=True``: leave all tensors alone until its ``wait()`` has returned. Otherwise None.

    Raises:
        ValueError: The list does not have one tensor per rank, or ``output`` does not fit.
        UnsupportedReduction, OperationTimeout, GroupFailed: As for `all_reduce`.

    Example:
        >>> rank = dist.get_rank()  # 0 or 1
        >>> output = torch.empty(1)
        >>> dist.reduce_scatter(output, [torch.tensor([1.0]), torch.tensor([10.0])])
        >>> output.item() == (2.0, 20.0)[rank]
        True
    """
    communicator = groups.of(group, output)
    if communicator is None:
        return groups.elsewhere(torch_dist.reduce_scatter, output, input_list, op, group, async_op)  # type: ignore[no-any-return]
    work = communicator.reduce_scatter(output, input_list, op, async_op)
    count_writes((output,))
    return work


def reduce_scatter_single(
    output: Tensor, input: Tensor, op: Op = SUM, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """Reduces a tensor over all ranks; rank i gets the i-th block (collective). ``reduce_scatter_tensor`` does the same.

    Returns when ``output`` holds the result. Unlike torch's, which is there since 2.13, it works with every version of torch. It
    takes any strides.

    Args:
        output: Overwritten with this rank's block of the reduction. May be this rank's part of the input.
        input: Has (number of ranks) x (elements of the output): concatenated, (n * k, ...), or stacked, (n, k, ...). Same dtype.
        op: As for `all_reduce`.
        group: None means the default group.
        async_op: Return a Work at once instead of waiting.

    Returns:
        A Work with ``async_op=True``: leave both tensors alone until its ``wait()`` has returned. Otherwise None.

    Raises:
        ValueError: ``input`` does not have as many elements.
        UnsupportedReduction, OperationTimeout, GroupFailed: As for `all_reduce`.

    Example:
        >>> rank = dist.get_rank()  # 0 or 1
        >>> output = torch.empty(1)
        >>> dist.reduce_scatter_single(output, torch.tensor([1.0, 10.0]))
        >>> output.item() == (2.0, 20.0)[rank]
        True
    """
    communicator = groups.of(group, output)
    if communicator is None:
        return groups.elsewhere(_reduce_scatter_single, output, input, op, group, async_op)  # type: ignore[no-any-return]
    work = communicator.reduce_scatter_single(output, input, op, async_op)
    count_writes((output,))
    return work


def reduce_scatter_tensor(
    output: Tensor, input: Tensor, op: Op = SUM, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """Reduces a tensor over all ranks; rank i gets the i-th block (collective). `reduce_scatter_single` is the newer name.

    Returns when ``output`` holds the result. Unlike Gloo's, it takes any strides.

    Args:
        output, input, op, group, async_op: As for `reduce_scatter_single`.

    Returns:
        A Work with ``async_op=True``: leave both tensors alone until its ``wait()`` has returned. Otherwise None.

    Raises:
        ValueError, UnsupportedReduction, OperationTimeout, GroupFailed: As for `reduce_scatter_single`.

    Example:
        >>> output = torch.empty(3)
        >>> dist.reduce_scatter_tensor(output, torch.full((6,), 0.5), op=dist.ReduceOp.MAX)
        >>> output
        tensor([0.5000, 0.5000, 0.5000])
    """
    try:
        return reduce_scatter_single(output, input, op, group, async_op)
    except Exception as error:
        names.name_as_called(error, "reduce_scatter_tensor")
        raise


_reduce_scatter_single: Any = getattr(torch_dist, "reduce_scatter_single", torch_dist.reduce_scatter_tensor)


def all_reduce_coalesced(
    tensors: list[Tensor], op: Op = ReduceOp.SUM, group: ProcessGroup | None = None, async_op: bool = False
) -> Future[list[Tensor]] | None:
    """Reduces each tensor of a list over all ranks, in one operation (collective). See `all_reduce`.

    Returns when all tensors hold their results. As in torch, ``async_op=True`` gives a Future here, not a Work.

    Args:
        tensors: Overwritten. Lists of the same length on all ranks, of one dtype; shapes may differ within the list.
        op: As for `all_reduce`.
        group: None means the default group.
        async_op: Return a Future of the tensors at once instead of waiting.

    Returns:
        A Future with ``async_op=True``: leave the tensors alone until its ``wait()`` has returned. Otherwise None.

    Raises:
        UnsupportedReduction, OperationTimeout, GroupFailed: As for `all_reduce`.

    Example:
        >>> tensors = [torch.ones(1), torch.full((2,), 2.0)]
        >>> dist.all_reduce_coalesced(tensors)  # on 2 ranks
        >>> tensors
        [tensor([2.]), tensor([4., 4.])]
    """
    communicator = groups.of_all(group, tensors)
    if communicator is None:
        return groups.elsewhere(torch_dist.all_reduce_coalesced, tensors, op, group, async_op)  # type: ignore[no-any-return]
    work = communicator.all_reduce_coalesced(groups.as_list(tensors), op, async_op)
    count_writes(groups.as_list(tensors))
    return None if work is None else work.get_future()


def scan(tensor: Tensor, op: Op = SUM, group: ProcessGroup | None = None, async_op: bool = False) -> Work | None:
    """Reduces the tensors of ranks 0 to this one element by element (an inclusive prefix reduction).

    All ranks of the group call it (collective); it returns when ``tensor`` holds the result. torch has no such function.

    Args:
        tensor: Overwritten. Same number of elements and same dtype on all ranks; any strides. Dtypes as for `all_reduce`.
        op: As for `all_reduce`. AVG divides by the number of ranks up to this one.
        group: None means the default group. Its order of the ranks counts.
        async_op: Return a Work at once instead of waiting.

    Returns:
        A Work with ``async_op=True``: leave ``tensor`` alone until its ``wait()`` has returned. Otherwise None.

    Raises:
        UnsupportedReduction: This ``op`` of this dtype has no right answer; as for `all_reduce`.
        ValueError: The group has another backend or has been destroyed, or there is no default group.

    Example:
        >>> tensor = torch.tensor([1, 2]) * (dist.get_rank() + 1)  # [1, 2] and [2, 4]
        >>> dist.scan(tensor)
        >>> tensor.tolist() == ([1, 2] if dist.get_rank() == 0 else [3, 6])
        True
    """
    return _reduced("scan", tensor, op, group, async_op)


def exscan(tensor: Tensor, op: Op = SUM, group: ProcessGroup | None = None, async_op: bool = False) -> Work | None:
    """Reduces the tensors of the ranks before this one element by element (an exclusive prefix reduction).

    All ranks of the group call it (collective); it returns when ``tensor`` holds the result. torch has no such function.

    Args:
        tensor: Overwritten; rank 0 of the group, before which there is none, keeps its values. Otherwise as for `scan`.
        op: As for `all_reduce`. AVG divides by the number of ranks before this one.
        group: None means the default group. Its order of the ranks counts.
        async_op: Return a Work at once instead of waiting.

    Returns:
        A Work with ``async_op=True``: leave ``tensor`` alone until its ``wait()`` has returned. Otherwise None.

    Raises:
        UnsupportedReduction: This ``op`` of this dtype has no right answer; as for `all_reduce`.
        ValueError: The group has another backend or has been destroyed, or there is no default group.

    Example:
        >>> start = torch.tensor(10)  # this rank has 10 rows; where do they begin?
        >>> dist.exscan(start)
        >>> (0 if dist.get_rank() == 0 else start.item()) == 10 * dist.get_rank()
        True
    """
    return _reduced("exscan", tensor, op, group, async_op)


def _reduced(name: str, tensor: Tensor, op: Op, group: ProcessGroup | None, async_op: bool) -> Work | None:
    tensor = groups.as_tensors(tensor)
    communicator = groups.without_torch(name, group, tensor)
    if communicator is None:
        distributed_c10d._warn_not_in_group(name)
        return None
    work: Work | None = getattr(communicator, name)(tensor, op, async_op)
    count_writes((tensor,))
    return work


dynamo.skip_frames(__name__)
dynamo.disable(scan)
dynamo.disable(exscan)

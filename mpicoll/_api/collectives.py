"""The collectives: all ranks of a group must call the same ones in the same order.

A call returns None when its operation has ended, or with ``async_op=True`` a Work at once: call ``wait()`` before you use the
results, and change none of the tensors before that. On a rank outside the group a call does nothing but warn.

A wrong argument raises TypeError or ValueError before anything is sent. OperationTimeout: another rank has not called in time.
GroupFailed: an earlier operation of the group has failed. CommunicationError: MPI reports an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as torch_dist
from torch import Tensor

# For a list of tensors; mpicoll/_tensors/versions.py says why. A function of ours around it would cost 2 % of a small operation.
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
    """Copies the tensor of rank ``src`` into the tensor of every other rank.

    Args:
        tensor: Read on ``src``, overwritten elsewhere. Same number of elements and same dtype on all ranks; any strides.
        src: Global rank. Give this or ``group_src``.
        group: None means the default group.
        async_op: Return a Work at once instead of waiting.
        group_src: Rank within the group.

    Raises:
        ValueError: Neither or both of ``src`` and ``group_src`` are given, or the group has no such rank.

    Example:
        >>> rank = dist.get_rank()  # 0 or 1
        >>> tensor = torch.tensor([rank, 7])
        >>> dist.broadcast(tensor, src=1)
        >>> tensor
        tensor([1, 7])
    """
    communicator = groups.of(group, tensor)
    if communicator is None:
        return torch_dist.broadcast(tensor, src, group, async_op, group_src)  # type: ignore[no-any-return]
    origin = groups.peer(communicator, "broadcast", "src", src, group_src)
    work = communicator.broadcast(tensor, origin, async_op)
    if communicator.rank != origin:
        count_writes((tensor,))
    return work


def all_reduce(tensor: Tensor, op: Op = SUM, group: ProcessGroup | None = None, async_op: bool = False) -> Work | None:
    """Reduces the tensors of all ranks element by element; every rank gets the result, with the same bits.

    Args:
        tensor: Overwritten. Same number of elements and same dtype on all ranks; any strides. fp16 and bf16 are accumulated in
            fp32 and rounded once. MIN and MAX propagate NaN.
        op: SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR of ``dist.ReduceOp``, or a PREMUL_SUM.
        group: None means the default group.
        async_op: Return a Work at once instead of waiting.

    Raises:
        UnsupportedReduction: This ``op`` of this dtype has no right answer, such as AVG of bool. It is a TypeError and a
            ValueError. docs/reference/reductions.md has the table.

    Example:
        >>> rank = dist.get_rank()  # 0 or 1
        >>> tensor = torch.tensor([1, 2]) * (rank + 1)  # [1, 2] and [2, 4]
        >>> dist.all_reduce(tensor)
        >>> tensor
        tensor([3, 6])
    """
    communicator = groups.of(group, tensor)
    if communicator is None:
        return torch_dist.all_reduce(tensor, op, group, async_op)  # type: ignore[no-any-return]
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
    """Reduces the tensors of all ranks element by element; rank ``dst`` gets the result.

    Args:
        tensor: Overwritten on ``dst``, unchanged elsewhere. Otherwise as for `all_reduce`.
        dst: Global rank. Give this or ``group_dst``.
        op: As for `all_reduce`.
        group: None means the default group.
        async_op: Return a Work at once instead of waiting.
        group_dst: Rank within the group.

    Raises:
        ValueError: Neither or both of ``dst`` and ``group_dst`` are given, or the group has no such rank.
        UnsupportedReduction: As for `all_reduce`.

    Example:
        >>> rank = dist.get_rank()  # 0 or 1
        >>> tensor = torch.tensor([1, 2]) * (rank + 1)  # [1, 2] and [2, 4]
        >>> dist.reduce(tensor, dst=0, op=dist.ReduceOp.MAX)
        >>> tensor  # on both ranks: rank 1 had the maximum and keeps its tensor
        tensor([2, 4])
    """
    communicator = groups.of(group, tensor)
    if communicator is None:
        return torch_dist.reduce(tensor, dst, op, group, async_op, group_dst)  # type: ignore[no-any-return]
    to = groups.peer(communicator, "reduce", "dst", dst, group_dst)
    work = communicator.reduce(tensor, to, op, async_op)
    if communicator.rank == to:
        count_writes((tensor,))
    return work


def all_gather(
    tensor_list: list[Tensor], tensor: Tensor, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """Gathers the tensors of all ranks into a list, on all ranks.

    Args:
        tensor_list: One tensor per rank. ``tensor_list[i]`` gets rank i's tensor and has as many elements and the same dtype.
        tensor: This rank's. Its shape may differ from rank to rank.
        group: None means the default group.
        async_op: Return a Work at once instead of waiting.

    Example:
        >>> rank = dist.get_rank()  # 0 or 1
        >>> results = [torch.empty(1), torch.empty(2)]
        >>> dist.all_gather(results, torch.ones(rank + 1))
        >>> results
        [tensor([1.]), tensor([1., 1.])]
    """
    communicator = groups.of(group, tensor)
    if communicator is None:
        return torch_dist.all_gather(tensor_list, tensor, group, async_op)  # type: ignore[no-any-return]
    work = communicator.all_gather(tensor_list, tensor, async_op)
    count_writes(tensor_list)
    return work


def all_gather_single(
    output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """Gathers the tensors of all ranks into one tensor, on all ranks. ``all_gather_into_tensor`` does the same.

    Args:
        output_tensor: Has (number of ranks) x (elements of the input): concatenated, (n * k, ...), or stacked, (n, k, ...).
        input_tensor: This rank's. Same shape on all ranks. May be this rank's part of the output.
        group: None means the default group.
        async_op: Return a Work at once instead of waiting.

    Example:
        >>> rank = dist.get_rank()  # 0 or 1
        >>> output = torch.empty(2, dtype=torch.int64)
        >>> dist.all_gather_single(output, torch.tensor([rank]))
        >>> output
        tensor([0, 1])
    """
    communicator = groups.of(group, input_tensor)
    if communicator is None:
        return _all_gather_single(output_tensor, input_tensor, group, async_op)  # type: ignore[no-any-return]
    work = communicator.all_gather_single(output_tensor, input_tensor, async_op)
    count_writes((output_tensor,))
    return work


_all_gather_single: Any = getattr(torch_dist, "all_gather_single", torch_dist.all_gather_into_tensor)


def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = None,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Gathers the tensors of all ranks into a list, on rank ``dst``.

    Args:
        tensor: This rank's. Its shape may differ from rank to rank.
        gather_list: On ``dst`` one tensor per rank, with the size and dtype of that rank's tensor; None elsewhere.
        dst: Global rank; 0 if neither this nor ``group_dst`` is given.
        group: None means the default group.
        async_op: Return a Work at once instead of waiting.
        group_dst: Rank within the group.

    Raises:
        ValueError: ``gather_list`` is missing on ``dst``, given elsewhere, or does not fit.

    Example:
        >>> rank = dist.get_rank()  # 0 or 1
        >>> results = [torch.empty(1), torch.empty(1)] if rank == 0 else None
        >>> dist.gather(torch.tensor([rank + 0.5]), results, dst=0)
        >>> [result.item() for result in results or []] == [[0.5, 1.5], []][rank]
        True
    """
    communicator = groups.of(group, tensor)
    if communicator is None:
        return torch_dist.gather(tensor, gather_list, dst, group, async_op, group_dst)  # type: ignore[no-any-return]
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
    """Gives each rank one tensor of a list that rank ``src`` has.

    Args:
        tensor: Overwritten with ``scatter_list[i]`` on rank i. Its shape may differ from rank to rank.
        scatter_list: On ``src`` one tensor per rank, with the size and dtype of that rank's tensor; None elsewhere.
        src: Global rank; 0 if neither this nor ``group_src`` is given.
        group: None means the default group.
        async_op: Return a Work at once instead of waiting.
        group_src: Rank within the group.

    Raises:
        ValueError: ``scatter_list`` is missing on ``src``, given elsewhere, or does not fit.

    Example:
        >>> rank = dist.get_rank()  # 0 or 1
        >>> tensor = torch.empty(1)
        >>> dist.scatter(tensor, [torch.tensor([5.0]), torch.tensor([6.0])] if rank == 0 else None, src=0)
        >>> tensor.item() == 5 + rank
        True
    """
    communicator = groups.of(group, tensor)
    if communicator is None:
        return torch_dist.scatter(tensor, scatter_list, src, group, async_op, group_src)  # type: ignore[no-any-return]
    if src is None and group_src is None:
        src = 0
    origin = groups.peer(communicator, "scatter", "src", src, group_src)
    work = communicator.scatter(tensor, scatter_list, origin, async_op)
    count_writes((tensor,))
    return work


def reduce_scatter(
    output: Tensor, input_list: list[Tensor], op: Op = SUM, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """Reduces lists of tensors over all ranks; rank i gets the result of the i-th tensors.

    Args:
        output: Overwritten with the reduction of ``input_list[i]`` over all ranks, on rank i.
        input_list: One tensor per rank. Tensors of different index may have different shapes.
        op: As for `all_reduce`.
        group: None means the default group.
        async_op: Return a Work at once instead of waiting.

    Raises:
        UnsupportedReduction: As for `all_reduce`.

    Example:
        >>> rank = dist.get_rank()  # 0 or 1
        >>> output = torch.empty(1)
        >>> dist.reduce_scatter(output, [torch.tensor([1.0]), torch.tensor([10.0])])
        >>> output.item() == (2.0, 20.0)[rank]
        True
    """
    communicator = groups.of(group, output)
    if communicator is None:
        return torch_dist.reduce_scatter(output, input_list, op, group, async_op)  # type: ignore[no-any-return]
    work = communicator.reduce_scatter(output, input_list, op, async_op)
    count_writes((output,))
    return work


def reduce_scatter_single(
    output: Tensor, input: Tensor, op: Op = SUM, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """Reduces a tensor over all ranks; rank i gets the i-th block. ``reduce_scatter_tensor`` does the same.

    Args:
        output: Overwritten with this rank's block of the reduction. May be this rank's part of the input.
        input: Has (number of ranks) x (elements of the output): concatenated, (n * k, ...), or stacked, (n, k, ...).
        op: As for `all_reduce`.
        group: None means the default group.
        async_op: Return a Work at once instead of waiting.

    Raises:
        UnsupportedReduction: As for `all_reduce`.

    Example:
        >>> rank = dist.get_rank()  # 0 or 1
        >>> output = torch.empty(1)
        >>> dist.reduce_scatter_single(output, torch.tensor([1.0, 10.0]))
        >>> output.item() == (2.0, 20.0)[rank]
        True
    """
    communicator = groups.of(group, output)
    if communicator is None:
        return _reduce_scatter_single(output, input, op, group, async_op)  # type: ignore[no-any-return]
    work = communicator.reduce_scatter_single(output, input, op, async_op)
    count_writes((output,))
    return work


_reduce_scatter_single: Any = getattr(torch_dist, "reduce_scatter_single", torch_dist.reduce_scatter_tensor)


def all_to_all(
    output_tensor_list: list[Tensor],
    input_tensor_list: list[Tensor],
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Sends one tensor to each rank and receives one from each: a transposed list of lists.

    Args:
        output_tensor_list: One tensor per rank. ``output_tensor_list[i]`` gets what rank i has for this rank.
        input_tensor_list: One tensor per rank. ``input_tensor_list[j]`` goes to rank j. All may differ in shape.
        group: None means the default group.
        async_op: Return a Work at once instead of waiting.

    Example:
        >>> rank = dist.get_rank()  # 0 or 1
        >>> results = [torch.empty(1), torch.empty(1)]
        >>> dist.all_to_all(results, [torch.tensor([10.0 * rank]), torch.tensor([10.0 * rank + 1])])
        >>> [result.item() for result in results] == [rank, 10 + rank]
        True
    """
    first = input_tensor_list[0] if isinstance(input_tensor_list, (list, tuple)) and input_tensor_list else None
    communicator = groups.of(group, first)
    if communicator is None:
        return torch_dist.all_to_all(output_tensor_list, input_tensor_list, group, async_op)  # type: ignore[no-any-return]
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
    """Sends some rows of a tensor to each rank and receives some from each.

    Args:
        output: Overwritten with the rows from rank 0, then those from rank 1, and so on.
        input: Rows for rank 0, then those for rank 1, and so on.
        output_split_sizes: Number of rows (dimension 0) from each rank, 0 allowed; None: equal shares.
        input_split_sizes: Number of rows for each rank, 0 allowed; None: equal shares.
        group: None means the default group.
        async_op: Return a Work at once instead of waiting.

    Example:
        >>> rank = dist.get_rank()  # 0 or 1
        >>> output = torch.empty(2)
        >>> dist.all_to_all_single(output, torch.tensor([10.0 * rank, 10.0 * rank + 1]))
        >>> output.tolist() == [rank, 10 + rank]
        True
    """
    communicator = groups.of(group, input)
    if communicator is None:
        return torch_dist.all_to_all_single(  # type: ignore[no-any-return]
            output, input, output_split_sizes, input_split_sizes, group, async_op
        )
    work = communicator.all_to_all_single(output, input, output_split_sizes, input_split_sizes, async_op)
    count_writes((output,))
    return work


dynamo.skip_frames(__name__)

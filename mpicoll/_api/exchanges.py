"""gather, scatter, and the two forms of all_to_all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as torch_dist
from torch import Tensor

# For a list of tensors; mpicoll/_tensors/buffers.py says why. A function of ours around it would cost 2 % of a small operation.
from torch._C import _increment_version as count_writes
from torch.distributed import ProcessGroup

from mpicoll._api import groups
from mpicoll._c10d import dynamo

if TYPE_CHECKING:
    from mpicoll._engine.work import Work


def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = None,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Gathers the tensors of all ranks into a list, on rank ``dst`` (collective).

    Returns when this rank has done its part. Unlike Gloo's, it takes tensors whose shapes differ from rank to rank.

    Args:
        tensor: This rank's. Its shape may differ from rank to rank; one dtype; any strides.
        gather_list: On ``dst`` one tensor per rank, with the size and dtype of that rank's tensor; None elsewhere.
        dst: Global rank; 0 if neither this nor ``group_dst`` is given.
        group: None means the default group.
        async_op: Return a Work at once instead of waiting.
        group_dst: Rank within the group.

    Returns:
        A Work with ``async_op=True``: leave all tensors alone until its ``wait()`` has returned. Otherwise None.

    Raises:
        ValueError: ``gather_list`` is missing on ``dst``, given elsewhere, or does not fit; or the group has no rank ``dst``.
        TruncationError: A rank sends more than its entry of the list holds.
        OperationTimeout: A rank has not called in time; the message names it. The group cannot be used any more.
        GroupFailed: An earlier operation of the group has failed.

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
    """Gives each rank one tensor of a list that rank ``src`` has (collective).

    Returns when this rank has done its part. Unlike Gloo's, the tensors may differ in shape and have any strides.

    Args:
        tensor: Overwritten with ``scatter_list[i]`` on rank i. Its shape may differ from rank to rank; any strides.
        scatter_list: On ``src`` one tensor per rank, with the size and dtype of that rank's tensor; None elsewhere.
        src: Global rank; 0 if neither this nor ``group_src`` is given.
        group: None means the default group.
        async_op: Return a Work at once instead of waiting.
        group_src: Rank within the group.

    Returns:
        A Work with ``async_op=True``: leave all tensors alone until its ``wait()`` has returned. Otherwise None.

    Raises:
        ValueError: ``scatter_list`` is missing on ``src``, given elsewhere, or does not fit; or the group has no rank ``src``.
        TruncationError: ``src`` has more for this rank than ``tensor`` holds.
        OperationTimeout, GroupFailed: As for `gather`.

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


def all_to_all(
    output_tensor_list: list[Tensor],
    input_tensor_list: list[Tensor],
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Sends one tensor to each rank and receives one from each: a transposed list of lists (collective).

    Returns when all outputs are filled. Unlike Gloo's, it takes tensors whose shapes differ.

    Args:
        output_tensor_list: One tensor per rank. ``output_tensor_list[i]`` gets what rank i has for this rank.
        input_tensor_list: One tensor per rank. ``input_tensor_list[j]`` goes to rank j. All may differ in shape; one dtype.
        group: None means the default group.
        async_op: Return a Work at once instead of waiting.

    Returns:
        A Work with ``async_op=True``: leave all tensors alone until its ``wait()`` has returned. Otherwise None.

    Raises:
        ValueError: A list does not have one tensor per rank, or this rank's output does not fit its input.
        TruncationError: A rank sends more than the output for it holds.
        OperationTimeout, GroupFailed: As for `gather`.

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
    """Sends some rows of a tensor to each rank and receives some from each (collective).

    Returns when ``output`` is filled. Unlike Gloo's, it takes any strides.

    Args:
        output: Overwritten with the rows from rank 0, then those from rank 1, and so on. Rows as long as those of ``input``.
        input: Rows for rank 0, then those for rank 1, and so on. Same dtype as ``output``.
        output_split_sizes: Number of rows (dimension 0) from each rank, 0 allowed; None: equal shares.
        input_split_sizes: Number of rows for each rank, 0 allowed; None: equal shares.
        group: None means the default group.
        async_op: Return a Work at once instead of waiting.

    Returns:
        A Work with ``async_op=True``: leave both tensors alone until its ``wait()`` has returned. Otherwise None.

    Raises:
        ValueError: Splits do not add up to the rows of the tensor, or a tensor has no rows.
        TruncationError: A rank sends more rows than this rank expects.
        OperationTimeout, GroupFailed: As for `gather`.

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

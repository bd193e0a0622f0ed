"""The two forms of all_to_all."""

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


def all_to_all(
    output_tensor_list: list[Tensor], input_tensor_list: list[Tensor], group: ProcessGroup | None = None, async_op: bool = False
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
        return groups.elsewhere(torch_dist.all_to_all, output_tensor_list, input_tensor_list, group, async_op)  # type: ignore[no-any-return]
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
        return groups.elsewhere(  # type: ignore[no-any-return]
            torch_dist.all_to_all_single, output, input, output_split_sizes, input_split_sizes, group, async_op
        )
    work = communicator.all_to_all_single(output, input, output_split_sizes, input_split_sizes, async_op)
    count_writes((output,))
    return work


dynamo.skip_frames(__name__)

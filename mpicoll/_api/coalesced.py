"""Collectives of many tensors as one operation. As in torch, ``async_op=True`` gives a Future here, not a Work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as torch_dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp
from torch.futures import Future

from mpicoll._api import groups
from mpicoll._c10d import dynamo
from mpicoll._tensors.buffers import count_write

if TYPE_CHECKING:
    from mpicoll._engine.communicator import Communicator
    from mpicoll._tensors.reductions import Op


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
    communicator = _engine(group, tensors)
    if communicator is None:
        return torch_dist.all_reduce_coalesced(tensors, op, group, async_op)  # type: ignore[no-any-return]
    work = communicator.all_reduce_coalesced(as_list(tensors), op, async_op)
    count_write(*as_list(tensors))
    return None if work is None else work.get_future()


def all_gather_coalesced(
    output_tensor_lists: list[list[Tensor]],
    input_tensor_list: list[Tensor],
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Future[list[Tensor]] | None:
    """Gathers each tensor of a list on all ranks, in one operation (collective). See `all_gather`.

    Returns when all outputs are filled. As in torch, ``async_op=True`` gives a Future here, not a Work.

    Args:
        output_tensor_lists: One list per rank; ``output_tensor_lists[i][k]`` gets rank i's ``input_tensor_list[k]``.
        input_tensor_list: This rank's tensors.
        group: None means the default group.
        async_op: Return a Future of the tensors at once instead of waiting.

    Returns:
        A Future with ``async_op=True``: leave the tensors alone until its ``wait()`` has returned. Otherwise None.

    Raises:
        ValueError: There is not one list per rank, or not one output per input.
        OperationTimeout, GroupFailed: As for `all_gather`.

    Example:
        >>> rank = dist.get_rank()  # 0 or 1
        >>> outputs = [[torch.empty(1), torch.empty(2)] for _ in range(2)]  # on 2 ranks
        >>> dist.all_gather_coalesced(outputs, [torch.full((1,), 1.0 + rank), torch.full((2,), 3.0 + rank)])
        >>> outputs
        [[tensor([1.]), tensor([3., 3.])], [tensor([2.]), tensor([4., 4.])]]
    """
    communicator = _engine(group, input_tensor_list)
    if communicator is None:
        return torch_dist.all_gather_coalesced(output_tensor_lists, input_tensor_list, group, async_op)  # type: ignore[no-any-return]
    per_rank = [list(tensors) for tensors in output_tensor_lists]
    if len(per_rank) != communicator.size or any(len(tensors) != len(input_tensor_list) for tensors in per_rank):
        raise ValueError(
            f"all_gather_coalesced: output_tensor_lists must be {communicator.size} lists, one per rank, of "
            f"{len(input_tensor_list)} tensors each, one per input; got lists of {[len(tensors) for tensors in per_rank]}"
        )
    per_input = [list(tensors) for tensors in zip(*per_rank, strict=True)]
    work = communicator.all_gather_coalesced(per_input, input_tensor_list, async_op)
    count_write(*(tensor for tensors in per_input for tensor in tensors))
    return None if work is None else work.get_future()


def _engine(group: ProcessGroup | None, tensors: list[Tensor]) -> Communicator | None:
    found = [groups.of(group, tensor) for tensor in as_list(tensors)]
    return found[0] if found and all(found) else None


def as_list(tensors: Any) -> list[Tensor]:
    """Returns a list; torch takes a single tensor for a list of one."""
    return [tensors] if isinstance(tensors, Tensor) else tensors


dynamo.skip_frames(__name__)

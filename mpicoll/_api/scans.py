"""scan and exscan: reductions over the ranks up to this one. torch.distributed does not have them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from torch._C import _increment_version as count_writes
from torch.distributed import ProcessGroup, ReduceOp, distributed_c10d

from mpicoll._api import groups
from mpicoll._c10d import dynamo

if TYPE_CHECKING:
    from mpicoll._engine.work import Work
    from mpicoll._tensors.reductions import Op

SUM = ReduceOp.SUM


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
    communicator = groups.without_torch(name, group, tensor)
    if communicator is None:
        distributed_c10d._warn_not_in_group(name)
        return None
    work: Work | None = getattr(communicator, name)(tensor, op, async_op)
    count_writes((tensor,))
    return work


dynamo.disable(scan)
dynamo.disable(exscan)

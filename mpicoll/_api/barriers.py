"""barrier and monitored_barrier."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as torch_dist
from torch.distributed import ProcessGroup

from mpicoll._api import groups
from mpicoll._c10d import dynamo

if TYPE_CHECKING:
    from mpicoll._engine.work import Work


def barrier(
    group: ProcessGroup | None = None, async_op: bool = False, device_ids: Any = None, timeout: timedelta | None = None
) -> Work | None:
    """Returns when every rank of the group has called it (collective).

    Unlike torch's, it has ``timeout`` with every version of torch, and needs no ``device_ids``.

    Args:
        group: None means the default group.
        async_op: Return a Work at once instead of waiting.
        device_ids: Accepted and ignored.
        timeout: None: the group's.

    Returns:
        A Work with ``async_op=True``, otherwise None.

    Raises:
        OperationTimeout: Not every rank has called in time; the message names them. The group cannot be used any more.
        GroupFailed: An earlier operation of the group has failed.

    Example:
        >>> dist.barrier()
        >>> work = dist.barrier(async_op=True)
        >>> work.wait()
        True
    """
    communicator = groups.of(group)
    if communicator is None:
        limit = {} if timeout is None else {"timeout": timeout}  # torch < 2.12 has no timeout here
        return torch_dist.barrier(group, async_op, device_ids, **limit)  # type: ignore[no-any-return]
    return communicator.barrier(async_op, None if timeout is None else timeout.total_seconds())


def monitored_barrier(
    group: ProcessGroup | None = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
) -> None:
    """A barrier that names the ranks that have not called it (collective).

    Returns when every rank of the group has called it. Unlike torch's, it is not for Gloo only, and it raises on every rank
    that has called.

    Args:
        group: None means the default group.
        timeout: A timedelta, or seconds; None: the group's.
        wait_all_ranks: Name all missing ranks, not only the first.

    Raises:
        OperationTimeout: On every rank that has called, if another has not; the message names it.
        GroupFailed: An earlier operation of the group has failed.

    Example:
        >>> dist.monitored_barrier(timeout=30)
    """
    communicator = groups.of(group)
    if communicator is None:
        torch_dist.monitored_barrier(group, timeout, wait_all_ranks)
        return
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    communicator.monitored_barrier(seconds, wait_all_ranks)


dynamo.skip_frames(__name__)

"""shrink and shrink_group: go on without some ranks."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as torch_dist
from torch.distributed import ProcessGroup

from mpicoll._api import groups
from mpicoll._c10d import dynamo


def shrink(timeout: timedelta | None = None) -> ProcessGroup:
    """Makes the world again, of the ranks that live, and returns its group (collective over them).

    All groups are destroyed. Ranks get new numbers from 0, in the old order. If further ranks die meanwhile, they are left out
    too. Needs a job that goes on when a rank dies: ``python -m mpicoll.run --fault-tolerant``. torch.distributed has no such
    function.

    Args:
        timeout: Of the new world; None: as before.

    Returns:
        The new default group.

    Raises:
        LaunchError: The job ends when a rank dies.
        ValueError: There is no default group, or another backend has made it.

    Example:
        >>> tensor = torch.ones(2)
        >>> try:
        ...     dist.all_reduce(tensor)
        ... except dist.PeerLost:
        ...     group = dist.shrink()
    """
    from mpicoll._c10d import shrink as shrinking  # it needs MPI, which `from mpicoll import shrink` does not start

    return shrinking.world(None if timeout is None else timeout.total_seconds())  # type: ignore[no-any-return]


def shrink_group(
    ranks_to_exclude: list[int], group: ProcessGroup | None = None, shrink_flags: int = 0, pg_options: Any = None
) -> ProcessGroup:
    """Makes a group again without some ranks, and returns it (collective over the other ones).

    Dead ranks are left out whether they are named or not. The default group: all groups are destroyed, and ranks get new numbers.
    In a fault-tolerant job the call then waits until the excluded ranks are dead or have come to the end of their program.
    Another group: it alone is destroyed. If it has lost a rank, all excluded ranks must be dead. Unlike
    torch's, it is not for NCCL only.

    Args:
        ranks_to_exclude: Ranks within the group. They must not call this.
        group: None: the default group.
        shrink_flags: 0 (SHRINK_DEFAULT): waits for the group's queued operations. 1 (SHRINK_ABORT): does not.
        pg_options: As in torch; for groups of other backends.

    Returns:
        The new group.

    Raises:
        TypeError: ``ranks_to_exclude`` is no list of ranks, or the group is of a backend that cannot shrink.
        ValueError: The ranks are not in the group, are named twice, or are all ranks.
        RuntimeError: This rank is excluded.
        PeerLost: A rank has died that was not excluded.

    Example:
        >>> group = dist.new_group([0, 1])
        >>> if dist.get_rank() == 0:
        ...     alone = dist.shrink_group([1], group)
    """
    if groups.of(group) is None:
        return torch_dist.shrink_group(ranks_to_exclude, group, shrink_flags, pg_options)
    from mpicoll._c10d import shrink as shrinking

    return shrinking.without(ranks_to_exclude, group, shrink_flags)  # type: ignore[no-any-return]


dynamo.skip_frames(__name__)

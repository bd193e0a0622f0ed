"""Groups made of a group: split_group and shrink_group, which torch has for NCCL only, and shrink."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as torch_dist
from torch.distributed import ProcessGroup

from mpicoll._api import groups
from mpicoll._c10d import dynamo


def split_group(
    parent_pg: ProcessGroup | None = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    backend: Any = None,
) -> ProcessGroup | None:
    """Splits a group; every member of a part gets that part as a group (collective over the members of a part).

    Unlike torch's, it works without an accelerator, with every version of torch.

    Args:
        parent_pg: The group to split; None means the default group.
        split_ranks: One list of ranks within the parent for each part. Lists may not overlap.
        timeout: Of the new group; None: MPICOLL_TIMEOUT, or torch's default of 30 minutes.
        pg_options: As in torch; for groups of other backends.
        group_desc: A description of the new group.
        backend: As in torch; if given, torch splits the group.

    Returns:
        This rank's part, or None if it is in no part.

    Raises:
        ValueError: ``split_ranks`` is missing, a part is empty, or a rank is not in the parent or is named twice.
        OperationTimeout: A member of this part did not come in time.

    Example:
        >>> part = dist.split_group(split_ranks=[[0], [1]])  # on 2 ranks
        >>> part.size()
        1
    """
    parent = groups.of(parent_pg)
    if parent is None or backend is not None:
        extra = {} if backend is None else {"backend": backend}
        return torch_dist.split_group(parent_pg, split_ranks, timeout, pg_options, group_desc, **extra)  # type: ignore[arg-type]
    if not split_ranks:
        raise ValueError("split_group: split_ranks must be given: one list of the parent's ranks for each part")
    named = [rank for part in split_ranks for rank in part]
    if any(len(part) == 0 for part in split_ranks):
        raise ValueError(f"split_group: a part of split_ranks {[list(part) for part in split_ranks]} is empty")
    if len(set(named)) != len(named):
        raise ValueError(f"split_group: split_ranks {[list(part) for part in split_ranks]} name a rank twice")
    if min(named) < 0 or max(named) >= parent.size:
        raise ValueError(f"split_group: split_ranks name rank {max(named)}; the parent has ranks 0 to {parent.size - 1}")
    mine = next((part for part in split_ranks if parent.rank in part), None)
    if mine is None:
        return None
    ranks = [parent.global_ranks[rank] for rank in sorted(mine)]
    # torch < 2.13 has no sort_ranks: it always sorts, so that a parent whose global ranks are not in order cannot exist there.
    order: dict[str, Any] = {} if ranks == sorted(ranks) else {"sort_ranks": False}
    made = torch_dist.new_group(ranks, timeout=timeout, use_local_synchronization=True, group_desc=group_desc, **order)
    assert isinstance(made, ProcessGroup)
    return made


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

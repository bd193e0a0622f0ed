"""split_group, which torch has for NCCL only."""

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


dynamo.skip_frames(__name__)

"""Ends the operations of the groups that have lost a rank, in a job that goes on when a rank dies.

MPI itself fails collectives of such a group, and messages to the dead rank. A rank may also wait for one that lives but will not
come, because that one has got the error first. So the watchdog of each rank looks for dead ranks and revokes their groups.
"""

from __future__ import annotations

from collections.abc import Iterable

from mpicoll._base.torch_errors import GroupDestroyed
from mpicoll._faults.group_state import GroupState
from mpicoll._mpi import errors, survivors


def look(groups: Iterable[GroupState]) -> None:
    """Makes the groups that have lost a rank unusable, and ends their operations with PeerLost. Called by the watchdog."""
    lost = survivors.lost()
    if lost:
        survivors.revoke_base()
    for group in groups if lost else ():
        gone = tuple(rank for rank in group.global_ranks if rank in lost)
        if gone and not isinstance(group.broken, GroupDestroyed):
            group.fail(errors.peer_lost(group.where("the group"), gone))
            group.channel.revoke()

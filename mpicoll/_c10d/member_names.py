"""Names of groups that their members alone make (``use_local_synchronization=True``).

torch hashes the ranks with a number in which members can differ. torch <= 2.13 takes the number of groups that the rank has:
after one was destroyed, the name of another comes again and is refused. torch 2.15 takes the number of groups that the rank
has made, and the members then count the world's groups differently from the other ranks. Ours is the number of groups that
these ranks have made, which all members know.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence

from mpicoll._c10d import patches, torch_world

_made: Counter[tuple[int, ...]] = Counter()  # number of groups by their ranks


@contextlib.contextmanager
def named_by_members() -> Iterator[None]:
    """Inside, torch names a new group by its ranks and by how many groups these have made; it does not count the group."""
    with patches.replaced("torch.distributed.distributed_c10d._hash_ranks_to_str", _name), torch_world.group_count_kept():
        yield


def _name(ranks: Sequence[int]) -> str:
    _made[tuple(ranks)] += 1
    number = _made[tuple(ranks)]
    return hashlib.sha1(f"{'_'.join(map(str, ranks))} {number}".encode(), usedforsecurity=False).hexdigest()

"""torch's private tables of process groups (``distributed_c10d._world``): the one file that knows their names.

`world` itself is for the functions of ``mpicoll._api``, which read it in every call.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch.distributed import distributed_c10d

from mpicoll._c10d import patches
from mpicoll._c10d.names import OURS, translate

if TYPE_CHECKING:
    from mpicoll._engine.communicator import Communicator

c10d: Any = distributed_c10d  # its annotations do not cover what is private
world: Any = c10d._world


def default_group() -> Any:
    """The group of all ranks; None before init_process_group."""
    return world.default_pg


def has(group: Any) -> bool:
    """True for a group that exists, with this rank among its members."""
    return isinstance(group, c10d.ProcessGroup) and group in world.pg_map


def backend_of(group: Any) -> str:
    """The backend string of a group, as get_backend() answers it."""
    return str(world.pg_map[group][0])


def name_of(group: Any) -> str | None:
    return world.pg_names.get(group)  # type: ignore[no-any-return]


def communicator(operation: str, group: Any) -> Communicator:
    """The communicator of a group, for an operation that needs it. ``group``: None means the default group.

    Raises:
        ValueError: There is no default group, this rank is not in the group, or it has been destroyed or has another backend.
    """
    from mpicoll._engine.registry import registry  # it starts MPI

    group = c10d._get_default_group() if group is None else group
    found = registry.find(name_of(group) or "") if has(group) else None
    if found is not None:
        return found
    if not isinstance(group, c10d.ProcessGroup):
        raise ValueError(f"{operation}: this rank is not in the group")
    if not has(group):
        raise ValueError(f"{operation}: the group has been destroyed")
    if translate(backend_of(group)) is not None:
        raise ValueError(f"{operation}: the group has no communicator")
    raise ValueError(f"{operation}: the group's backend is {backend_of(group)!r}; {operation} needs 'mpi'")


def record_backend(group: Any, requested: str, passed: str) -> None:
    """Records the backend as the user named it: get_backend() answers "mpi" where "mpi" was requested, and not ``passed``."""
    backend, store = world.pg_map.get(group, (None, None))
    if backend is None or str(backend) != passed:
        return  # not a member, or a group that existed before
    requested = requested.lower().replace(" ", "")
    world.pg_map[group] = (requested, store)
    if passed == OURS and "," in requested:  # a mixture, on torch <= 2.13
        world.pg_backend_config[group] = requested
    elif OURS not in requested:
        world.pg_backend_config[group] = world.pg_backend_config[group].replace(f":{OURS}", ":mpi")


# Note [Names that members agree on]
# torch names a group that its members alone make (``use_local_synchronization=True``) by a hash of the ranks and of a number in
# which members can differ. torch <= 2.13 takes the number of groups that the rank has: after one was destroyed, the name of
# another comes again and is refused. torch 2.15 takes the number of groups that the rank has made, and the members then count
# the world's groups differently from the other ranks. Ours is the number of groups that these ranks have made, which all members
# know.
_made: Counter[tuple[int, ...]] = Counter()  # number of groups by their ranks


@contextlib.contextmanager
def named_by_members() -> Iterator[None]:
    """Inside, torch names a new group by its ranks and by how many groups these have made; it does not count the group."""
    count = world.group_count
    try:
        with patches.replaced(f"{patches.C10D}._hash_ranks_to_str", _name):
            yield
    finally:
        world.group_count = count


def _name(ranks: Sequence[int]) -> str:
    _made[tuple(ranks)] += 1
    number = _made[tuple(ranks)]
    return hashlib.sha1(f"{'_'.join(map(str, ranks))} {number}".encode(), usedforsecurity=False).hexdigest()


def forget(names: Container[str], group_count: int) -> None:
    """Removes the groups of these names from all tables, as destroy_process_group does."""
    world.group_count = group_count  # torch names groups by it, and all ranks must have the same
    for group, name in [each for each in world.pg_names.items() if each[1] in names]:
        for table in _tables():
            table.pop(group, None)
        for tagged in world.tags_to_pg.values():
            if group in tagged:
                tagged.remove(group)
        with contextlib.suppress(RuntimeError):  # torch had not yet registered the name
            c10d._unregister_process_group(name)


def forget_world() -> None:
    """Empties all tables, as destroy_process_group does."""
    c10d._update_default_pg(None)
    for table in (*_tables(), world.tags_to_pg, world.pg_coalesce_state):
        table.clear()
    c10d._unregister_all_process_groups()
    world.group_count = 0


def _tables() -> tuple[dict[Any, Any], ...]:
    """The tables whose keys are groups."""
    return world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag

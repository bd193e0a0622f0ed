"""init_process_group("mpi") and new_group(backend="mpi"): what `register`'s wrappers do round torch's own functions.

    user ──► wrapper ──► [1] start MPI ──► [2] MPI's rank and size, "mpi" -> "mpicoll", env:// -> mpi:// ──► torch's function
                                                                                          │
                         [4] the name that the user gave, our excepthook  ◄── [3] `create`, on members only

torch knows the bare name "mpi" as a backend without store, timeout, rank and subgroups of members only; under the plugin's
name it treats us like any other backend. Whatever fails in [1]-[4], nothing is left half-made, and a second try works.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch.distributed import distributed_c10d as c10d

from mpicoll._c10d import ddp, dynamo, names, requested, some_ranks
from mpicoll._c10d.names import BACKEND_SUBCLASSES, OURS
from mpicoll._discovery import detect
from mpicoll._engine import registry
from mpicoll._mpi import abort, runtime
from mpicoll.errors import LaunchError

if TYPE_CHECKING:
    from mpicoll._engine.communicator import Communicator

__all__ = ["create", "init_process_group", "new_group"]

# The Python half of each group's adapter: TORCH_DISTRIBUTED_DEBUG=DETAIL wraps the C++ half and drops this one, and the
# methods with it
_alive: dict[Communicator, Any] = {}
_born: list[Communicator] = []  # made by `create` during the torch call in progress, for undoing it
_mixture: dict[str, str] | None = None  # backend by kind of device, while `create` is to make a mixed group
_made_by_members: Counter[tuple[int, ...]] = Counter()  # by ranks; see `_named_by_members`
_hooks: tuple[Callable[..., Any], Callable[..., Any]] | None = None  # sys.excepthook before torch's init, and torch's


def init_process_group(original: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Calls torch's init_process_group so that MPI is the world (collective over MPI's ranks).

    Args:   arguments: the user's, by name; the backend says mpi, or init_method is mpi:// (then any backend).
    Raises: LaunchError, ThreadLevelError: see `mpicoll._mpi.runtime.start`; or several ranks are asked for where MPI has one.
            RuntimeError: a backend in a mixture that this torch does not have.
    """
    if c10d._world.default_pg is not None:
        original(**arguments)  # raises torch's own error
        return
    asked = arguments.get("backend")
    translated = names.translate(asked)
    there = runtime.start()
    arguments = requested.unified(arguments)
    requested.check(arguments)
    some = translated is not None and some_ranks.asked_for(arguments, there.size)
    if some:
        arguments = some_ranks.meet(arguments)
        there = runtime.start()
    if translated is not None:
        _warn_of_contradictions(arguments, there)
        arguments.update(rank=there.rank, world_size=there.size)
        method = arguments.get("init_method")
        if arguments.get("store") is None and (method is None or str(method).startswith("env:")):
            arguments["init_method"] = "mpi://"
    with _undone_on_failure(), _stopped_on_failure(some), names.visible():
        before = sys.excepthook
        with _mixed(arguments, translated) if translated is not None else contextlib.nullcontext(arguments) as renamed:
            original(**renamed)
        if translated is not None:
            _rename(c10d._world.default_pg, str(asked), renamed["backend"])
        _install_hooks(before)


def new_group(original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Calls torch's _new_group_with_tag for a group of ours (collective over its members, which alone talk MPI).

    Raises: LaunchError: the world is another backend's and its ranks are not MPI's.
    """
    world = c10d._world.default_pg
    if world is None:
        return original(**arguments)  # raises torch's own error
    asked = str(arguments.get("backend") or c10d._world.pg_map[world][0])
    translated = names.translate(asked)
    assert translated is not None  # the wrapper asked
    _start_beside(world, arguments)
    with _undone_on_failure(), names.visible():
        with _mixed(arguments, translated) as renamed, _named_by_members(arguments):
            group = original(**renamed)
        _rename(group, asked, renamed["backend"])
        abort.install()
    return group


def create(options: Any) -> Any:
    """The adapter over a new communicator, for torch; called by torch on members only.

    Args:   options: torch's DistributedBackendOptions: group_id, group_rank, group_size, global_ranks_in_group, store, timeout.
    """
    ranks = list(options.global_ranks_in_group) or None
    runtime.start()
    communicator = registry.create(options.group_id, ranks, options.timeout.total_seconds())
    _born.append(communicator)
    if (communicator.rank, communicator.size) != (options.group_rank, options.group_size):
        raise LaunchError(
            f"group {options.group_id!r}: torch says rank {options.group_rank} of {options.group_size}, MPI says "
            f"{communicator.rank} of {communicator.size}; launch with `python -m mpicoll.run` or mpirun, and let "
            "init_process_group take rank and size from MPI"
        )
    _alive[communicator] = _adapt(communicator, options)
    names.serve(communicator.gpus)
    ddp.install()
    _close_to_dynamo()
    return _alive[communicator]


def _split(parent: Communicator, ranks: Sequence[int], name: str, timeout_s: float) -> Any:
    """The adapter over a new communicator of these ranks of ``parent``, in this order (collective over them)."""
    communicator = registry.create(name, [parent.global_ranks[rank] for rank in ranks], timeout_s)
    _alive[communicator] = _adapt(communicator, None)
    return _alive[communicator]


def _adapt(communicator: Communicator, options: Any) -> Any:
    if _mixture is not None:
        from mpicoll._c10d.mixed import MixedProcessGroup

        return MixedProcessGroup(communicator, _closing, _mixture, options)
    if BACKEND_SUBCLASSES:
        from mpicoll._c10d.backend import MpiBackend

        return MpiBackend(communicator, _closing, _split)
    from mpicoll._c10d import functional_ops
    from mpicoll._c10d.process_group import MpiProcessGroup

    functional_ops.register()
    return MpiProcessGroup(communicator, _closing)


@functools.cache
def _close_to_dynamo() -> None:
    """Once, when our modules have been loaded: torch.compile runs them as they are."""
    for room in ("_c10d", "_engine", "_progress", "_host", "_device", "_tensors"):
        dynamo.close_package(f"mpicoll.{room}")


def _closing(communicator: Communicator) -> None:
    """Called when torch gives up a group of ours; with the world, the excepthooks are put back."""
    global _hooks
    _alive.pop(communicator, None)
    world = c10d._world.default_pg
    if world is None or c10d._world.pg_names.get(world) != communicator.name:
        return
    abort.uninstall()
    if _hooks is not None and sys.excepthook is _hooks[1]:
        sys.excepthook = _hooks[0]  # else torch, which never removes its own, would prefix twice after the next init
    _hooks = None


def _install_hooks(before: Callable[..., Any]) -> None:
    """Ours outside torch's, which holds back stderr round the hook that it found: ours must not end the process in there."""
    global _hooks
    _hooks = (before, sys.excepthook)
    abort.install()


@contextlib.contextmanager
def _mixed(arguments: dict[str, Any], translated: str) -> Iterator[dict[str, Any]]:
    """The arguments with the backend's name for torch; where torch <= 2.13 cannot mix, ours alone, and `create` mixes."""
    global _mixture
    _mixture = None if BACKEND_SUBCLASSES else _parts(translated)
    try:
        yield {**arguments, "backend": translated if _mixture is None else OURS}
    finally:
        _mixture = None


@contextlib.contextmanager
def _named_by_members(arguments: dict[str, Any]) -> Iterator[None]:
    """Calls a group that its members alone make by its ranks and a number: how many groups of these ranks they have made.

    torch takes a number in which members differ: the groups that a rank has (<= 2.13; after one was destroyed, the name of
    another comes again, and is refused), or all that it has made (2.15, where members then count the world's groups otherwise
    than the others do).
    """
    if not arguments.get("use_local_synchronization"):
        yield
        return
    torchs, count = c10d._hash_ranks_to_str, c10d._world.group_count

    def named(ranks: Sequence[int]) -> str:
        _made_by_members[tuple(ranks)] += 1
        number = _made_by_members[tuple(ranks)]
        return hashlib.sha1(f"{'_'.join(map(str, ranks))} {number}".encode(), usedforsecurity=False).hexdigest()

    c10d._hash_ranks_to_str = named
    try:
        yield
    finally:
        c10d._hash_ranks_to_str, c10d._world.group_count = torchs, count


def _parts(translated: str) -> dict[str, str] | None:
    from mpicoll._c10d import mixed

    return mixed.parts(translated)


def _warn_of_contradictions(arguments: dict[str, Any], there: runtime.Runtime) -> None:
    """MPI is the truth. Values that say otherwise come from an outer torchrun, a batch shell, or a habit."""
    launch = detect.detect()  # agrees with MPI; differs from `there` where the world is a communicator of the user's own
    for argument, variable, truth, launched in (
        ("rank", "RANK", there.rank, launch and launch.rank),
        ("world_size", "WORLD_SIZE", there.size, launch and launch.size),
    ):
        given = arguments.get(argument, -1)
        if given not in (-1, None, truth):
            _warn(f"init_process_group: {argument}={given} is ignored, MPI says {truth}")
        value = os.environ.get(variable, "")
        if value.isdigit() and int(value) not in (truth, launched):
            _warn(f"init_process_group: the environment says {variable}={value}, MPI says {truth}, and MPI is right")


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=5)  # _warn, _warn_of_contradictions, init_process_group, register's wrapper, the user


def _start_beside(world: Any, arguments: dict[str, Any]) -> None:
    """Starts MPI beside a world that may be another backend's, and checks that both mean the same ranks."""
    ranks = arguments.get("ranks")
    some = arguments.get("use_local_synchronization") and ranks is not None and len(ranks) < world.size()
    if some and runtime.current() is None:
        raise LaunchError(
            "new_group(backend='mpi', use_local_synchronization=True): MPI is not running yet, and all ranks must start it "
            "together; make the first mpi group without use_local_synchronization, or use "
            "init_process_group(..., init_method='mpi://')"
        )
    there = runtime.start()
    if (there.rank, there.size) != (world.rank(), world.size()):
        raise LaunchError(
            f"new_group(backend='mpi'): this process is rank {world.rank()} of {world.size()} in the default group, but rank "
            f"{there.rank} of {there.size} in MPI; launch with `python -m mpicoll.run -n {world.size()}` or mpirun, and use "
            "init_method='mpi://' so that the default group takes its ranks from MPI"
        )


def _rename(group: Any, asked: str, given: str) -> None:
    """Records the backend under the name that the user gave: get_backend() answers "mpi" to who asked for "mpi".

    Args:   given: the name that torch was given in its place.
    """
    name, store = c10d._world.pg_map.get(group, (None, None))
    if name is None or str(name) != given:
        return  # not a member, or a group that was there before
    asked = asked.lower().replace(" ", "")
    c10d._world.pg_map[group] = (asked, store)  # type: ignore[assignment]
    if given == OURS and _parts(asked) is not None:
        c10d._world.pg_backend_config[group] = asked
    elif OURS not in asked:
        config = c10d._world.pg_backend_config[group]
        c10d._world.pg_backend_config[group] = config.replace(f":{OURS}", ":mpi")


@contextlib.contextmanager
def _stopped_on_failure(some: bool) -> Iterator[None]:
    """If torch's function raises, a world of some ranks is no world any more."""
    try:
        yield
    except BaseException:
        if some and runtime.start().parent is not None:
            runtime.stop()
        raise


@contextlib.contextmanager
def _undone_on_failure() -> Iterator[None]:
    """If torch's function raises: closes what `create` made, and forgets a world that is only half there."""
    state = c10d._world
    fresh, group_count = state.default_pg is None, state.group_count
    _born.clear()
    try:
        yield
    except BaseException:
        state.group_count = group_count  # group names must stay the same on all ranks
        names = {communicator.name for communicator in _born}
        for communicator in _born:
            _alive.pop(communicator, None)
            communicator.close()
        for group in [group for group, name in state.pg_names.items() if name in names]:
            _forget(group)
        if fresh:
            _forget_world()
        raise
    finally:
        _born.clear()


def _forget(group: Any) -> None:
    """What destroy_process_group forgets about one group."""
    state = c10d._world
    name = state.pg_names[group]
    for table in (state.pg_map, state.pg_names, state.pg_group_ranks, state.pg_backend_config, state.pg_to_tag):
        table.pop(group, None)
    for tagged in state.tags_to_pg.values():
        if group in tagged:
            tagged.remove(group)
    with contextlib.suppress(RuntimeError):  # torch had not come to registering the name
        c10d._unregister_process_group(name)  # type: ignore[attr-defined]


def _forget_world() -> None:
    """What destroy_process_group forgets, for a world that was never finished."""
    state = c10d._world
    c10d._update_default_pg(None)
    for table in (
        state.pg_map,
        state.pg_names,
        state.pg_group_ranks,
        state.pg_backend_config,
        state.pg_to_tag,
        state.tags_to_pg,
        state.pg_coalesce_state,
    ):
        table.clear()
    c10d._unregister_all_process_groups()  # type: ignore[attr-defined]
    state.group_count = 0

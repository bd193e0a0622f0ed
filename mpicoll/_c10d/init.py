"""init_process_group("mpi") and new_group(backend="mpi"): what the wrappers of `register` do around torch's own functions.

    user ──► wrapper ──► [1] start MPI ──► [2] rank and size from MPI, "mpi" -> "mpicoll", env:// -> mpi:// ──► torch's function
                                                                                          │
                         [4] the backend's name as requested, excepthooks  ◄── [3] `adapters.create`, on members only

torch takes the bare name "mpi" for a backend without store, timeout, rank and subgroups of members only; under the name of the
plugin it treats ours like any other backend. If one of [1] to [4] fails, a second try works.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

from mpicoll import _config
from mpicoll._c10d import adapters, excepthooks, names, requested_ranks, some_ranks, torch_world
from mpicoll._c10d.member_names import named_by_members
from mpicoll._mpi import abort, runtime, survivors
from mpicoll._mpi.errors import MPIException, translate


def init_process_group(original: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Calls torch's init_process_group so that MPI's ranks are the world (collective over them).

    Either the backend names mpi, or init_method is mpi:// (with any backend).

    Raises:
        LaunchError, ThreadLevelError: Several ranks are requested where MPI has one, or see `mpicoll._mpi.runtime.start`.
        RuntimeError: This torch does not have a backend that a mixture names.
        ValueError: MPICOLL_TIMEOUT has a value that is not allowed.
    """
    if torch_world.default_group() is not None:
        original(**arguments)  # raises torch's own error
        return
    requested = arguments.get("backend")
    translated = names.translate(requested)
    if translated is not None:
        arguments = with_timeout(arguments)
    mpi = survivors.start()
    arguments = requested_ranks.unified(arguments)
    requested_ranks.check(arguments)
    some = translated is not None and some_ranks.asked_for(arguments, mpi.size)
    if some:
        arguments = some_ranks.meet(arguments)
        mpi = runtime.start()
    if translated is not None:
        requested_ranks.warn_of_contradictions(arguments, mpi)
        arguments.update(rank=mpi.rank, world_size=mpi.size)
        method = arguments.get("init_method")
        if arguments.get("store") is None and (method is None or str(method).startswith("env:")):
            arguments["init_method"] = "mpi://"
    with named("init_process_group"), undone_on_failure(), some_ranks.left_on_failure(some), names.visible():
        before = sys.excepthook
        if translated is None:
            original(**arguments)
        else:
            with adapters.mixing(translated) as passed:
                original(**{**arguments, "backend": passed})
            torch_world.record_backend(torch_world.default_group(), str(requested), passed)
        excepthooks.install(before)


def new_group(original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Calls torch's _new_group_with_tag for an mpicoll group (collective over its members; only they call MPI).

    Raises:
        LaunchError: The world is another backend's and its ranks are not MPI's.
    """
    world = torch_world.default_group()
    if world is None:
        return original(**arguments)  # raises torch's own error
    requested = str(arguments.get("backend") or torch_world.backend_of(world))
    translated = names.translate(requested)
    assert translated is not None  # the wrapper asked
    arguments = with_timeout(arguments)
    requested_ranks.start_beside(world, arguments)
    by_members = arguments.get("use_local_synchronization")
    with named("new_group"), undone_on_failure(), names.visible():
        with adapters.mixing(translated) as passed, named_by_members() if by_members else contextlib.nullcontext():
            group = original(**{**arguments, "backend": passed})
        torch_world.record_backend(group, requested, passed)
        abort.install()
    return group


def with_timeout(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments with MPICOLL_TIMEOUT as the timeout, if it is set and they have none."""
    seconds = None if arguments.get("timeout") is not None else _config.get("MPICOLL_TIMEOUT")
    return dict(arguments) if seconds is None else {**arguments, "timeout": timedelta(seconds=seconds)}


@contextlib.contextmanager
def named(operation: str) -> Iterator[None]:
    """Turns an error of MPI into mpicoll's, PeerLost for example."""
    try:
        yield
    except MPIException as raw:
        raise translate(raw, operation) from raw


@contextlib.contextmanager
def undone_on_failure() -> Iterator[None]:
    """If the body raises: closes the communicators that it made, and removes its groups from torch's tables."""
    world = torch_world.world
    fresh, group_count = world.default_pg is None, world.group_count
    before = set(adapters.alive)
    try:
        yield
    except BaseException:
        made = [communicator for communicator in adapters.alive if communicator not in before]
        for communicator in made:
            del adapters.alive[communicator]
            communicator.close()
        torch_world.forget({communicator.name for communicator in made}, group_count)
        if fresh:
            torch_world.forget_world()
        raise

"""init_process_group("mpi") and new_group(backend="mpi"): what the wrappers of `register` do around torch's own functions.

    user ──► wrapper ──► [1] start MPI ──► [2] rank and size from MPI, "mpi" -> "mpicoll", env:// -> mpi:// ──► torch's function
                                                                                          │
                         [4] the backend's name as requested, excepthooks  ◄── [3] `adapters.create`, on members only

torch takes the bare name "mpi" for a backend without store, timeout, rank and subgroups of members only; under the name of the
plugin it treats ours like any other backend. If one of [1] to [4] fails, a second try works.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from mpicoll._c10d import adapters, excepthooks, names, requested_ranks, some_ranks, timeouts, torch_world
from mpicoll._c10d.member_names import named_by_members
from mpicoll._faults import arrival
from mpicoll._mpi import abort, runtime, survivors
from mpicoll._mpi.errors import MPIException, translate
from mpicoll._tensors import checks


def init_process_group(original: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Calls torch's init_process_group so that MPI's ranks are the world (collective over them).

    Either the backend names mpi, or init_method is mpi:// (with any backend).

    All ranks must come within the timeout. If one does not, the others raise. A rank that has come by then, but stops before the
    world is complete, or has not started MPI, makes the others end the job: nothing can be raised inside MPI.

    Raises:
        OperationTimeout: A rank did not come in time; names it.
        LaunchError, ThreadLevelError: Several ranks are requested where MPI has one, or see `mpicoll._mpi.runtime.start`.
        RuntimeError: This torch does not have a backend that a mixture names.
        ValueError: MPICOLL_TIMEOUT has a value that is not allowed.
    """
    if torch_world.default_group() is not None:
        original(**arguments)  # raises torch's own error
        return
    translated = names.translate(arguments.get("backend"))
    if translated is not None:
        arguments = timeouts.complete(arguments)
    limit_s = timeouts.limit(arguments)
    checks.timeout("init_process_group", limit_s)
    mpi = survivors.start()  # has been started by the import of this module, within the limit
    arguments = requested_ranks.unified(arguments)
    runtime.check_environment()
    runtime.check_named("init_process_group", arguments.get("rank"), arguments.get("world_size"))
    if translated is None:  # another backend, by mpi://
        with named("init_process_group"), excepthooks.outside_torch(), undone_on_failure(), names.visible():
            original(**arguments)
        return
    with timeouts.end_job_after("init_process_group", arguments):
        _init_over_mpi(original, arguments, translated, mpi, limit_s)


def _init_over_mpi(
    original: Callable[..., Any], arguments: dict[str, Any], translated: str, mpi: runtime.Runtime, limit_s: float
) -> None:
    some = some_ranks.asked_for(arguments, mpi.size)
    if some:
        arguments = some_ranks.meet(arguments)
        mpi = runtime.start()
    requested_ranks.warn_of_contradictions(arguments, mpi)
    arguments.update(rank=mpi.rank, world_size=mpi.size)
    method = arguments.get("init_method")
    if arguments.get("store") is None and (method is None or str(method).startswith("env:")):
        arguments["init_method"] = "mpi://"
    with contextlib.ExitStack() as around:
        for context in (
            named("init_process_group"), excepthooks.outside_torch(), undone_on_failure(), some_ranks.left_on_failure(some),
            names.visible(),
        ):  # fmt: skip
            around.enter_context(context)
        arrival.everyone(mpi, "init_process_group", limit_s)
        with adapters.mixing(translated) as passed:
            original(**{**arguments, "backend": passed})
        torch_world.record_backend(torch_world.default_group(), str(arguments.get("backend")), passed)


def new_group(original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Calls torch's _new_group_with_tag for an mpicoll group (collective over its members; only they call MPI).

    Raises:
        OperationTimeout: A member did not come within the timeout of the group; names it.
        LaunchError: The world is another backend's and its ranks are not MPI's.
    """
    world = torch_world.default_group()
    if world is None:
        return original(**arguments)  # raises torch's own error
    requested = str(arguments.get("backend") or torch_world.backend_of(world))
    translated = names.translate(requested)
    assert translated is not None  # the wrapper asked
    arguments = timeouts.complete(arguments)
    requested_ranks.start_beside(world, arguments, timeouts.limit(arguments))
    by_members = arguments.get("use_local_synchronization")
    with named("new_group"), undone_on_failure(), names.visible():
        with adapters.mixing(translated) as passed, named_by_members() if by_members else contextlib.nullcontext():
            group = original(**{**arguments, "backend": passed})
        torch_world.record_backend(group, requested, passed)
        abort.install()
    return group


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

"""Groups of mpicoll: what the wrappers of `register` do around torch's init_process_group and new_group.

    user ──► wrapper ──► [1] start MPI ──► [2] rank and size from MPI, "mpi" -> "mpicoll", env:// -> mpi:// ──► torch's function
                                                                                          │
                         [4] the backend's name as requested, excepthooks  ◄── [3] `create` makes the adapter, on members only

torch takes the bare name "mpi" for a backend without store, timeout, rank and subgroups of members only; under the name of the
plugin it treats ours like any other backend. If one of [1] to [4] fails, a second try works.

The adapter is the object that torch calls: torch <= 2.13 takes a ProcessGroup subclass (torch213/), torch >= 2.14 a Backend
subclass (backend.py). An adapter knows its maker only by the callbacks that it is handed.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from torch._C._distributed_c10d import HashStore

from mpicoll._base import launcher, processes
from mpicoll._base.errors import LaunchError
from mpicoll._base.group_errors import OperationTimeout
from mpicoll._c10d import ddp, dynamo, hooks, names, patches, refused_by_torch, requested_ranks, store, torch_world, wrapping
from mpicoll._engine.registry import registry
from mpicoll._faults import roll_call, watch
from mpicoll._mpi import abort, runtime, survivors
from mpicoll._mpi.errors import MPIException, translate
from mpicoll._mpi.library import MPI
from mpicoll._tensors import checks

if TYPE_CHECKING:
    from mpicoll._engine.communicator import Communicator

# The Python half of each group's adapter, None until it is made. TORCH_DISTRIBUTED_DEBUG=DETAIL wraps the C++ half and drops
# this one, and the methods with it.
_alive: dict[Communicator, Any] = {}

# -- around torch's functions ------------------------------------------------------------------------------------------------


def init_process_group(original: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Calls torch's init_process_group so that MPI's ranks are the world (collective over them).

    Either the backend names mpi, or init_method is mpi:// (with any backend).

    All ranks must come within the timeout. If one does not, the others raise. A rank that has come by then, but stops before the
    world is complete, or has not started MPI, makes the others end the job: nothing can be raised inside MPI.

    Raises:
        OperationTimeout: A rank did not come in time; names it.
        LaunchError, ThreadLevelError: rank or world_size contradict MPI, or see `mpicoll._mpi.runtime.start`.
        RuntimeError: This torch does not have a backend that a mixture names.
        ValueError: MPICOLL_TIMEOUT has a value that is not allowed.
    """
    if torch_world.default_group() is not None:
        original(**arguments)  # raises torch's own error
        return
    translated = names.translate(arguments.get("backend"))
    if translated is not None:
        arguments = wrapping.complete(arguments)
        if arguments.get("enable_reconfigure"):  # torch >= 2.14
            raise NotImplementedError("init_process_group: mpi has no enable_reconfigure; mpicoll.reconfigure() needs none")
    limit_s = wrapping.limit(arguments)
    checks.timeout("init_process_group", limit_s)
    mpi = survivors.start()  # has been started by the import of this module, within the limit
    arguments = requested_ranks.unified(arguments)
    runtime.check_environment()
    runtime.check_named("init_process_group", arguments.get("rank"), arguments.get("world_size"))
    for name, truth in (("rank", mpi.rank), ("world_size", mpi.size)):
        runtime.refuse_contradiction("init_process_group", name, arguments.get(name), truth, requested_ranks.OF_SOME_RANKS)
    if translated is None:  # another backend, by mpi://
        with _hooks_outside_torch(), _undone_on_failure("init_process_group"):
            original(**arguments)
        return
    requested_ranks.warn_of_environment(mpi)
    with watch.end_job_after("init_process_group", limit_s):
        _init_over_mpi(original, arguments, translated, mpi, limit_s)


def _init_over_mpi(
    original: Callable[..., Any], arguments: dict[str, Any], translated: str, mpi: runtime.Runtime, limit_s: float
) -> None:
    arguments.update(rank=mpi.rank, world_size=mpi.size)
    method = arguments.get("init_method")
    by_mpi = arguments.get("store") is None and (method is None or str(method).startswith(("env:", "mpi:")))
    with _hooks_outside_torch(), _undone_on_failure("init_process_group"):
        registry.begin()
        roll_call.everyone(mpi, "init_process_group", limit_s)
        alone = launcher.store_world is not None or mpi.size == 1  # Open MPI started alone leaves a file, too
        processes.unlink_mapped(processes.PATTERNS if alone else processes.OF_MPICH)  # all ranks have mapped those of MPICH
        if by_mpi:
            made = store.make(mpi, limit_s) if names.only_ours(translated) else None
            arguments.update(store=made, init_method="mpi://" if made is None else None)
        with _mixing(translated) as passed:
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
    for rank in arguments.get("ranks") or () if world.size() == 1 else ():  # torch's error does not name the launcher
        checks.global_rank("new_group", "ranks", rank, [0])
    requested = str(arguments.get("backend") or torch_world.backend_of(world))
    translated = names.translate(requested)
    assert translated is not None  # the wrapper asked
    arguments = wrapping.complete(arguments)
    _start_beside(world, arguments, wrapping.limit(arguments))
    by_members = arguments.get("use_local_synchronization")
    with _undone_on_failure("new_group"):
        with _mixing(translated) as passed, torch_world.named_by_members() if by_members else contextlib.nullcontext():
            group = original(**{**arguments, "backend": passed})
        torch_world.record_backend(group, requested, passed)
        abort.install()
    return group


def _start_beside(world: Any, arguments: Mapping[str, Any], limit_s: float) -> None:
    """Starts MPI for a new group beside a default group that may be another backend's.

    Raises:
        OperationTimeout: A rank did not come in time to the first such group, for which all ranks start MPI.
        LaunchError: The ranks of the world are not MPI's, or only some ranks call and MPI is not running yet.
    """
    ranks = arguments.get("ranks")
    some = arguments.get("use_local_synchronization") and ranks is not None and len(ranks) < world.size()
    if some and runtime.current() is None:
        raise LaunchError(
            "new_group(backend='mpi', use_local_synchronization=True): MPI is not running yet, and all ranks must start it "
            "together; make the first mpi group without use_local_synchronization, or use "
            "init_process_group(..., init_method='mpi://')"
        )
    mpi = runtime.start()
    if (mpi.rank, mpi.size) != (world.rank(), world.size()):
        raise LaunchError(
            f"new_group(backend='mpi'): this process is rank {world.rank()} of {world.size()} in the default group, but rank "
            f"{mpi.rank} of {mpi.size} in MPI; launch with `python -m mpicoll.run -n {world.size()}` or mpirun, and use "
            "init_method='mpi://' so that the default group takes its ranks from MPI"
        )
    if not some and not mpi.connected:
        roll_call.everyone(mpi, "new_group", limit_s)


def group_of_members(original: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Calls torch's _new_process_group_helper, by which libraries make a group that is not the default one (collective over it).

    Raises:
        LaunchError: The call names no ranks, so that all of MPI's ranks are the group, and its rank or size differ from MPI's.
    """
    translated, mpi, where = names.translate(arguments["backend"]), runtime.start(), ("group_rank", "group_size")
    assert translated is not None  # the wrapper asked
    rank, size = (arguments.get(name) for name in where)
    if not arguments.get("global_ranks_in_group") and (rank, size) != (mpi.rank, mpi.size):
        raise LaunchError(
            f"_new_process_group_helper(backend='mpi'): rank {rank} of {size}, but this is rank {mpi.rank} of {mpi.size} in MPI. "
            "A group of some ranks, or in another order, is made by new_group(ranks, backend='mpi')"
        )
    with _undone_on_failure("new_group"), _mixing(translated) as passed:
        group, prefix = original(**{**arguments, "backend": passed})
        torch_world.record_backend(group, str(arguments["backend"]), passed)
        abort.install()
    return group, prefix


class _Spanning(NamedTuple):
    """For `create`, in place of the program's ``pg_options``."""

    comm: MPI.Intracomm
    pg_options: Any


_numbers = itertools.count(1)  # for the names of `spanning` groups; torch's counter must stay equal on all ranks of a world


def spanning(comm: MPI.Intracomm, timeout: timedelta | None = None, pg_options: Any = None, group_desc: str | None = None) -> Any:
    """Makes a group of the ranks of ``comm``, which may be of several worlds (collective over them). They are its global ranks.

    torch makes such a group as if it was another default group. Nobody reads its store.
    """
    if not isinstance(comm, MPI.Comm) or (comm and comm.Is_inter()):
        raise TypeError(f"new_group: comm must be an intracommunicator of mpi4py, got {type(comm).__name__}")
    if not comm:  # COMM_NULL
        return torch_world.c10d.GroupMember.NON_GROUP_MEMBER
    arguments = wrapping.complete({"timeout": timeout})
    limit = timedelta(seconds=wrapping.limit(arguments))
    name, place, options = f"comm {next(_numbers)}", (comm.Get_size(), comm.Get_rank()), _Spanning(comm, pg_options)
    with _undone_on_failure("new_group"):
        group, _ = torch_world.c10d._new_process_group_helper(
            *place, [], names.OURS, HashStore(), name, options, limit, group_desc=group_desc
        )
        torch_world.world.pg_group_ranks[group] = {rank: rank for rank in range(comm.Get_size())}
        torch_world.record_backend(group, "mpi", names.OURS)
        abort.install()
    patches.wrap(f"{patches.C10D}.get_rank", _with_spanning)
    return group


def _with_spanning(original: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(original)
    def get_rank(group: Any = None) -> int:
        known = registry.find(torch_world.name_of(group) or "")
        return known.rank if known is not None and known.spans else original(group)

    dynamo.disable(get_rank)
    return get_rank


@contextlib.contextmanager
def _undone_on_failure(operation: str) -> Iterator[None]:
    """Inside, torch can make groups of ours. If the body raises, none is left, neither its communicator nor in torch's tables.

    An error of MPI becomes mpicoll's, PeerLost for example.
    """
    world = torch_world.world
    fresh, group_count = world.default_pg is None, world.group_count
    before = set(_alive)
    try:
        with names.visible():
            yield
    except BaseException as error:
        made = [communicator for communicator in _alive if communicator not in before]
        for communicator in made:
            del _alive[communicator]
            communicator.close()
        torch_world.forget({communicator.name for communicator in made}, group_count)
        if fresh:
            torch_world.forget_world()
            store.close()
        if isinstance(error, MPIException):
            raise translate(error, operation) from error
        raise


# Note [Our excepthooks are outside]
# An uncaught exception ends the job (_mpi/abort.py). init_process_group of torch sets a hook that adds the rank to the traceback,
# and never removes it. Ours goes outside: torch holds stderr back while it calls the hook that it found, and a hook that ends the
# process inside would lose the text. With ours torch's goes too: otherwise torch would add the rank twice after the next init.


@contextlib.contextmanager
def _hooks_outside_torch() -> Iterator[None]:
    """Sets our hooks outside the one that torch's init_process_group sets in the body.

    If the body raises, they are as before. After a timeout they are set: an uncaught one ends the job, where the ranks that came
    would otherwise wait in MPI_Finalize for the one that did not.
    """
    installed = abort.uninstall()  # set by init_rpc, or after a timeout
    before = sys.excepthook
    try:
        yield
    except BaseException as error:
        if installed or isinstance(error, OperationTimeout):
            abort.install()
        raise
    abort.install(before)


# -- adapters ----------------------------------------------------------------------------------------------------------------


def create(options: Any, pg_options: Any) -> Any:
    """Makes the adapter over a new communicator; torch calls it on members only. ``pg_options``: this group's own settings.

    Raises:
        LaunchError: torch and MPI disagree about this rank's place in the group.
        ValueError: ``pg_options`` is a dict of something else than MPICOLL_ON_TIMEOUT and its value.
    """
    comm, pg_options = pg_options if isinstance(pg_options, _Spanning) else (None, pg_options)
    own = pg_options if isinstance(pg_options, dict) else {}  # the options of another backend of this group are not ours
    if own.keys() - {"MPICOLL_ON_TIMEOUT"}:
        raise ValueError(f"new_group: pg_options of a group over mpi can set MPICOLL_ON_TIMEOUT only, got {own}")
    runtime.start()
    ranks, limit_s = list(options.global_ranks_in_group) or None, options.timeout.total_seconds()
    return _make(options.group_id, ranks, limit_s, options, own, comm)


def _split(parent: Communicator, ranks: Sequence[int], name: str, timeout_s: float) -> Any:
    """Makes the adapter over a new communicator of these ranks of ``parent``, in this order (collective over them)."""
    return _make(name, [parent.global_ranks[rank] for rank in ranks], timeout_s)


def _make(
    name: str, ranks: Sequence[int] | None, timeout_s: float, options: Any = None, own: Mapping[str, str] = {}, comm: Any = None
) -> Any:
    communicator = registry.create(name, ranks, timeout_s, own, comm)
    _alive[communicator] = None
    place = communicator.rank, communicator.size
    if options is not None and place != (options.group_rank, options.group_size):
        raise LaunchError(
            f"group {name!r}: torch says rank {options.group_rank} of {options.group_size}, MPI says "
            f"{communicator.rank} of {communicator.size}; launch with `python -m mpicoll.run` or mpirun, and let "
            "init_process_group take rank and size from MPI"
        )
    if names.BACKEND_SUBCLASSES:
        from mpicoll._c10d.backend import MpiBackend

        _alive[communicator] = MpiBackend(communicator, on_close, _split)
    else:
        from mpicoll._c10d import torch213

        _alive[communicator] = torch213.adapt(communicator, on_close, options)
    names.serve(communicator.devices is not None)
    ddp.install()
    refused_by_torch.install()
    _keep_dynamo_out()
    return _alive[communicator]


def _mixing(translated: str) -> AbstractContextManager[str]:
    """Gives the backend string for torch, which can make a group with several backends by itself from 2.14 on."""
    if names.BACKEND_SUBCLASSES:
        return contextlib.nullcontext(translated)
    from mpicoll._c10d import torch213

    return torch213.mixing(translated)


def on_close(communicator: Communicator) -> None:
    """Called by an adapter when torch gives its group up. With the default group, the excepthooks and the store go too."""
    _alive.pop(communicator, None)
    hooks.forget(communicator)
    default = torch_world.default_group()
    if default is not None and torch_world.name_of(default) == communicator.name:
        abort.uninstall()
        store.close()


@functools.cache
def _keep_dynamo_out() -> None:
    """Once, when our modules have been loaded: torch.compile runs them as they are."""
    names = ("_c10d", "_engine", "_faults", "_host", "_device", "_algorithms", "_tensors")
    dynamo.disable_package(*(f"mpicoll.{name}" for name in names))

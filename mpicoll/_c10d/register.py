"""Registration with torch, run by ``import torch`` through the entry point group ``torch.backends``.

It costs next to nothing, prints nothing and never raises: ``import torch`` works whatever is wrong with MPI or with mpicoll. An
error is kept and raised when a program requests the backend (see `ensure`).

    import torch ──► autoload ──► launch variables (RANK, WORLD_SIZE ...) that are unset, in a rank of an MPI launcher
                              ├─► backend names "mpicoll" and "mpi", rendezvous scheme "mpi://"
                              └─► wrappers of init_process_group and _new_group_with_tag, which call `mpicoll._c10d.init`
                                  if the backend string names mpi
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import sys
from collections.abc import Iterator
from typing import Any

from mpicoll._c10d import names, patches, wrapping

INIT = f"{patches.C10D}.init_process_group"

_failure: Exception | None = None  # raised in autoload; for `ensure`
worlds = 0  # calls of init_process_group, with any backend


def autoload() -> None:
    """Registers mpicoll with torch.distributed; the ``torch.backends`` entry point. May be called twice; silent, never raises."""
    global _failure
    try:
        c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
        if c10d is None:  # a torch without distributed; `ensure` raises
            return
        _wrap()  # first: the wrappers report any failure below
        _register(c10d)
        from mpicoll._base import launcher, open_mpi_settings

        if launcher.detect() is not None:
            from mpicoll._base import torch_variables

            torch_variables.provide()
        if "mpi4py.MPI" not in sys.modules:  # importing it starts MPI
            open_mpi_settings.provide()
        _failure = None
    except Exception as error:  # noqa: BLE001  import torch must not break; raised by `ensure`
        _failure = error


def ensure() -> None:
    """Registers if `import torch` has not done so (``TORCH_DEVICE_BACKEND_AUTOLOAD=0``).

    Raises:
        RuntimeError: The registration has failed; its error is the cause. Or this torch has no torch.distributed.
    """
    import torch.distributed

    if not torch.distributed.is_available():
        raise RuntimeError("mpicoll: this torch was built without torch.distributed")
    if not patches.applied(INIT) or _failure is not None:
        autoload()
    if _failure is not None:
        raise RuntimeError(
            f"mpicoll could not register its backend with torch {torch.__version__}: {type(_failure).__name__}: {_failure}"
        ) from _failure


def _register(c10d: Any) -> None:
    from mpicoll._base.config import get
    from mpicoll._base.launcher import started_by_mpi

    registry = c10d.Backend
    if names.OURS in registry.backend_list:
        return
    registry.register_backend(names.OURS, _create, extended_api=True, devices=names.devices())
    if c10d._MPI_AVAILABLE and not get("MPICOLL_OVERRIDE_MPI"):  # a torch that was built with MPI
        names.leave_mpi_to_torch()
    else:
        if started_by_mpi():  # see Note [When MPI is available]
            patches.assign(f"{patches.C10D}._MPI_AVAILABLE", True)
        registry.register_backend("mpi", _create, extended_api=True, devices=names.devices())
    if get("MPICOLL_REPLACE_GLOO"):
        names.replace_gloo()
    names.hide_plugins()
    names.serve_by_default(get("MPICOLL_BACKEND"))
    handlers = sys.modules["torch.distributed.rendezvous"]
    handlers.register_rendezvous_handler("mpi", _rendezvous)


# Note [When MPI is available]
# torch.distributed.is_mpi_available() and is_backend_available("mpi") read _MPI_AVAILABLE, and programs decide by them: Hugging
# Face Accelerate uses "mpi" for every CPU job if it is True. Without an MPI launcher (torchrun, debug_launcher) such a job ran on
# gloo before mpicoll was installed, and MPI would give each process a world of one rank. So it is True only in a rank that an
# MPI launcher started. init_process_group("mpi") does not need it: the wrapper translates the name before torch checks it.


def _create(options: Any, backend_options: Any) -> Any:
    """Makes the adapter of a group. torch calls it on members only, with DistributedBackendOptions."""
    from mpicoll._c10d import init

    return init.create(options, backend_options)


def _rendezvous(url: str, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
    """Serves ``init_method="mpi://"`` for any backend. A generator, of which torch takes the first value."""
    from mpicoll._c10d import rendezvous

    yield rendezvous.meet(**kwargs)
    raise RuntimeError("Unable to perform re-rendezvous using mpi:// method")


@atexit.register
def _stop_store() -> None:
    """Ends the thread of the store. Registered by ``import torch``, it runs after functions of a program that may still ask."""
    if (store := sys.modules.get("mpicoll._c10d.store")) is not None:
        store.stop()
    if (launcher := sys.modules.get("mpicoll._base.launcher")) is not None and launcher.store_world is not None:
        launcher.store_world.end()


def _wrap() -> None:
    patches.wrap(INIT, lambda original: wrapping.wrap(original, wrapping.WORLD_NAMES, _for_world))
    patches.wrap(
        f"{patches.C10D}._new_group_with_tag", lambda original: wrapping.wrap(original, wrapping.GROUP_NAMES, _for_group)
    )
    patches.wrap(
        f"{patches.C10D}._new_process_group_helper",
        lambda original: wrapping.wrap(original, wrapping.MEMBERS_NAMES, _for_members),
    )
    patches.wrap(f"{patches.C10D}.shrink_group", lambda original: wrapping.wrap(original, wrapping.SHRINK_NAMES, _for_shrink))


def _for_world(arguments: dict[str, Any]) -> wrapping.Handler | None:
    """The handler for a call of init_process_group; None if it names another backend."""
    global worlds
    from mpicoll._base.config import get

    worlds += 1
    if arguments.get("backend") is None and (backend := get("MPICOLL_BACKEND")):
        arguments["backend"] = backend
    ours = names.translate(arguments.get("backend")) is not None or str(arguments.get("init_method")).startswith("mpi://")
    if ours:
        ensure()
        from mpicoll._c10d import torch_world
        from mpicoll._c10d.requested_ranks import OF_SOME_RANKS, unified
        from mpicoll._mpi import runtime

        if torch_world.default_group() is None:
            arguments.update(_met(unified(wrapping.complete(arguments))))
        runtime.refuse_other_size("init_process_group", unified(arguments).get("world_size"), OF_SOME_RANKS)
    return _handler("init_process_group", arguments) if ours else None


def _met(arguments: dict[str, Any]) -> dict[str, Any]:
    """Meets the other ranks if no launcher has started them. Returns what changes in the arguments of init_process_group."""
    from mpicoll._c10d.requested_ranks import without_launcher

    if (own := without_launcher(arguments)) is None:
        return {}
    from mpicoll._c10d import store_world

    return store_world.meet(*own, arguments)


def _for_group(arguments: dict[str, Any]) -> wrapping.Handler | None:
    """The handler for a call of _new_group_with_tag; None if it names another backend."""
    from mpicoll._c10d import torch_world

    default = torch_world.default_group()  # None before init_process_group, where torch raises
    backend = arguments.get("backend") or (default and torch_world.backend_of(default))
    if names.translate(backend) is None:
        return None
    if default is not None and not arguments.get("use_local_synchronization"):  # all ranks call it: those of Gloo, say, meet
        place = {"rank": default.rank(), "world_size": default.size(), "store": torch_world.c10d._get_default_store()}
        _met({**wrapping.complete(arguments), **place})
    return _handler("new_group", arguments)


def _for_members(arguments: dict[str, Any]) -> wrapping.Handler | None:
    """The handler for a program's call of _new_process_group_helper; None if it names another backend, or comes from init.py."""
    backend = arguments.get("backend")
    return _handler("group_of_members", arguments) if names.translate(backend) not in (None, backend) else None


def _for_shrink(arguments: dict[str, Any]) -> wrapping.Handler | None:
    """The handler for a call of shrink_group; None if it names a group of another backend."""
    from mpicoll._c10d import torch_world

    group = arguments.get("group") or torch_world.default_group()
    ours = torch_world.has(group) and names.translate(torch_world.backend_of(group)) is not None
    return _handler("shrink_group", arguments) if ours else None


def _handler(name: str, arguments: dict[str, Any]) -> wrapping.Handler:
    """Loads `mpicoll._c10d.init`, which starts MPI (with all ranks), or `shrinking`, and returns its function of this name."""
    ensure()
    from mpicoll._faults.watch import end_job_after

    home = "shrinking" if name == "shrink_group" else "init"
    with end_job_after(name, wrapping.limit(wrapping.complete(arguments))), _collections_put_off():
        return getattr(importlib.import_module(f"mpicoll._c10d.{home}"), name)  # type: ignore[no-any-return]


@contextlib.contextmanager
def _collections_put_off() -> Iterator[None]:
    """Turns Python's garbage collector off. Loading our modules would start a full collection: with torch's objects 0.1 s."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()

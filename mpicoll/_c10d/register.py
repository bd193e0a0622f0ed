"""Registration with torch, run by ``import torch`` through the entry point group ``torch.backends``.

It must cost next to nothing, print nothing and never raise: whatever is wrong with MPI or with mpicoll, ``import torch``
works. A failure is kept and raised when somebody asks for the backend (see `ensure`).

    import torch ──► autoload ──► launch variables (RANK, WORLD_SIZE ...) where an MPI launcher started us and they are unset
                              ├─► backend names "mpicoll" and "mpi", rendezvous scheme "mpi://"
                              └─► wrappers round init_process_group and _new_group_with_tag, which look at the backend string
                                  and, where it says mpi, hand over to `mpicoll._c10d.init`
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from mpicoll._c10d import wrapping

__all__ = ["OURS", "autoload", "ensure", "translate"]

OURS = "mpicoll"  # the name under which torch knows the plugin on every version; "mpi" is its public alias

_failure: Exception | None = None  # what went wrong in autoload, for `ensure`
_hidden: dict[str, Any] = {}  # plugins that torch sees only inside `visible`; see Note [Hidden plugins]
_aliases: set[str] = {OURS, "mpi"}  # backend names that are ours; "mpi" leaves if torch was built with an MPI of its own


def autoload() -> None:
    """Makes torch.distributed know mpicoll; the ``torch.backends`` entry point. Idempotent, silent, never raises."""
    global _failure
    try:
        c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
        if c10d is None:  # a torch without distributed; `ensure` says so when it matters
            return
        _wrap(c10d)  # first: it is what later tells the user about any failure below
        _register(c10d)
        from mpicoll._discovery.detect import provide_open_mpi_settings, provide_torch_variables

        provide_torch_variables()
        if "mpi4py.MPI" not in sys.modules:  # importing it starts MPI
            provide_open_mpi_settings()
        _failure = None
    except Exception as error:  # noqa: BLE001  import torch must not break; raised by `ensure`
        _failure = error


def ensure() -> None:
    """Registers if that has not happened (``TORCH_DEVICE_BACKEND_AUTOLOAD=0``).

    Raises: RuntimeError: the registration at ``import torch`` failed, with its cause; or this torch has no torch.distributed.
    """
    import torch.distributed

    if not torch.distributed.is_available():
        raise RuntimeError("mpicoll: this torch was built without torch.distributed")
    from torch.distributed import distributed_c10d

    if not hasattr(distributed_c10d.init_process_group, wrapping.MARK) or _failure is not None:
        autoload()
    if _failure is not None:
        raise RuntimeError(
            f"mpicoll could not register its backend with torch {torch.__version__}: {type(_failure).__name__}: {_failure}"
        ) from _failure


def translate(backend: object) -> str | None:
    """The backend string under which torch finds our plugin, or None if `backend` does not name us.

    "mpi", "MPI", "mpicoll" -> "mpicoll"; "cpu:mpi,cuda:nccl" -> "cpu:mpicoll,cuda:nccl"; "gloo", None -> None.
    """
    if not isinstance(backend, str):
        return None
    pairs = [part.strip().rpartition(":") for part in backend.lower().split(",")]
    if not any(name.strip() in _aliases for _, _, name in pairs):
        return None
    return ",".join(device + colon + (OURS if name.strip() in _aliases else name) for device, colon, name in pairs)


def _register(c10d: Any) -> None:
    from mpicoll._discovery.detect import started_by_mpi

    registry = c10d.Backend
    if OURS in registry.backend_list:
        return
    registry.register_backend(OURS, _create, extended_api=True, devices=devices())
    if c10d._MPI_AVAILABLE and not _override():
        _aliases.discard("mpi")
    else:
        c10d._MPI_AVAILABLE = c10d._MPI_AVAILABLE or started_by_mpi()  # see Note [When MPI is available]
        registry.register_backend("mpi", _create, extended_api=True, devices=devices())
    if "GLOO" not in registry._plugins:
        _hidden.update({name: registry._plugins.pop(name) for name in (OURS.upper(), "MPI") if name in registry._plugins})
    handlers = sys.modules["torch.distributed.rendezvous"]
    handlers.register_rendezvous_handler("mpi", _rendezvous)


# Note [When MPI is available]
# torch.distributed.is_mpi_available() and is_backend_available("mpi") read _MPI_AVAILABLE, and programs decide by them: Hugging
# Face Accelerate takes "mpi" for every CPU job where it is True. Without an MPI launcher such a job (torchrun, debug_launcher)
# ran on gloo before mpicoll was installed, and MPI would give it worlds of one rank. So it is True only in a rank that an MPI
# launcher started. init_process_group("mpi") needs no flag: the wrapper translates the name before torch looks at it.


# Note [Hidden plugins]
# torch <= 2.13 keeps only foreign backends in Backend._plugins, and once there is one,
# init_process_group("cpu:gloo,cuda:gloo") no longer sets a default backend, so that destroy_process_group warns "No
# backend of type 0 found". Installing mpicoll must not change what Gloo users see: there, the plugin is in the table
# only while a group of ours is being made.
@contextlib.contextmanager
def visible() -> Iterator[None]:
    """While it lasts, torch can make groups of our backend."""
    from torch.distributed import distributed_c10d

    plugins: dict[str, Any] = distributed_c10d.Backend._plugins
    plugins.update(_hidden)
    try:
        yield
    finally:
        for name in _hidden:
            plugins.pop(name, None)


def devices() -> list[str]:
    """The kinds of device whose tensors this torch can have, and the backend takes."""
    import torch

    return ["cpu", "cuda"] if torch.backends.cuda.is_built() else ["cpu"]


def serve(gpus: bool) -> None:
    """Tells torch for which devices to ask the backend "mpi", now that the ranks have said whether any of them sees a GPU.

    torch takes a device other than the CPU from this list and asks for its current index, which fails where a torch that was
    built with CUDA finds no GPU (ShardedTensor.gather).
    """
    if "mpi" in _aliases:
        c10d: Any = sys.modules["torch.distributed.distributed_c10d"]
        c10d.Backend.backend_capability["mpi"] = devices() if gpus else ["cpu"]


def _override() -> bool:
    """Whether to take the name "mpi" from a torch that was really built with MPI (``MPICOLL_OVERRIDE_MPI=1``)."""
    from mpicoll._config import get

    return bool(get("MPICOLL_OVERRIDE_MPI"))


def _create(options: Any, backend_options: Any) -> Any:
    """Makes one group for torch: called on its members only, with a DistributedBackendOptions."""
    from mpicoll._c10d import init

    return init.create(options)


def _rendezvous(url: str, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
    """Serves ``init_method="mpi://"`` for any backend (a generator: torch takes its first value)."""
    from mpicoll._c10d import rendezvous

    yield rendezvous.meet(**kwargs)
    raise RuntimeError("Unable to perform re-rendezvous using mpi:// method")


def _wrap(c10d: Any) -> None:
    """Replaces init_process_group and _new_group_with_tag by versions that look at the backend string; once."""
    if hasattr(c10d.init_process_group, wrapping.MARK):
        return

    def for_world(arguments: dict[str, Any]) -> wrapping.Handler | None:
        from mpicoll._config import get

        if arguments.get("backend") is None and (backend := get("MPICOLL_BACKEND")):
            arguments["backend"] = backend
        ours = translate(arguments.get("backend")) is not None or _is_our_scheme(arguments.get("init_method"))
        return _handler("init_process_group") if ours else None

    def for_group(arguments: dict[str, Any]) -> wrapping.Handler | None:
        ours = translate(arguments.get("backend") or _default_backend(c10d)) is not None
        return _handler("new_group") if ours else None

    original = c10d.init_process_group
    c10d.init_process_group = wrapping.wrap(original, wrapping.WORLD_NAMES, for_world)
    for name in ("torch.distributed", "torch.distributed.device_mesh"):  # which have imported it by name
        module: Any = sys.modules.get(name)
        if getattr(module, "init_process_group", None) is original:
            module.init_process_group = c10d.init_process_group
    if not hasattr(c10d._new_group_with_tag, wrapping.MARK):
        c10d._new_group_with_tag = wrapping.wrap(c10d._new_group_with_tag, wrapping.GROUP_NAMES, for_group)


def _handler(name: str) -> wrapping.Handler:
    """The function of `mpicoll._c10d.init`, which is loaded when it is called for."""
    ensure()
    from mpicoll._c10d import init

    handler: wrapping.Handler = getattr(init, name)
    return handler


def _is_our_scheme(init_method: object) -> bool:
    return isinstance(init_method, str) and init_method.startswith("mpi://")


def _default_backend(c10d: Any) -> str | None:
    """The backend that new_group takes where none is given; None before init_process_group (torch then complains)."""
    default = c10d._world.default_pg
    return None if default is None else str(c10d._world.pg_map[default][0])

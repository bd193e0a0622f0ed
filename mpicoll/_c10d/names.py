"""The names under which torch knows the backend, and the kinds of device that it serves.

torch treats "mpicoll" like any plugin. "mpi" is the public alias, except where torch was built with MPI and keeps that name.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch

OURS = "mpicoll"

# torch <= 2.13 takes only a ProcessGroup subclass from a Python backend. torch >= 2.14 takes a Backend subclass, and a group
# can then have several of them, one per kind of device.
BACKEND_SUBCLASSES = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 14)

# Methods of torch's ProcessGroup that return a Work, in all versions from 2.11 to 2.15.
WORK_METHODS = (
    "allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single",
    "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "broadcast", "allgather",
    "allgather_coalesced", "_allgather_base", "all_gather_single", "all_gather_single_coalesced",
    "allgather_into_tensor_coalesced", "gather", "scatter", "alltoall", "alltoall_base", "all_to_all_single", "send",
    "recv", "recv_anysource", "barrier", "_end_coalescing",
)  # fmt: skip

# Functions that had another name before torch 2.13. torch calls the backend by the newer name, or by a third one.
OLDER_NAMES = {"all_gather_into_tensor": "all_gather_single", "reduce_scatter_tensor": "reduce_scatter_single"}

_aliases: set[str] = {OURS, "mpi"}
_hidden: dict[str, Any] = {}  # plugins that torch sees only inside `visible`; see Note [Hidden plugins]


def translate(backend: object) -> str | None:
    """The backend string under which torch finds the plugin; None if ``backend`` names another backend.

    "mpi", "MPI", "mpicoll" -> "mpicoll"; "cpu:mpi,cuda:nccl" -> "cpu:mpicoll,cuda:nccl"; "gloo", None -> None.
    """
    if not isinstance(backend, str):
        return None
    pairs = [part.strip().rpartition(":") for part in backend.lower().split(",")]
    if not any(name.strip() in _aliases for _, _, name in pairs):
        return None
    return ",".join(device + colon + (OURS if name.strip() in _aliases else name) for device, colon, name in pairs)


def only_ours(translated: str) -> bool:
    """Whether a string from `translate` names no other backend."""
    return all(pair.rpartition(":")[2].strip() == OURS for pair in translated.split(","))


def leave_mpi_to_torch() -> None:
    """From now on "mpi" names torch's own backend."""
    _aliases.discard("mpi")


def replace_gloo() -> None:
    """From now on "gloo" names mpicoll, too."""
    _aliases.add("gloo")


# Note [Hidden plugins]
# torch <= 2.13 keeps only foreign backends in Backend._plugins. If that table is not empty,
# init_process_group("cpu:gloo,cuda:gloo") sets no default backend, and destroy_process_group warns "No backend of type 0
# found". Installing mpicoll must not change what Gloo users see. So on these versions the plugin is in the table only while
# torch makes one of our groups.
def hide_plugins() -> None:
    """Takes our plugins out of torch's table, where the table changes what other backends do."""
    plugins = _backends()._plugins
    if "GLOO" not in plugins:
        _hidden.update({name: plugins.pop(name) for name in (OURS.upper(), "MPI") if name in plugins})


@contextlib.contextmanager
def visible() -> Iterator[None]:
    """Inside, torch can make groups of our backend."""
    plugins = _backends()._plugins
    plugins.update(_hidden)
    _backends().backend_capability[OURS] = devices()
    try:
        yield
    finally:
        for name in _hidden:
            plugins.pop(name, None)


def devices() -> list[str]:
    """The kinds of device whose tensors this torch can have and the backend takes."""
    other = torch.accelerator.current_accelerator()  # xpu, mps, or one that a package has added
    return list(dict.fromkeys(["cpu", *["cuda"] * torch.backends.cuda.is_built(), *([other.type] if other else [])]))


def serve(gpus: bool) -> None:
    """Tells torch for which kinds of device to ask the backend "mpi". ``gpus``: whether any rank sees a GPU of CUDA.

    torch picks a device other than the CPU from this list and asks for its current index. A CUDA build of torch raises there
    if it finds no GPU (ShardedTensor.gather).
    """
    if "mpi" in _aliases:
        _backends().backend_capability["mpi"] = [kind for kind in devices() if gpus or kind != "cuda"]


def serve_by_default(backend: str | None) -> None:
    """Makes ``backend`` ("mpi", "cpu:mpi,cuda:nccl") torch's default for its kinds of device; None: changes nothing.

    Programs and libraries that ask ``get_default_backend_for_device``, or read its table as Lightning does, then name it.
    """
    if backend is None or "mpi" not in _aliases:
        return
    pairs = [part.rpartition(":") for part in backend.split(",")]
    for kinds, _, name in pairs:
        _backends().default_device_backend_map.update(dict.fromkeys([kinds] if kinds else devices(), name))


def _backends() -> Any:
    """torch's class with the tables of backends."""
    return sys.modules["torch.distributed.distributed_c10d"].Backend


def name_as_called(error: BaseException, name: str) -> None:
    """Puts the name by which the program has called a function into the words of mpicoll's error, if it is an older one."""
    if name in OLDER_NAMES:
        newer = OLDER_NAMES[name]
        error.args = tuple(word.replace(newer, name) if isinstance(word, str) else word for word in error.args)

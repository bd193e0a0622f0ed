"""MPI for stock PyTorch: ``import mpicoll as dist`` instead of ``import torch.distributed as dist``, launched by mpirun.

Names are loaded on first use. Importing mpicoll starts no MPI and imports no torch (``python -m mpicoll.run`` runs this file
too). ``OURS`` lists the names that mpicoll defines. Every other public name is torch.distributed's own object, so the mirror is
complete with every version of torch. Submodules are mirrored too: ``from mpicoll.fsdp import fully_shard``.

PYTEST_DONT_REWRITE: this wheel has a plugin of pytest, which would warn that `mpicoll.run` has imported mpicoll before it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

# By the module that defines them.
_NAMES = {
    "mpicoll._api.groups": "init_process_group new_group split_group get_reconfigure_handle reconfigure shrink shrink_group",
    "mpicoll._api.p2p": "send recv isend irecv batch_isend_irecv P2POp recv_object_list",
    "mpicoll._api.gathers": "all_gather all_gather_coalesced all_gather_into_tensor all_gather_single broadcast gather scatter",
    "mpicoll._api.reductions": (
        "all_reduce all_reduce_coalesced reduce reduce_scatter reduce_scatter_single reduce_scatter_tensor scan exscan"
    ),
    "mpicoll._api.exchanges": "all_to_all all_to_all_single",
    "mpicoll._api.barriers": "barrier monitored_barrier",
    "mpicoll._c10d.windows": "Window empty_shared",
    "mpicoll._api.information": "get_comm info dump_flight_record",
    "mpicoll._launch.spawn": "spawn RankExited RankRaised",
    "mpicoll.errors": (
        "CollectiveMismatch CommunicationError ConcurrentCollectives DifferentTensors ForkedProcess GroupDestroyed GroupFailed "
        "LaunchError MpicollError OperationTimeout PeerLost ThreadLevelError TruncationError UnsupportedReduction WorkerLeft"
    ),
}
OURS = {name: module for module, names in _NAMES.items() for name in names.split()}

# torch.distributed has these names because its file imports them; ``from mpicoll import *`` leaves them out.
IMPORTED = ("logging", "sys", "timedelta", "torch", "traceback", "typing")


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return [public for public in __dir__() if public not in IMPORTED]
    if name in OURS:
        value = getattr(importlib.import_module(OURS[name]), name)
    elif name.startswith("__"):
        raise AttributeError(f"module 'mpicoll' has no attribute {name!r}")
    elif importlib.machinery.PathFinder.find_spec(f"mpicoll.{name}", __path__) is not None:
        value = importlib.import_module(f"mpicoll.{name}")
    else:
        value = _from_torch(name)
    globals()[name] = value
    return value


def _from_torch(name: str) -> Any:
    try:
        import torch.distributed
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        # pickle asks every module for an object that it does not know, in tests of a program without torch, too.
        raise AttributeError(f"mpicoll defines no {name!r}, and torch, which may have it, is not installed") from None

    with contextlib.suppress(AttributeError):
        return getattr(torch.distributed, name)
    try:
        return importlib.import_module(f"mpicoll.{name}")  # a submodule of torch.distributed that is not imported yet
    except ModuleNotFoundError as error:
        if error.name != f"mpicoll.{name}":
            raise
    raise AttributeError(f"neither mpicoll nor torch.distributed has {name!r}")


def __dir__() -> list[str]:
    import torch.distributed

    theirs = [name for name in dir(torch.distributed) if not name.startswith("_")]
    return sorted({*OURS, *theirs})


# torch's modules of these names need torch's RPC (TensorPipe).
REFUSED, REFUSED_BELOW = ("mpicoll.optim.optimizer",), ("mpicoll.rpc.", "mpicoll.autograd.")
WHY_REFUSED = "torch has it for its own RPC, and mpicoll.rpc works without; the guide to RPC lists what differs"


class _Mirror(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds ``mpicoll.fsdp`` in ``torch.distributed.fsdp``: the same module under a second name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("mpicoll."):
            return None
        parent = fullname.rpartition(".")[0]
        ours = parent not in sys.modules or sys.modules[parent].__name__ == parent
        # torch.distributed has nothing below mpicoll's private packages.
        # One search per file is saved; a start imports a hundred files.
        if ours and parent.startswith("mpicoll._"):
            return None
        if ours and importlib.machinery.PathFinder.find_spec(fullname, path) is not None:
            return None
        if fullname in REFUSED or fullname.startswith(REFUSED_BELOW):
            raise ModuleNotFoundError(f"No module named {fullname!r}: {WHY_REFUSED}", name=fullname)
        theirs = "torch.distributed" + fullname.removeprefix("mpicoll")
        try:
            if importlib.util.find_spec(theirs) is None:
                return None
        except ModuleNotFoundError:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, origin=theirs)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        assert spec.origin is not None
        module = importlib.import_module(spec.origin)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None and spec.loader is self:
            module.__spec__ = spec.loader_state  # it stays torch's module


# The first finder: mpicoll.fsdp is torch's module and has a __path__. The usual finder would load a second copy of
# mpicoll.fsdp.wrap from there, with classes that differ from those of torch.distributed.fsdp.wrap.
sys.meta_path.insert(0, _Mirror())

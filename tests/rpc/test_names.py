"""What torch.distributed.rpc, .autograd and .optim name is here, with torch's signatures, or left out, and it is said why."""

import inspect
from typing import Any

import pytest
import torch.distributed.autograd
import torch.distributed.rpc

import mpicoll.autograd
import mpicoll.optim
from mpicoll import rpc

THEIRS: Any = torch.distributed.rpc
FUNCTIONS = ("init_rpc", "shutdown", "get_worker_info", "rpc_sync", "rpc_async", "remote")
CLASSES = {
    "RRef": {"_serialize", "_deserialize", "_get_profiling_future", "_set_profiling_future"},
    "WorkerInfo": set(),
    "TensorPipeRpcBackendOptions": {"_set_device_map"},
}  # and which methods of torch's are its machinery's


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
def test_every_public_name() -> None:
    import torch.distributed.optim

    missing = [name for name in THEIRS.__all__ if not hasattr(rpc, name) and name not in rpc.LEFT_OUT]
    assert not missing
    assert not [name for name in rpc.LEFT_OUT if hasattr(rpc, name)]
    constants = [name for name in dir(THEIRS.constants) if name.startswith(("DEFAULT", "UNSET"))]
    assert {n for n in constants if not hasattr(rpc.constants, n)} <= {"DEFAULT_PROCESS_GROUP_TIMEOUT"}
    for name in vars(rpc.constants):
        if name.isupper():
            assert getattr(rpc.constants, name) == getattr(THEIRS.constants, name), name
    for ours, theirs in ((mpicoll.autograd, torch.distributed.autograd), (mpicoll.optim, torch.distributed.optim)):
        public = getattr(theirs, "__all__", None) or ["context", "backward", "get_gradients", "is_available"]
        assert not [name for name in public if not hasattr(ours, name)], theirs.__name__
    assert mpicoll.optim.ZeroRedundancyOptimizer is torch.distributed.optim.ZeroRedundancyOptimizer


def test_what_is_left_out_says_why() -> None:
    with pytest.raises(AttributeError, match="calls go through MPI"):
        rpc.TensorPipeAgent  # noqa: B018
    with pytest.raises(AttributeError, match=r"has no attribute 'nonsense'$"):
        rpc.nonsense  # noqa: B018


@pytest.mark.parametrize("name", FUNCTIONS)
def test_signatures(name: str) -> None:
    found, expected = (inspect.signature(getattr(module, name)) for module in (rpc, THEIRS))
    assert [(p.name, p.default, p.kind) for p in found.parameters.values()] == [
        (p.name, p.default, p.kind) for p in expected.parameters.values()
    ]


@pytest.mark.parametrize("name", CLASSES)
def test_methods(name: str) -> None:
    theirs = getattr(THEIRS, name)
    ours = getattr(rpc, name)
    made = ours("a", 0) if name == "WorkerInfo" else ours() if name == "TensorPipeRpcBackendOptions" else ours
    missing = {method for method in dir(theirs) if not method.startswith(("__", "_pybind11")) and not hasattr(made, method)}
    assert missing == CLASSES[name] & set(dir(theirs))

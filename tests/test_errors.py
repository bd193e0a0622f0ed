"""The error classes: what they are for programs that catch Python's errors and torch's."""

import copy
import pickle
import sys

import pytest
from torch.distributed import DistBackendError, DistError

import mpicoll
from mpicoll import errors
from tests.support import run

BASES = {
    "MpicollError": (RuntimeError,),
    "LaunchError": (errors.MpicollError,),
    "ThreadLevelError": (errors.MpicollError,),
    "CommunicationError": (errors.MpicollError, DistBackendError, DistError),
    "TruncationError": (errors.CommunicationError, errors.CollectiveMismatch, DistBackendError),
    "OperationTimeout": (errors.MpicollError, DistBackendError, DistError, TimeoutError),
    "GroupFailed": (errors.MpicollError, DistBackendError, DistError),
    "GroupDestroyed": (errors.MpicollError, DistError),
    "WorkerLeft": (errors.MpicollError,),
    "ConcurrentCollectives": (errors.MpicollError,),
    "ForkedProcess": (errors.MpicollError,),
    "UnsupportedReduction": (TypeError, ValueError),
}


@pytest.mark.parametrize("name", BASES)
def test_bases(name: str) -> None:
    error = getattr(errors, name)("all_reduce on group '0': what went wrong")
    for base in BASES[name]:
        assert isinstance(error, base)
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is type(error)
        assert again.args == error.args
        assert str(again) == "all_reduce on group '0': what went wrong"


def test_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match=r"module 'mpicoll\.errors' has no attribute 'Unknown'"):
        _ = errors.Unknown


@pytest.mark.launch
def test_importing_them_does_not_import_torch() -> None:
    """The launcher imports them, and starts in a tenth of torch's time."""
    code = "import sys, mpicoll.errors, mpicoll.run; assert 'torch' not in sys.modules; mpicoll.errors.OperationTimeout"
    done = run([sys.executable, "-c", f"{code}; assert 'torch' in sys.modules"])
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", errors.__all__)
def test_tracebacks_name_the_public_module(name: str) -> None:
    """Users look for an error where its traceback says it is."""
    error = getattr(errors, name)
    assert f"{error.__module__}.{error.__qualname__}" == f"mpicoll.errors.{name}"


@pytest.mark.parametrize("name", ["RankRaised", "RankExited"])
def test_the_errors_of_spawn_name_the_public_module(name: str) -> None:
    error = getattr(mpicoll, name)
    assert f"{error.__module__}.{error.__qualname__}" == f"mpicoll.{name}"
    assert pickle.loads(pickle.dumps(error)) is error

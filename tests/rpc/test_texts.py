"""What errors and references say: torch's words, since programs look for them."""

from __future__ import annotations

import pickle
import re
import time
from typing import Any

import pytest
import torch

from mpicoll import rpc
from mpicoll.rpc import api
from mpicoll.rpc.rref import RRef
from tests.support import agree, everyone

ID = r"GloballyUniqueId\(created_on=\d+, local_id=\d+\)"


@rpc.functions.async_execution
def no_future() -> int:
    return 3


class NoFuture:
    @rpc.functions.async_execution
    def method(self) -> torch.Tensor:
        return torch.ones(1)


@pytest.mark.parametrize("how", ["rpc_sync", "rpc_async", "remote", "proxy"])
def test_async_execution_without_a_future(how: str, right: str) -> None:
    words = r"Functions decorated with @rpc.async_function must return a torch.futures.Future object, but instead got "
    words += "torch.Tensor" if how == "proxy" else "builtins.int"
    calls = {
        "rpc_sync": lambda: rpc.rpc_sync(right, no_future),
        "rpc_async": lambda: rpc.rpc_async(right, no_future).wait(),
        "remote": lambda: rpc.remote(right, no_future).to_here(),
        "proxy": lambda: rpc.remote(right, NoFuture).rpc_sync().method(),
    }
    with pytest.raises(RuntimeError, match=words):
        calls[how]()
    agree(True)


class Picky(Exception):
    def __init__(self, code: bool, text: str) -> None:
        if not isinstance(code, bool):
            raise TypeError("a bool is needed")
        super().__init__(text)


class Exits(Exception):
    def __init__(self, *arguments: Any) -> None:
        if len(arguments) == 1:
            raise SystemExit("made again")
        super().__init__("for a reason")


def raise_picky() -> None:
    raise Picky(True, "for a reason")


def raise_exits() -> None:
    raise Exits(1, 2)


@pytest.mark.parametrize("function", [raise_picky, raise_exits])
def test_a_constructor_that_fails_at_the_caller(function: Any, right: str) -> None:
    """The original's text and traceback are there, and the constructor's error."""
    for call in (lambda: rpc.rpc_sync(right, function), lambda: rpc.remote(right, function).to_here()):
        with pytest.raises(RuntimeError) as raised:
            call()
        text = str(raised.value)
        assert "Failed to create original exception type. Error msg was" in text
        assert f"Original exception on remote side was On WorkerInfo(id={rpc.get_worker_info(right).id}" in text
        assert f"in {function.__name__}" in text
        assert "for a reason" in text
    agree(True)


def raise_lines() -> None:
    raise ValueError("\nfirst\nsecond")


def test_errors_are_printed_where_they_happen(right: str, capfd: pytest.CaptureFixture[str]) -> None:
    """With their lines as lines: on the worker's standard error, and in what the caller gets."""
    everyone(None)
    with pytest.raises(ValueError, match=r"On WorkerInfo(.|\n)*ValueError\('\nfirst\nsecond'\)\nTraceback(.|\n)*in raise_lines"):
        rpc.rpc_sync(right, raise_lines)
    everyone(None)
    printed = capfd.readouterr().err
    agree("first\nsecond" in printed and "in raise_lines" in printed, printed)


def test_references(right: str, rank: int, size: int) -> None:
    mine, there = RRef(1), rpc.remote(right, list)
    assert re.fullmatch(rf"OwnerRRef\({ID}\)", str(mine))
    with pytest.raises(RuntimeError, match="Can not pickle rref in python pickler, rref can only be pickled when using RPC"):
        pickle.dumps(mine)
    with pytest.raises(RuntimeError, match=r"RRef should contain a tensor for .backward\(\)"):
        mine.backward()
    if size > 1:
        assert re.fullmatch(rf"UserRRef\(RRefId = {ID}, ForkId = {ID}\)", str(there))
        words = rf"For UserRRef\(rref_id={ID}, fork_id={ID}\), can't call localValue\(\) on user WorkerInfo\(id={rank}, "
        with pytest.raises(RuntimeError, match=words + r".*Call it on owner WorkerInfo\(id="):
            there.local_value()
    agree(True)


def test_ids_begin_anew(right: str, rank: int) -> None:
    agree(str(RRef(1)) == f"OwnerRRef(GloballyUniqueId(created_on={rank}, local_id=0))", str(RRef(1)))


def test_after_shutdown(rank: int, size: int) -> None:
    rpc.init_rpc(f"worker{rank}")
    rref = rpc.remote((rank + 1) % size, list)
    rref.to_here()
    rpc.shutdown()
    with pytest.raises(RuntimeError, match=r"has been deleted. Cannot call to_here\(\) on it after deletion."):
        rref.to_here()
    with pytest.raises(RuntimeError, match=r"Cannot call fork an UserRRef after deletion."):
        pickle.dumps(rref)
    agree(True)


def test_without_rpc() -> None:
    words = r"Current RPC agent is not set! Did you initialize the RPC framework \(e.g. by calling `rpc.init_rpc`\)\?"
    for call in (lambda: RRef(1), api._get_current_rpc_agent):
        with pytest.raises(RuntimeError, match=words):
            call()
    assert not rpc._is_current_rpc_agent_set()
    for name in ("abc*", " ", "", "x" * 128):
        with pytest.raises(RuntimeError, match="shorter than 128"):
            rpc.WorkerInfo(name, 0)
        with pytest.raises(RuntimeError, match="Worker name must match"):
            rpc.init_rpc(name)
    agree(True)


def test_a_worker_that_is_none(right: str) -> None:
    with pytest.raises(RuntimeError, match="could not find destination"):
        rpc.get_worker_info("nobody")
    agree(True)


class Slow:
    def __init__(self, seconds: float = 0.0) -> None:
        time.sleep(seconds)

    def nap(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds


def asked(method: Any, *arguments: Any) -> None:
    """Calls a proxy's method and waits for what it has returned."""
    answer = method(*arguments)
    if isinstance(answer, RRef):
        answer._get_future().wait()
    elif isinstance(answer, torch._C.Future):
        answer.wait()


@pytest.mark.parametrize("how", ["rpc_sync", "rpc_async", "remote"])
def test_timeouts_of_proxies(how: str, right: str) -> None:
    """A method that takes too long; an object that takes too long to be made."""
    rref = rpc.remote(right, Slow)
    rref.to_here()
    with pytest.raises(RuntimeError, match="RPC ran for more than set timeout"):
        asked(getattr(rref, how)(timeout=0.2).nap, 1.0)
    slow = rpc.remote(right, Slow, (1.0,))
    with pytest.raises(RuntimeError, match="RPC ran for more than set timeout"):
        asked(getattr(slow, how)(timeout=0.1).nap, 0)
    slow.to_here()
    agree(True)


def test_an_object_that_is_not_made_in_time(right: str, size: int) -> None:
    rref = rpc.remote(right, Slow, (1.0,), timeout=0.1)
    with pytest.raises(RuntimeError, match="RPC ran for more than set timeout"):
        rref._get_future().wait()
    if size > 1:
        with pytest.raises(RuntimeError, match=r"RRef creation via rpc.remote\(\) timed out"):
            rref.to_here()
    agree(True)


@pytest.mark.parametrize("how", ["rpc_sync", "rpc_async", "remote"])
def test_a_method_that_is_not_there(how: str, right: str) -> None:
    """Naming it is fine; calling it raises, for ``remote`` at once."""
    proxy = getattr(rpc.remote(right, Slow), how)()
    method = proxy.not_there
    with pytest.raises(AttributeError, match="has no attribute 'not_there'"):
        asked(method)
    agree(True)


def test_a_function_that_the_callee_does_not_have(right: str, rank: int, size: int) -> None:
    """It does not travel; the error says so."""
    if size > 1 and rank == 1:
        del globals()["only_on_some"]
    everyone(None)
    if size > 1 and rank == 0:
        with pytest.raises(RuntimeError, match=r"only_on_some.*RPC pickler does not serialize function code"):
            rpc.rpc_sync(1, only_on_some)
    agree(True)


def only_on_some() -> None: ...

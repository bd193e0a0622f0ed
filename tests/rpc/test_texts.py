"""What errors and references say: torch's words, since programs look for them."""

from __future__ import annotations

import functools
import pickle
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mpicoll import rpc
from mpicoll.errors import MpicollError
from mpicoll.rpc import api
from mpicoll.rpc.rref import RRef
from tests.rpc import asking
from tests.rpc.asking import HOWS
from tests.support import agree, everyone

ID = r"GloballyUniqueId\(created_on=\d+, local_id=\d+\)"
NO_FUTURE = r"Functions decorated with @rpc.async_function must return a torch.futures.Future object, but instead got "
TOO_LONG = "RPC ran for more than set timeout"
NO_AGENT = r"Current RPC agent is not set! Did you initialize the RPC framework \(e.g. by calling `rpc.init_rpc`\)\?"


@rpc.functions.async_execution
def no_future() -> int:
    return 3


class Thing:
    def __init__(self, seconds: float = 0.0) -> None:
        time.sleep(seconds)

    def nap(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    @rpc.functions.async_execution
    def no_future(self) -> torch.Tensor:
        return torch.ones(1)


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


def raise_lines() -> None:
    raise ValueError("\nfirst\nsecond")


asked = functools.partial(asking.asked, in_time=True)
Refusal = tuple[str, type[Exception], str, Callable[[], object]]


def refused(refusals: list[Refusal]) -> list[str]:
    """Which calls have not raised this error with these words."""
    wrong = []
    for name, kind, words, call in refusals:
        try:
            call()
            wrong.append(f"{name}: nothing was raised")
        except Exception as error:  # noqa: BLE001  whatever else it is goes into the report
            if not isinstance(error, kind) or not re.search(words, str(error)):
                wrong.append(f"{name}: {error!r}")
    return wrong


@pytest.mark.parametrize("how", HOWS)
def test_calls_and_methods_of_a_proxy(how: str, right: str) -> None:
    """What returns no future; a method that takes too long, or is not there; an object that takes too long to be made."""
    there, slow = rpc.remote(right, Thing), rpc.remote(right, Thing, (1.0,))
    there.to_here()

    def proxy(rref: RRef[Thing], **options: float) -> Any:
        return getattr(rref, how)(**options)

    method = proxy(there).not_there  # naming it is fine
    wrong = refused(
        [
            ("slow object", RuntimeError, TOO_LONG, lambda: asked(proxy(slow, timeout=0.1).nap, 0)),
            ("slow method", RuntimeError, TOO_LONG, lambda: asked(proxy(there, timeout=0.2).nap, 1.0)),
            ("function", RuntimeError, NO_FUTURE + "builtins.int", lambda: asked(getattr(rpc, how), right, no_future)),
            ("method", RuntimeError, NO_FUTURE + "torch.Tensor", lambda: asked(proxy(there).no_future)),
            ("no method", AttributeError, "has no attribute 'not_there'", lambda: asked(method)),
        ]
    )
    slow.to_here()
    agree(not wrong and rpc.rpc_sync(right, abs, (-1,)) == 1, wrong)


def test_references(right: str, rank: int, size: int) -> None:
    mine, there = RRef(1), rpc.remote(right, list)
    late = rpc.remote(right, Thing, (1.0,), timeout=0.1)
    pickling = "Can not pickle rref in python pickler, rref can only be pickled when using RPC"
    refusals: list[Refusal] = [
        ("pickle", RuntimeError, pickling, lambda: pickle.dumps(mine)),
        ("backward", RuntimeError, r"RRef should contain a tensor for .backward\(\)", lambda: mine.backward()),
        ("nobody", RuntimeError, "could not find destination", lambda: rpc.get_worker_info("nobody")),
        ("late", RuntimeError, TOO_LONG, lambda: late._get_future().wait()),
    ]
    if size > 1:
        words = rf"For UserRRef\(rref_id={ID}, fork_id={ID}\), can't call localValue\(\) on user WorkerInfo\(id={rank}, "
        words += r".*Call it on owner WorkerInfo\(id="
        refusals.append(("local_value", RuntimeError, words, lambda: there.local_value()))
        refusals.append(("created", RuntimeError, r"RRef creation via rpc.remote\(\) timed out", lambda: late.to_here()))
    wrong = refused(refusals)
    texts = str(mine), str(there)
    good = bool(re.fullmatch(rf"OwnerRRef\({ID}\)", texts[0]))
    good &= size == 1 or bool(re.fullmatch(rf"UserRRef\(RRefId = {ID}, ForkId = {ID}\)", texts[1]))
    agree(good and not wrong, (wrong, texts))


def test_ids_begin_anew(right: str, rank: int) -> None:
    agree(str(RRef(1)) == f"OwnerRRef(GloballyUniqueId(created_on={rank}, local_id=0))", str(RRef(1)))


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


def test_errors_are_printed_where_they_happen(right: str, capfd: pytest.CaptureFixture[str]) -> None:
    """With their lines as lines: on the worker's standard error, and in what the caller gets."""
    everyone(None)
    with pytest.raises(ValueError, match=r"On WorkerInfo(.|\n)*ValueError\('\nfirst\nsecond'\)\nTraceback(.|\n)*in raise_lines"):
        rpc.rpc_sync(right, raise_lines)
    everyone(None)
    printed = capfd.readouterr().err
    agree("first\nsecond" in printed and "in raise_lines" in printed, printed)


def test_after_shutdown(rank: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference that the program still holds is deleted, and is no leak."""
    monkeypatch.setattr(api, "_ignore_rref_leak", False)
    rpc.init_rpc(f"worker{rank}")
    rref = rpc.remote((rank + 1) % size, list)
    rref.to_here()
    rpc.shutdown()
    deleted = r"has been deleted. Cannot call to_here\(\) on it after deletion."
    wrong = refused(
        [
            ("to_here", RuntimeError, deleted, rref.to_here),
            ("to_here", MpicollError, "shut down", rref.to_here),
            ("pickle", RuntimeError, r"Cannot call fork an UserRRef after deletion.", lambda: pickle.dumps(rref)),
            ("proxy", MpicollError, "shut down", lambda: rref.rpc_sync().append(1)),
            ("remote proxy", MpicollError, "shut down", lambda: rref.remote().append(1)),
        ]
    )
    agree(not wrong, wrong)


def test_without_rpc() -> None:
    refusals: list[Refusal] = [
        ("RRef", RuntimeError, NO_AGENT, lambda: RRef(1)),
        ("agent", RuntimeError, NO_AGENT, api._get_current_rpc_agent),
    ]
    for call in (lambda: rpc.rpc_sync("worker0", list), rpc.shutdown, rpc.get_worker_info):
        refusals.append(("call", RuntimeError, r"has not been initialized|agent is not set", call))
    for name in ("abc*", "a b", " ", "", "x" * 128, "ü"):
        refusals.append((f"WorkerInfo {name}", RuntimeError, "shorter than 128", lambda name=name: rpc.WorkerInfo(name, 0)))
        refusals.append((f"init_rpc {name}", RuntimeError, "Worker name must match", lambda name=name: rpc.init_rpc(name)))
    wrong = refused(refusals)
    agree(not wrong and not rpc._is_current_rpc_agent_set(), wrong)


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

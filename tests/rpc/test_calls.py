"""rpc_sync, rpc_async, remote: what can be called, what comes back, and how it fails (traps 84-86, 89, 91-94)."""

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.futures import Future

from mpicoll import rpc
from mpicoll.nn import RemoteModule
from tests.support import agree, everyone, raised_by

HOWS = ("rpc_sync", "rpc_async", "remote")


def asked(call: Any, *arguments: Any) -> Any:
    """Calls one of these functions; returns the answer itself, however it comes."""
    answer = call(*arguments)
    if isinstance(answer, rpc.RRef):
        return answer.to_here()
    return answer.wait() if isinstance(answer, torch._C.Future) else answer


def add(a: Any, b: Any, *, times: int = 1) -> Any:
    return (a + b) * times


def who() -> str:
    return rpc.get_worker_info().name


def test_to_oneself(workers: list[str], rank: int) -> None:
    """Arguments are copies here, too, as for any other worker."""
    x = torch.zeros(3)
    answer = rpc.rpc_sync(workers[rank], torch.Tensor.add_, (x, 1))
    agree(bool((x == 0).all()) and bool((answer == 1).all()) and rpc.rpc_sync(rank, who) == workers[rank], (x, answer))


def nested(depth: int, names: list[str], mine: int) -> list[str]:
    other = (mine + 1) % len(names)
    return [] if depth == 0 else [who(), *rpc.rpc_sync(names[other], nested, (depth - 1, names, other))]


def test_nested_calls(workers: list[str], rank: int, size: int) -> None:
    """Around the ring and back, 50 deep, by all at once (trap 89)."""
    found = nested(50, workers, rank)
    agree(found == [workers[(rank + i) % size] for i in range(50)], found)


_arrived = threading.Event()


def wait_for_it() -> bool:
    return _arrived.wait(20)


def bring_it(here: bool = True) -> None:
    if here:
        _arrived.set()
    else:
        _arrived.clear()


def test_a_call_that_waits_for_another(right: str) -> None:
    """The thread that serves may be blocked by what it runs; another takes over."""
    _arrived.clear()
    everyone(None)
    waiting = [rpc.rpc_async(right, wait_for_it) for _ in range(40)]
    rpc.rpc_sync(right, bring_it)
    agree(all(future.wait() for future in waiting))


def test_two_that_come_at_once(workers: list[str], rank: int) -> None:
    """To oneself: both are there in one look, and the first waits for the second."""
    for _ in range(20):
        _arrived.clear()
        waiting, _ = [rpc.rpc_async(workers[rank], function) for function in (wait_for_it, bring_it)]
        assert waiting.wait()
    agree(True)


def test_callbacks_run_elsewhere(right: str) -> None:
    """Not in a thread that waits for something else, under its locks."""
    lock, ran = threading.Lock(), []

    def take(future: Future[Any]) -> None:
        with lock:
            ran.append(threading.current_thread() is threading.main_thread())

    for _ in range(10):
        rpc.rpc_sync(right, bring_it, (False,))
        future = rpc.rpc_async(right, wait_for_it)
        with lock:
            chained = future.then(take)  # it has not ended yet, else this would run `take` here
            rpc.rpc_sync(right, bring_it)
            rpc.rpc_sync(right, nap, (0.01,), timeout=20)
        chained.wait()
    agree(ran == [False] * 10, ran)


def test_an_answer_is_for_who_asks(right: str) -> None:
    """Whatever mode another thread is in that happens to find it."""
    x = torch.ones(3)
    with torch.inference_mode():
        future = rpc.rpc_async(right, add, (x, 1))
        rpc.rpc_sync(right, add, (1, 1))
        answer = future.wait()
    with torch.device("meta"):
        other = rpc.rpc_sync(right, add, (x, 1))
    agree(not answer.is_inference() and other.tolist() == [2.0] * 3, (answer, other))


def nap(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


class OwnError(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(code, text)


def fail(kind: type[Exception]) -> None:
    raise kind(7, "for a reason") if kind is OwnError else kind("for a reason")


def unpicklable() -> Any:
    return threading.Lock()


@pytest.mark.parametrize("kind", [ValueError, KeyError, RuntimeError, ZeroDivisionError, OwnError])
@pytest.mark.parametrize("how", HOWS)
def test_exceptions(how: str, kind: type[Exception], right: str) -> None:
    """Of the type that was raised, with worker and traceback; RuntimeError if that type cannot be made of a text (trap 93)."""
    said = raised_by(lambda: asked(getattr(rpc, how), right, fail, (kind,)))
    good = type(said) is (RuntimeError if kind is OwnError else kind)
    agree(good and all(words in str(said) for words in ("for a reason", right, "in fail")), repr(said))


def leave(kind: type[BaseException]) -> None:
    raise kind("enough")


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("call", ["rpc_async", "remote"])
def test_what_is_no_exception(call: str, kind: type[BaseException], right: str) -> None:
    """A function that raises SystemExit, say, fails its call and nothing else: the worker goes on."""
    with pytest.raises(RuntimeError, match="enough"):
        asked(getattr(rpc, call), right, leave, (kind,), None, 10)  # seconds
    agree(rpc.rpc_sync(right, add, (1, 1), timeout=10) == 2)


def test_what_cannot_travel(right: str) -> None:
    """An argument raises here; an answer, at the caller, too; and calls go on."""
    with pytest.raises(TypeError, match="pickle"):
        rpc.rpc_sync(right, add, (threading.Lock(), 1))
    with pytest.raises(TypeError, match="pickle"):
        rpc.rpc_sync(right, unpicklable)
    with pytest.raises((AttributeError, TypeError, Exception), match=r"lambda|local|pickle"):
        rpc.rpc_sync(right, lambda: 1)
    agree(rpc.rpc_sync(right, add, (1, 1)) == 2)


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
def test_torchscript_does_not_travel(right: str) -> None:
    """Neither as what is called, nor as an argument or an answer, nor to make a RemoteModule."""
    function, module = torch.jit.script(relu), torch.jit.script(nn.Linear(2, 2))
    for call in (
        lambda: rpc.rpc_sync(right, function, (torch.ones(1),)), lambda: rpc.rpc_async(right, add, (module, 1)),
        lambda: rpc.remote(right, module), lambda: RemoteModule(right, function), lambda: rpc.rpc_sync(right, scripted),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=r"mpicoll\.rpc carries no TorchScript, which torch has retired"):
            call()
    agree(rpc.rpc_sync(right, add, (1, 1)) == 2)


def relu(x: Tensor) -> Tensor:
    return x.relu()


def scripted() -> Any:
    return torch.jit.script(relu)


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


def test_bad_arguments(right: str, workers: list[str], size: int) -> None:
    call: Any = rpc.rpc_sync
    refused: list[tuple[type[Exception], str, Callable[[], object]]] = [
        (RuntimeError, r"unknown destination worker 'nobody'.*worker0", lambda: call("nobody", who)),
        (RuntimeError, "unknown destination worker", lambda: call(size, who)),
        (ValueError, "Cannot get WorkerInfo", lambda: call(1.5, who)),
        (TypeError, "callable", lambda: call(right, 3)),
        (ValueError, "timeout", lambda: call(right, who, timeout=-2)),
        (RuntimeError, "already initialized", lambda: rpc.init_rpc("again")),
    ]
    for kind, words, function in refused:
        with pytest.raises(kind, match=words):
            function()
    agree(True)


def ends(tensor: Tensor) -> tuple[int, int, int]:
    return int(tensor[0]), int(tensor[-1]), tensor.numel()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_more_than_two_gib(right: str, workers: list[str], rank: int) -> None:
    """In one message, to another worker and to oneself (trap 74)."""
    found = []
    if rank == 0:
        tensor = torch.zeros((1 << 31) + 9, dtype=torch.uint8)
        tensor[0], tensor[-1] = 3, 5
        found = [rpc.rpc_sync(to, ends, (tensor,), timeout=250) for to in (right, workers[0])]
    agree(rank > 0 or found == [(3, 5, (1 << 31) + 9)] * 2, found)


def test_no_memory_for_a_message_to_oneself(workers: list[str], rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call fails, and this worker is not lost for that."""

    def full(nbytes: int) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(torch, "UntypedStorage", full)
        with pytest.raises(MemoryError):
            rpc.rpc_sync(workers[rank], ends, (torch.ones(100_000),))
    agree(rpc.rpc_sync(workers[rank], ends, (torch.ones(100_000),)) == (1, 1, 100_000))


# -- several at once: torch.futures.wait_all and collect_all end at the first error, as with torch's own RPC (trap 85)


@pytest.mark.parametrize("collect", ["wait_all", "collect_all"])
def test_the_first_error_ends_the_wait(collect: str, right: str) -> None:
    """Of a call that is behind one that has not ended; of its own type, with the text from there."""
    _arrived.clear()
    agree(True)  # everybody has cleared it before anybody calls
    began = time.monotonic()
    futures = [rpc.rpc_async(right, wait_for_it), rpc.rpc_async(right, fail, (ValueError,))]
    with pytest.raises(ValueError, match="for a reason"):
        torch.futures.wait_all(futures) if collect == "wait_all" else torch.futures.collect_all(futures).wait()
    took, left = time.monotonic() - began, not futures[0].done()
    agree(took < 20 and left, (took, left))
    _arrived.set()
    agree(futures[0].wait())


def test_of_calls_and_other_futures(right: str) -> None:
    """Answers in the order of the futures; callbacks of the whole; none at all; futures of other kinds among them or alone."""
    other: Future[Any] = Future()
    futures: list[Any] = [rpc.rpc_async(right, add, (i, 1)) for i in range(5)]
    chained = torch.futures.collect_all([*futures, other]).then(lambda whole: [f.wait() for f in whole.value()])
    other.set_result(9)
    found = [chained.wait(), torch.futures.wait_all([*futures, other]), torch.futures.wait_all([other])]
    agree(found == [[1, 2, 3, 4, 5, 9], [1, 2, 3, 4, 5, 9], [9]] and torch.futures.wait_all([]) == [], found)

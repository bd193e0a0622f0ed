"""The threads in which a worker runs calls: as many as are needed, up to a bound, or to what the system gives."""

import threading
import weakref
from collections.abc import Callable

import pytest

from mpicoll.rpc.service import Pool
from tests.support import eventually

pytestmark = pytest.mark.ranks(1)


class Callback:
    def __call__(self) -> None: ...


def test_an_idle_thread_keeps_nothing() -> None:
    """What it ran may hold the last reference to an object."""
    pool = Pool(1)
    for _ in range(2):  # by a new thread, and by an idle one
        ran = Callback()
        gone = weakref.ref(ran)
        pool.submit(ran)
        del ran
        assert eventually(lambda: pool.idle() == 1)
        assert eventually(lambda gone=gone: gone() is None)  # type: ignore[misc]
    pool.close()


def test_functions_past_the_bound_wait_their_turn() -> None:
    pool, go, ran = Pool(1, most=2), threading.Event(), list[int]()

    def function(i: int) -> Callable[[], None]:
        return lambda: ran.append(i) if go.wait(20) else None

    for i in range(20):
        pool.submit(function(i))
    assert pool.is_full()
    assert pool.threads == 3  # one of them is for the thread that receives
    go.set()
    assert eventually(lambda: len(ran) == 20)
    assert eventually(lambda: pool.threads == 1)
    pool.close()


@pytest.fixture
def few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system gives two threads."""
    start, started = threading.Thread.start, list[threading.Thread]()

    def limited(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)


def chain_ends(pool: Pool, length: int) -> bool:
    """Whether a function ends that waits for a later one, which waits for a later one, and so on."""
    done = [threading.Event() for _ in range(length + 1)]

    def function(i: int) -> None:
        if i < length:
            pool.submit(lambda: function(i + 1))
            with pool.waiting():
                while not done[i + 1].wait(1e-3):
                    pool.run_queued()
        done[i].set()

    pool.submit(lambda: function(0))
    return done[0].wait(20)


def test_what_waits_for_answers_does_not_count() -> None:
    pool = Pool(1, most=1)
    assert chain_ends(pool, 10)
    pool.close()


@pytest.mark.usefixtures("few_threads")
def test_the_system_gives_no_more_threads() -> None:
    pool = Pool(2)
    assert chain_ends(pool, 10)
    assert eventually(lambda: pool.idle() == 2)
    assert pool.submit_now(lambda: None)  # by an idle one
    pool.close()


@pytest.mark.usefixtures("few_threads")
def test_a_thread_of_the_program_that_runs_what_waits_is_none_of_the_pool() -> None:
    pool, go, seen = Pool(2), threading.Event(), list[int]()

    def waits() -> None:
        with pool.waiting():
            seen.append(pool._waiting)

    for _ in range(2):
        pool.submit(lambda: go.wait(20))
    pool.submit(waits)
    assert pool.run_queued()
    assert seen == [0]
    go.set()
    assert eventually(lambda: pool.idle() == 2)
    pool.close()


@pytest.mark.usefixtures("few_threads")
def test_the_system_gives_no_thread() -> None:
    for _ in range(2):
        threading.Thread(target=int).start()
    with pytest.raises(RuntimeError, match="starts no thread"):
        Pool(1).submit(lambda: None)

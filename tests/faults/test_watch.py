"""The thread that watches: when it wakes, what it calls, and when it ends. Without MPI, but for its lock."""

import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from mpicoll._faults import watchdog
from mpicoll._faults.under_way import table
from mpicoll._faults.watch import Timer, Watch
from mpicoll._faults.watchdog import Watchdog
from mpicoll._mpi import runtime

pytestmark = pytest.mark.ranks(1)


@pytest.fixture
def watch() -> Iterator[Watch]:
    made = Watch()
    yield made
    made.timers.clear()
    made.signalled = None
    made.stop()
    made.forget()


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(1e-3)


def switches(thread: threading.Thread) -> int:
    status = open(f"/proc/self/task/{thread.native_id}/status").read()  # noqa: SIM115
    return int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])


def test_a_call_that_fails_keeps_no_other_from_being_called(watch: Watch, capfd: pytest.CaptureFixture[str]) -> None:
    called: list[str] = []

    def fail() -> None:
        raise OSError("a file system that is gone")

    watch.after(0.0, "fails", fail)
    watch.after(0.05, "works", lambda: called.append("works"))
    wait_for(lambda: called)
    watch.after(0.05, "later", lambda: called.append("later"))
    wait_for(lambda: len(called) == 2)
    assert "OSError: a file system that is gone" in capfd.readouterr().err


def test_the_watchdog_looks_again_after_a_look_that_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    dog, group = Watchdog(), object()
    monkeypatch.setattr(watchdog, "watch", made := Watch())
    monkeypatch.setitem(table.groups, group, None)
    monkeypatch.setattr(made, "after", lambda seconds, key, call: made.timers.update({key: Timer(0.0, seconds, call)}))
    dog.watch(60)
    made.timers.clear()
    with pytest.raises(AttributeError):  # it is no group
        dog.look()
    assert list(made.timers) == [dog]


def test_a_timer_that_is_due_first_wakes_the_thread_and_a_later_one_does_not(watch: Watch) -> None:
    called: list[str] = []
    watch.after(60, "late", lambda: called.append("late"))
    thread = watch._thread
    assert thread is not None
    wait_for(lambda: watch._wakes_at > time.monotonic() + 50)
    time.sleep(0.05)
    before = switches(thread)
    for number in range(100):
        watch.after(70 + number, number, lambda: called.append("later"))
        watch.timers.pop(number)
    assert switches(thread) == before
    watch.after(0.05, "soon", lambda: called.append("soon"))
    wait_for(lambda: called)
    assert (called, [*watch.timers]) == (["soon"], ["late"])


def test_a_call_that_pauses_lets_the_others_go_on(watch: Watch) -> None:
    """The end of a job waits for seconds, and the rank answers requests meanwhile. The call itself is not made again."""
    called: list[str] = []

    def look() -> None:
        watch.after(0.1, "other", lambda: called.append("other"))
        watch.pause(0.3)
        called.append("look")

    watch.after(0.0, "look", look)
    wait_for(lambda: "look" in called)
    assert called == ["other", "look"]


def test_the_thread_ends_with_the_last_timer_and_comes_again(watch: Watch) -> None:
    for _ in range(2):
        watch.after(60, "timer", lambda: None)
        thread = watch._thread
        assert thread is not None
        watch.stop()
        assert thread.is_alive()
        watch.timers.pop("timer")
        watch.stop()
        assert not thread.is_alive()


def test_stop_waits_for_a_call_under_way(watch: Watch) -> None:
    begun, called = threading.Event(), list[str]()

    def look() -> None:
        begun.set()
        time.sleep(0.2)
        called.append("look")

    watch.after(60, "other", lambda: None)
    watch.after(0.0, "look", look)
    assert begun.wait(10)
    watch.stop()
    assert called == ["look"]


def test_numbers_of_files_from_1024_on(watch: Watch) -> None:
    """Not every program has few files open when it makes its first group."""
    resource = pytest.importorskip("resource")
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 1100:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1100, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    opened = [os.open(os.devnull, os.O_RDONLY)]
    while opened[-1] < 1024:
        opened.append(os.dup(opened[0]))
    called: list[str] = []
    try:
        watch.after(0.0, "timer", lambda: called.append("timer"))
        wait_for(lambda: called)
        assert watch._pipe[0] > 1024
    finally:
        for number in opened:
            os.close(number)


def test_a_forked_child_has_neither_the_timers_nor_the_pipe(watch: Watch) -> None:
    watch.after(60, "timer", lambda: None)
    wait_for(lambda: watch._wakes_at)
    pid = os.fork()
    if pid == 0:
        end = watch._pipe[0]
        watch.forget()
        try:
            os.fstat(end)
        except OSError:
            os._exit(0 if not watch.timers and watch._thread is None else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_nobody_waits_long_for_the_lock() -> None:
    held, free = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        free.wait(10)

    thread = threading.Thread(target=runtime.attempt, args=(5, hold))
    thread.start()
    assert held.wait(10)
    assert runtime.attempt(0.01, max, 1, 2) is None
    free.set()
    thread.join()
    assert runtime.attempt(0.01, runtime.attempt, 0.01, max, 1, 2) == 2

"""The one thread that watches. It sleeps until something is due, and ends when nothing is left to look after.

    end_job_after       the start of MPI, and the making of communicators: at their limits
    watchdog.py         the operations under way: once a second, and more often where a timeout is short
    flight_recorder.py  requests for the record of this rank: once a second with MPICOLL_DUMP_DIR, and at SIGUSR2

A limit holds also where MPI hangs. So no call may wait for a lock that a thread holds inside MPI: see `runtime.attempt`. And
a call that sleeps lets the others go on: `Watch.pause`.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import sys
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Iterator
from functools import cached_property, partial
from typing import NamedTuple

from mpicoll._base import last_words, launcher, log
from mpicoll._base.waits import AFTER_LIMIT_S, FORWARDING_S, LEAST_LIMIT_S
from mpicoll._faults import sigusr2
from mpicoll._mpi import abort
from mpicoll._mpi.second_process import claim

WAKE = b"\0"  # in the pipe; faulthandler writes text
PIPE = 1 << 16  # bytes that a pipe holds
SETTLE_S = 0.05  # seconds in which the handler of one signal has written everything
LONGEST_S = 1e6  # the system cannot wait for much longer


class Timer(NamedTuple):
    """A call at a time of time.monotonic, ``seconds`` after it was set."""

    due: float
    seconds: float
    call: Callable[[], object]


class Watch:
    """The thread, and what it calls. The only instance is ``watch``.

    Attributes:
        timers: By any key. A timer is removed before its call.
        signalled: Called at SIGUSR2, if the program does not handle that signal itself; None: the thread need not wait for it.
    """

    def __init__(self) -> None:
        self.timers: dict[Hashable, Timer] = {}
        self.signalled: Callable[[], object] | None = None
        self._handles_signal = False
        self._guard = threading.Lock()  # guards the two variables below
        self._thread: threading.Thread | None = None
        self._wakes_at = 0.0
        self._calling = threading.Lock()  # held while the thread is awake

    @cached_property
    def _pipe(self) -> tuple[int, int]:
        """Both ends. They are open until the process ends, because the handler writes to it."""
        return os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def after(self, seconds: float, key: Hashable, call: Callable[[], object]) -> None:
        """Sets the timer of this key. Takes 2 us if the thread need not wake up earlier for it, 100 otherwise."""
        self.timers[key] = timer = Timer(time.monotonic() + seconds, seconds, call)
        with self._guard:
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name="mpicoll watch", daemon=True)
                self._thread.start()
            elif timer.due < self._wakes_at:
                os.write(self._pipe[1], WAKE)

    def listen(self, signalled: Callable[[], object]) -> None:
        """Calls ``signalled`` at SIGUSR2, if the program does not handle that signal itself."""
        self.signalled = signalled
        self._handles_signal = sigusr2.write_to(self._pipe[1])

    def look(self) -> None:
        """Calls what is due. The program's thread calls this at the end of Python, when no other thread runs."""
        if self._wait(0.0) and os.read(self._pipe[0], PIPE).strip(WAKE):
            time.sleep(SETTLE_S)
            with contextlib.suppress(BlockingIOError):
                os.read(self._pipe[0], PIPE)  # the rest of the stack of the main thread, which is in the record as well
            if self.signalled is not None:
                _call(self.signalled)
        for key, timer in list(self.timers.items()):
            if timer.due <= time.monotonic() and self.timers.get(key) is timer:
                self.timers.pop(key, None)
                _call(timer.call)

    def pause(self, seconds: float) -> None:
        """Sleeps within a call of the thread, and calls what is due meanwhile."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._sleep(until)
            self.look()

    def stop(self) -> None:
        """Waits until a call under way has returned, and until the thread has ended, if nothing needs it any more."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return
        os.write(self._pipe[1], WAKE)
        while thread.is_alive() and not (self.timers or self.signalled):
            thread.join(0.1)
        with self._calling:
            """Nothing is called now."""

    def forget(self) -> None:
        """Resets the state in a forked child: it ignores SIGUSR2 and leaves the parent's pipe alone."""
        if self._handles_signal:
            sigusr2.ignore()
        for end in self.__dict__.pop("_pipe", ()):
            os.close(end)
        Watch.__init__(self)

    def _loop(self) -> None:
        while True:
            with self._guard:
                if not (self.timers or self.signalled):
                    self._thread = None
                    return
            self._sleep()
            with self._calling:
                self.look()

    def _sleep(self, until: float = math.inf) -> None:
        with self._guard:
            self._wakes_at = min([until, *(timer.due for timer in list(self.timers.values()))])
        self._wait(self._wakes_at - time.monotonic())

    def _wait(self, seconds: float) -> bool:
        """Returns whether there is something to read, at last after so many seconds."""
        source = select.poll()  # select refuses numbers from 1024 on
        source.register(self._pipe[0], select.POLLIN)
        return bool(source.poll(min(max(0.0, seconds), LONGEST_S) * 1000))


def _call(function: Callable[[], object]) -> None:
    try:
        function()
    except (Exception, SystemExit):  # noqa: BLE001  one that fails must not keep the others from being called
        traceback.print_exc()


watch = Watch()
os.register_at_fork(after_in_child=watch.forget)


@contextlib.contextmanager
def end_job_after(operation: str, limit_s: float) -> Iterator[None]:
    """Ends the job if the body does not end within ``limit_s`` seconds. Within another limit of this thread it does nothing.

    Ranks wait for each other in roll_call.py, which raises at the limit. This is for what that cannot limit: the start of MPI,
    and the making of communicators once all ranks have come (one of them may be stopped in the middle).
    """
    caller = threading.get_ident()
    if caller in watch.timers:
        yield
        return
    watch.after(max(limit_s, LEAST_LIMIT_S) + AFTER_LIMIT_S, caller, partial(_end, operation, limit_s))
    try:
        yield
    finally:
        watch.timers.pop(caller, None)


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """The limit around the caller does not hold in the body, which ends by itself, and begins anew after it."""
    caller = threading.get_ident()
    limit = watch.timers.pop(caller, None)
    try:
        yield
    finally:
        if limit is not None:
            watch.after(limit.seconds, caller, limit.call)


def _end(operation: str, limit_s: float) -> None:
    text = f"{operation}: Timed out: no end within the timeout of {limit_s:g} s"
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized():
        abort.abort(f"{text}, although all of its ranks had come: one of them is stopped, or MPI hangs")
    absent = claim.absent()
    cause = f"rank {', '.join(map(str, absent))} has not started MPI" if absent else "not every rank has started MPI"
    launch = launcher.detect()
    said = f"has not started MPI. On rank {launch and launch.rank} {text}" if absent else f"{text}: {cause}"
    last_words.why(said, culprit=(absent[0], False) if absent else None)
    log.say(f"rank {launch and launch.rank}: {text}: {cause}; aborting the job")
    time.sleep(FORWARDING_S)
    os._exit(1)

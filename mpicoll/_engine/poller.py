"""Completes the point-to-point messages of the process.

The caller posts sends and receives to MPI at once, so that they keep MPI's order. They are completed by polling: by the thread
of the poller, which backs off, or by a thread that waits for one of them.
"""

from __future__ import annotations

import threading
import time

from torch import Tensor

from mpicoll._base.errors import MpicollError
from mpicoll._base.group_errors import GroupDestroyed
from mpicoll._engine.requests import MessageWork
from mpicoll._engine.work import Work
from mpicoll._faults.group_state import GroupState
from mpicoll._mpi import bell, runtime
from mpicoll._mpi.backoff import Backoff, Naps
from mpicoll._mpi.channel import Channel
from mpicoll._tensors import storages
from mpicoll._tensors.calls import Transfer

# A look of the poller takes 30 to 50 us of its rank's time: 1000 looks a second take 4 % of a core from the program.
NAPS = Naps(100e-6, 1e-3, 1.0)  # the first: a thread that calls wait at once polls alone
RUNG_NAPS = Naps(200e-6, 5e-3, 0.3)  # where the other side rings when it posts its part, which short naps follow
TESTS = 16  # in a look. Each moves a part of a message: 11 KiB over TCP by UCX, where 64 MiB took 5 times MPI's time with 1 test
WARM_NAPS = 2  # naps before the poller sleeps, without a message or in one wait: waking it costs as much as a small message


class Poller:
    """Completes posted messages.

    ``_guard`` guards ``_pending``. It is held while requests are tested, never in callbacks. ``_waiting`` has an entry for each
    thread that waits for a message. Such a thread polls all messages.
    """

    def __init__(self) -> None:
        self._pending: dict[MessageWork, None] = {}  # in the order in which they were posted
        self._guard = threading.RLock()
        self._waiting: list[Work] = []
        self._waits = 0  # how often a thread has begun to wait
        self._served: dict[Channel, None] = {}
        self._wake = threading.Event()
        self._asleep = False
        self._closing = False
        self._thread: threading.Thread | None = None

    def add(self, work: MessageWork) -> None:
        """Takes over a posted message and completes its Work when the message has ended."""
        work._help = self._help
        with self._guard:
            self._pending[work] = None
        if self._asleep or self._thread is None:
            self._start()

    def serve(self, channel: Channel) -> None:
        """Calls MPI until `rest`: Note [Who moves a put] in _mpi/remote_memory.py. Again: does nothing."""
        self._served[channel] = None
        self._start()

    def rest(self, channel: Channel) -> None:
        """Ends `serve`. Another channel may still be served."""
        self._served.pop(channel, None)

    def _start(self) -> None:
        with self._guard:
            if self._thread is None:
                self._closing = False
                self._thread = threading.Thread(target=self._loop, name="mpicoll poller", daemon=True)
                self._thread.start()
        if self._asleep:
            self._wake.set()

    def poll(self, tests: int = 1) -> bool:
        """Tests every pending message, and so many times in all if they are few. Returns True if one has ended or moved."""
        ended: dict[MessageWork, Exception | None] = {}
        moved = False
        try:
            with self._guard:
                more = range(tests // (len(self._pending) or 1) - 1)
                for work in list(self._pending):  # the handler of a signal may post messages, and wait for them, meanwhile
                    try:
                        if work.test() or any(work.test() for _ in more):
                            ended[work] = None
                        elif work.transfer.moved:
                            work.transfer.moved, moved = False, True
                    except Exception as caught:
                        known = work.fatal or isinstance(caught, RuntimeError)  # mpicoll's, or torch's of a resized tensor
                        if not known and threading.current_thread() is threading.main_thread():
                            raise  # of a signal's handler: it is for the thread that waits
                        ended[work] = caught  # raised by the wait of the message's Work
                    if work in ended:
                        self._pending.pop(work, None)
        finally:
            for work, error in ended.items():
                if error is not None:
                    work.failed(error)
                work._complete(error)
        return bool(ended) or moved

    def _loop(self) -> None:
        idle = waits = 0
        often, seldom = (Backoff(spin_s=0.0, yield_s=0.0, naps=naps, moves=self._moves) for naps in (NAPS, RUNG_NAPS))
        while not self._closing:
            backoff = often if self._served or not bell.bell.everyone else seldom
            if (self._pending or self._served) and not self._waiting and waits == self._waits:
                runtime.entering()
                backoff.pause()
                idle = 0
                if not self._waiting and self.poll(TESTS):
                    backoff.reset()
                continue
            # Nothing is pending, or a thread of the program waits, or has waited since the last look, and polls itself. A look
            # would take the interpreter's lock from it: with looks every 100 us, 16 MiB between 2 ranks took 1.3 times MPI's
            # time on 2 cores, and 1.14 times with these.
            idle, waits = idle + 1 if waits == self._waits else 0, self._waits
            time.sleep(NAPS.longest_s) if idle < WARM_NAPS else self._sleep()
            backoff.reset()

    def _sleep(self) -> None:
        self._wake.clear()
        self._asleep = True
        # A thread that adds a message, or ends its wait, from now on sees _asleep.
        if (self._waiting or not (self._pending or self._served)) and not self._closing:
            self._wake.wait()
        self._asleep = False

    def _help(self, work: Work, seconds: float | None) -> None:
        self._waits += 1
        self.poll()
        if seconds is None or work._done:
            return
        now = time.monotonic()
        deadline, spin_until = now + seconds, now + Backoff.SPIN_S
        peer = work.other_side() if isinstance(work, MessageWork) else None
        with bell.Meeting(bell.bell, peer):
            while not work._done and time.monotonic() < spin_until:
                self.poll()
            if not work._done:
                self._wait(work, deadline, peer)

    def _wait(self, work: Work, deadline: float, peer: int | None) -> None:
        served = bool(self._served)  # who puts there rings nobody
        backoff = Backoff(None if served else peer, spin_s=0.0, naps=NAPS if served else Backoff.NAPS, moves=self._moves)
        self._waiting.append(work)
        try:
            while not work._done and time.monotonic() < deadline:
                if self.poll(TESTS):
                    backoff.reset()
                else:
                    backoff.pause()
        finally:
            self._waiting.remove(work)
            if self._asleep:
                self._wake.set()

    def _moves(self) -> bool:
        return any(work.moves() for work in list(self._pending))

    def under_way(self) -> list[MessageWork]:
        """Returns the pending messages. Takes no lock: another thread may be blocked while it holds it."""
        return list(self._pending)

    def cancel_all(self, group: GroupState) -> None:
        """Cancels the pending messages of a group that is being closed."""
        self.rest(group.channel)
        with self._guard:
            dropped = [work for work in self._pending if work.group is group]
            self._pending = dict.fromkeys(work for work in self._pending if work.group is not group)
        for work in dropped:
            work.cancel()
            work._complete(GroupDestroyed(f"{work.where()}: the group was destroyed before the message had arrived"))

    def close(self) -> None:
        """Ends the thread. Pending messages stay posted."""
        self._closing = True
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._thread = None


poller = Poller()


def pending(group: GroupState, operation: str, transfer: Transfer, tensor: Tensor, peer: int | None) -> MessageWork:
    """Returns the Work of a message that has been posted. ``peer``: the group rank on the other side; None: any rank."""
    work = MessageWork(group, operation, transfer, tensor, peer)
    try:
        if not work.test():
            work.held = storages.hold([tensor])
            poller.add(work)
            return work
    except BaseException as error:
        work.failed(error)
        if not isinstance(error, MpicollError):  # of a signal's handler; MPI still uses the memory
            work.cancel()
            raise
        work._error = error
    work._done = True  # a small message has often ended at once; nobody else has seen the Work yet
    return work

"""Writes what this rank has called last to a file, so that the ranks' files can be compared (`mpicoll doctor dump`).

A record is written
  - by `mpicoll.dump_flight_record`;
  - on SIGUSR2, if the program does not handle that signal itself;
  - if MPICOLL_DUMP_DIR is set, when an operation has taken longer than its timeout, and when the file ``request`` in that folder
    is touched. The rank whose operation expires touches it, so that the other ranks write their records too, and waits for them.

The groups keep their last collectives in any case (`GroupState.history`); nothing here runs during an operation.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import mpicoll
from mpicoll._base import config
from mpicoll._base.errors import MpicollError
from mpicoll._base.waits import LOOK_S, RECORDS_S
from mpicoll._faults import stacks
from mpicoll._faults.group_state import EVERYBODY, GroupState, Messages, MessageWork
from mpicoll._faults.watchdog import inside
from mpicoll._mpi import runtime
from mpicoll._tensors.signatures import facts

VERSION = 1  # of the format
FOLDER = "mpicoll-dump"  # in the current directory, for a record that is asked for without MPICOLL_DUMP_DIR
REQUEST = "request"  # file in MPICOLL_DUMP_DIR; when it is touched, every rank writes its record
PIPE = 1 << 16  # bytes that a pipe holds
SETTLE_S = 0.05  # seconds in which the handler of one signal has written everything

# Note [How SIGUSR2 reaches a rank that is blocked inside MPI]
# Python runs a signal handler between two bytecodes of the main thread: never, while that thread waits inside MPI. The handler of
# faulthandler is a function of C. It writes the stack of the main thread into a pipe at once, and our thread, which reads the
# pipe, wakes up. signal.set_wakeup_fd would do as well, but asyncio sets it too. The program's own handler wins: if there is one,
# ours is not installed, and one that is installed later replaces ours. So ours is never removed.


class FlightRecorder:
    """Writes the record of this process. Its thread waits for requests, from the first group to the last one."""

    def __init__(self) -> None:
        self._rank = self._size = 0  # of the world; 0 ranks: there was none yet
        self._groups: Callable[[], Iterable[GroupState]] = tuple
        self._messages: Messages = tuple
        self._writing = threading.Lock()  # guards the file
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._pipe: tuple[int, int] | None = None  # both ends; open until the process ends, because the handler writes to it
        self._handles_signal = False
        self._folder: Path | None = None  # MPICOLL_DUMP_DIR at the start: the program may change its current directory
        self._request = 0.0  # when the file `request` was last touched, as far as this rank knows; 0: never
        self._has_expired = False
        self._looked = 0.0  # when `look` has looked

    def start(self, rank: int, size: int, groups: Callable[[], Iterable[GroupState]], messages: Messages) -> None:
        """Starts the thread. ``rank`` and ``size``: of the world; ``groups`` and ``messages`` return what is open and pending."""
        self._rank, self._size, self._groups, self._messages = rank, size, groups, messages
        if self._thread is not None:
            return
        if self._pipe is None:
            self._pipe = os.pipe()
            os.set_blocking(self._pipe[0], False)
            os.set_blocking(self._pipe[1], False)
            if _is_free(signal.SIGUSR2):
                faulthandler.register(signal.SIGUSR2, self._pipe[1], all_threads=False)
                self._handles_signal = True
        with contextlib.suppress(BlockingIOError):  # a signal that came while there was no thread
            os.read(self._pipe[0], PIPE)
        folder = config.get("MPICOLL_DUMP_DIR")
        self._folder = None if folder is None else Path(folder).absolute()
        self._stopping, self._request = False, self._make_request_file()
        self._thread = threading.Thread(target=self._listen, name="mpicoll flight recorder", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread."""
        thread, self._thread = self._thread, None
        if thread is not None and self._pipe is not None:
            self._stopping = True
            os.write(self._pipe[1], b"stop")
            thread.join()

    def forget(self) -> None:
        """Resets the state in a forked child: it ignores SIGUSR2 and leaves the parent's pipe alone."""
        if self._pipe is not None:
            if self._handles_signal:
                faulthandler.register(signal.SIGUSR2, os.open(os.devnull, os.O_WRONLY), all_threads=False)
            for end in self._pipe:
                os.close(end)
        self._pipe = self._thread = None
        self._groups, self._messages, self._writing = tuple, tuple, threading.Lock()

    def dump(self, reason: str, folder: str | None = None) -> str:
        """Writes this rank's record and returns its path.

        Args:
            folder: Made if it does not exist; None: MPICOLL_DUMP_DIR, or `FOLDER` in the current directory.
        """
        if self._size == 0:
            raise MpicollError("dump_flight_record: there was no process group yet")
        path = Path(folder or self._folder or FOLDER).absolute() / f"rank-{self._rank}.json"
        with self._writing:
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_suffix(".part")
            unfinished.write_text(json.dumps(self.record(reason)))
            unfinished.replace(path)
        return str(path)

    def record(self, reason: str) -> dict[str, Any]:
        """Returns the record. Times are in seconds since 1970."""
        now = time.time()
        offset = now - time.monotonic()
        return {
            "version": VERSION, "mpicoll": mpicoll.__version__, "rank": self._rank, "world_size": self._size,
            "reason": reason, "expired": self._has_expired,
            "host": socket.gethostname(), "pid": os.getpid(), "time": now, "monotonic_offset": offset,
            "groups": [_group(group, offset) for group in self._groups()],
            "messages": [_message(*entry, offset) for entry in list(inside.values())],
            "pending_messages": [_pending(each) for each in self._messages()],
            "threads": stacks.threads(),
        }  # fmt: skip

    def _listen(self) -> None:
        assert self._pipe is not None
        waiting = select.poll()
        waiting.register(self._pipe[0], select.POLLIN)
        while True:
            signalled = waiting.poll(None if self._folder is None else LOOK_S * 1000)
            if self._stopping:
                return
            self._look(bool(signalled))

    def look(self) -> None:
        """Looks for requests in the calling thread, once in a while: at the end of Python no other thread runs."""
        if self._thread is not None and self._pipe is not None and time.monotonic() - self._looked > LOOK_S / 4:
            self._looked = time.monotonic()
            self._look(bool(select.select([self._pipe[0]], [], [], 0)[0]))

    def _look(self, signalled: bool) -> None:
        assert self._pipe is not None
        if signalled:
            time.sleep(SETTLE_S)
            os.read(self._pipe[0], PIPE)  # the stack of the main thread, which is in the record as well
            self._answer("SIGUSR2")
        elif self._requested_at() > self._request:
            self._request = self._requested_at()
            self._answer("a request by another rank or by `touch request`")

    def _answer(self, reason: str) -> None:
        try:
            path = self.dump(reason)
        except OSError as error:
            self._say(f"cannot write its flight record: {error}")
        else:
            if reason == "SIGUSR2" or self._rank == 0:
                self._say(f"flight record, because of {reason}: {path}")

    def expired(self, reason: str, ends_job: bool) -> None:
        """Writes this rank's record, and makes the others write theirs: at the first error, and before the end of the job."""
        if (self._has_expired and not ends_job) or self._size == 0 or runtime.in_forked_child():
            return
        self._has_expired = True
        try:
            if self._folder is not None:
                self._dump_all(reason, self._folder)
            elif ends_job:
                self._say("set MPICOLL_DUMP_DIR=FOLDER, and every rank writes there what it has called last")
        except Exception as error:  # noqa: BLE001  the job must end, or the program get its own error, all the same
            self._say(f"cannot write its flight record: {error}")

    def _dump_all(self, reason: str, folder: Path) -> None:
        (folder / REQUEST).touch()
        asked_at = self._request = self._requested_at()
        self.dump(reason)
        late, deadline = set(range(self._size)), time.monotonic() + RECORDS_S
        while late and time.monotonic() < deadline:
            late = {rank for rank in late if _written_at(folder / f"rank-{rank}.json") < asked_at}
            time.sleep(0.05)
        written = f"flight records of {self._size - len(late)} of {self._size} ranks: {folder}"
        self._say(f"{written}; `mpicoll doctor dump {folder}` compares them")

    def _make_request_file(self) -> float:
        """Makes it if it does not exist, and returns when it was last touched.

        NFS may hide a file that another host makes for 30 seconds, but shows the new time of a known one when it is opened.
        """
        try:
            if self._folder is not None:
                self._folder.mkdir(parents=True, exist_ok=True)
                (self._folder / REQUEST).open("a").close()
        except OSError as error:
            self._say(f"MPICOLL_DUMP_DIR cannot be used: {error}")
        return self._requested_at()

    def _requested_at(self) -> float:
        return 0.0 if self._folder is None else _written_at(self._folder / REQUEST)

    def _say(self, text: str) -> None:
        print(f"mpicoll: rank {self._rank} of {self._size}: {text}", file=sys.stderr, flush=True)


def _is_free(number: int) -> bool:
    """True if this process handles, ignores or blocks the signal in no way, neither in Python nor in C."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return signal.getsignal(number) in (signal.SIG_DFL, None)
    lines = dict(line.partition(":")[::2] for line in status.splitlines())
    return not any(int(lines.get(name, "0"), 16) >> (number - 1) & 1 for name in ("SigBlk", "SigIgn", "SigCgt"))


def _written_at(path: Path) -> float:
    """When the file was last changed, in seconds since 1970; 0: it does not exist, or cannot be read."""
    try:
        with path.open() as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return 0.0


def _group(group: GroupState, offset: float) -> dict[str, Any]:
    collectives, ended = group.history.copy(), group.ended
    return {
        "name": group.name, "ranks": list(group.global_ranks), "timeout_s": group.timeout_s,
        "error": None if group.broken is None else str(group.broken), "issued": group.queue.issued(),
        "collectives": [
            {"number": number, **facts(operation, signature).as_json(), "asynchronous": asynchronous,
             "started": started + offset, "ended": number <= ended}
            for number, operation, started, signature, asynchronous in collectives
        ],
    }  # fmt: skip


def _message(operation: str, group: GroupState, since: float, peer: int | None, offset: float) -> dict[str, Any]:
    """A blocking message under way. ``peer``: the rank that it waits for; None: any."""
    rank = None if peer is None or peer == EVERYBODY else group.global_ranks[peer]
    return {"group": group.name, "operation": operation, "peer": rank, "started": since + offset}


def _pending(message: MessageWork) -> dict[str, Any]:
    tensor = message.tensor
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"group": message.group.name, "operation": message.operation, "dtype": dtype, "nbytes": tensor.nbytes}


recorder = FlightRecorder()

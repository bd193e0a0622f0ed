"""Writes what this rank has called last to a file, so that the ranks' files can be compared (`mpicoll doctor dump`).

A record is written
  - by `mpicoll.dump_flight_record`;
  - on SIGUSR2, if the program does not handle that signal itself;
  - if MPICOLL_DUMP_DIR is set, when an operation has taken longer than its timeout, and when the file ``request`` in that folder
    is touched. The rank whose operation expires touches it, so that the other ranks write their records too, and waits for them.

The groups keep their last collectives in any case (`GroupState.history`); nothing here runs during an operation.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import mpicoll
from mpicoll._base import config, log
from mpicoll._base.waits import LOOK_S, RECORDS_S
from mpicoll._faults import stacks
from mpicoll._faults.group_state import GroupState, MessageWork
from mpicoll._faults.under_way import table
from mpicoll._faults.watch import watch
from mpicoll._mpi import runtime
from mpicoll._tensors.signatures import facts

VERSION = 1  # of the format
FOLDER = "mpicoll-dump"  # in the current directory, for a record that is asked for without MPICOLL_DUMP_DIR
REQUEST = "request"  # file in MPICOLL_DUMP_DIR; when it is touched, every rank writes its record


class FlightRecorder:
    """Writes the record of this process. Answers requests from the first group to the last one."""

    def __init__(self) -> None:
        self._rank = self._size = 0  # of the world
        self._folder: Path | None = None  # MPICOLL_DUMP_DIR at the start: the program may change its current directory
        self._request = 0.0  # when the file `request` was last touched, as far as this rank knows; 0: never
        self._has_expired = False

    def start(self, rank: int, size: int) -> None:
        """Answers requests from now on. ``rank`` and ``size``: of the world."""
        self._rank, self._size = rank, size
        if watch.signalled is not None:
            return
        folder = config.get("MPICOLL_DUMP_DIR")
        self._folder = None if folder is None else Path(folder).absolute()
        watch.listen(partial(self._answer, "SIGUSR2"))
        if self._folder is not None:
            self._make_request_file(self._folder)
            self._request = _written_at(self._folder / REQUEST)
            self._look(self._folder)

    def stop(self) -> None:
        """Answers no more requests."""
        watch.signalled = None
        watch.timers.pop(self, None)
        watch.stop()

    def _look(self, folder: Path) -> None:
        if watch.signalled is None:
            return
        watch.after(LOOK_S - time.monotonic() % LOOK_S, self, partial(self._look, folder))
        if (requested_at := _written_at(folder / REQUEST)) > self._request:
            self._request = requested_at
            self._answer("a request by another rank or by `touch request`")

    def dump(self, reason: str, folder: str | None = None) -> str:
        """Writes this rank's record and returns its path.

        Args:
            folder: Made if it does not exist; None: MPICOLL_DUMP_DIR, or `FOLDER` in the current directory.
        """
        path = Path(folder or self._folder or FOLDER).absolute() / f"rank-{self._rank}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".part-{threading.get_native_id()}")
        unfinished.write_text(json.dumps(self.record(reason)))
        unfinished.replace(path)
        return str(path)

    def record(self, reason: str) -> dict[str, Any]:
        """Returns the record. Times are in seconds since 1970."""
        now, offset = time.time(), time.time() - time.monotonic()
        return {
            "version": VERSION, "mpicoll": mpicoll.__version__, "rank": self._rank, "world_size": self._size,
            "reason": reason, "expired": self._has_expired,
            "host": socket.gethostname(), "pid": os.getpid(), "time": now, "monotonic_offset": offset,
            "groups": [_group(group, offset) for group in list(table.groups)],
            "messages": [
                {"group": each.group.name, "operation": each.operation, "started": each.since + offset,
                 "peer": None if each.group.spans else each.rank}
                for each in table.operations() if each.work is None and not each.number
            ],
            "pending_messages": [_pending(each) for each in table.posted()],
            "threads": stacks.threads(),
        }  # fmt: skip

    def _answer(self, reason: str) -> None:
        try:
            path = self.dump(reason)
            if reason == "SIGUSR2" or self._rank == 0:
                self._say(f"flight record, because of {reason}: {path}")
        except OSError as error:
            self._say(f"cannot write its flight record: {error}")

    def expired(self, reason: str, ends_job: bool) -> None:
        """Writes this rank's record, and makes the others write theirs: at the first error, and before the end of the job."""
        if (self._has_expired and not ends_job) or runtime.in_forked_child():
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
        asked_at = self._request = _written_at(folder / REQUEST)
        self.dump(reason)
        late, deadline = set(range(self._size)), time.monotonic() + RECORDS_S
        while late and time.monotonic() < deadline:
            late = {rank for rank in late if _written_at(folder / f"rank-{rank}.json") < asked_at}
            time.sleep(0.05)
        written = f"flight records of {self._size - len(late)} of {self._size} ranks: {folder}"
        self._say(f"{written}; `mpicoll doctor dump {folder}` compares them")

    def _make_request_file(self, folder: Path) -> None:
        """Makes it if it does not exist.

        NFS may hide a file that another host makes for 30 seconds, but shows the new time of a known one when it is opened.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / REQUEST).open("a").close()
        except OSError as error:
            self._say(f"MPICOLL_DUMP_DIR cannot be used: {error}")

    def _say(self, text: str) -> None:
        log.say(f"rank {self._rank} of {self._size}: {text}")


def _written_at(path: Path) -> float:
    """When the file was last changed, in seconds since 1970; 0: it does not exist, or cannot be read."""
    try:
        with path.open() as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:
        return 0.0


def _group(group: GroupState, offset: float) -> dict[str, Any]:
    collectives, ended = group.history.copy(), group.line.ended
    return {
        "name": group.name, "ranks": list(group.channel.ranks), "timeout_s": group.timeout_s,
        "error": None if group.broken is None else str(group.broken), "issued": group.queue.issued(),
        "collectives": [
            {"number": number, **facts(operation, signature).as_json(), "asynchronous": bool(asynchronous),
             "started": started + offset, "ended": number <= ended}
            for number, operation, started, signature, asynchronous in collectives
        ],
    }  # fmt: skip


def _pending(message: MessageWork) -> dict[str, Any]:
    tensor = message.tensor
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"group": message.group.name, "operation": message.operation, "dtype": dtype, "nbytes": tensor.nbytes}


recorder = FlightRecorder()

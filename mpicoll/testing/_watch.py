"""Ends the job when a test hangs or a rank is lost, and says which rank is where.

    rank 0: watch ◄── TCP, lines of JSON ──► watch of each other rank

The thread of the watch works while the main thread is in a call that has released the interpreter lock, as mpi4py's do. Where the
lock is held, faulthandler's thread of C prints the stack a little later, and ends the process.

Rank 0 decides: when its own time limit has passed, when a rank has failed and the others do not come (`fail_alone`), when one
has waited too long at collection, and when a connection has ended (a rank has died). It asks all ranks where they are, reports
the test as failed, and lets pytest write its summary, the XML file and the cache, as at an ordinary end. If rank 0 dies, the
others end, too.
Ranks that cannot connect, because of a firewall, end by their own time limits, each with its own report.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import re
import secrets
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from mpicoll._base import last_words
from mpicoll._base.cpus import longer
from mpicoll._base.facts import ranks_in_words
from mpicoll._base.waits import ALONE_S, BLOCKED_S, CONNECT_S, LAST_REPORTS_S, STACKS_S, SUMMARY_S
from mpicoll._launch.rank_connections import Connections
from mpicoll._mpi.side_channel import SideChannel
from mpicoll.testing._reports import OUT_OF_STEP, name

HIDDEN = re.compile(r"/_pytest/|/pluggy/|/pytest/__|/(hypothesis|unittest)/|<frozen |/mpicoll/(testing/_|_launch/rank|_mpi/s)")
OWN_THREAD = "in _keep_watch"
DEBUGGERS = ("bdb", "pydevd", "pydevd_frame_evaluator", "_pydevd_bundle")


class Watch:
    """The watch of this rank."""

    def __init__(self, side: SideChannel, config: pytest.Config) -> None:
        self.side, self.config = side, config
        self.session: pytest.Session | None = None
        self.item: pytest.Item | None = None  # the test under way
        self.phase = "collection"
        self.finished = 0  # number of tests
        self.over = False  # the session has ended, or the job is about to
        self.release: Callable[[str], object] = str  # ends operations in which this rank waits for one that has failed
        self._ending = threading.Lock()
        self._stderr = os.dup(2)  # under capture, 2 is a temporary file
        self._limit_s = self._beat_s = 0.0
        self._deadline: float | None = None
        # On rank 0: ranks that have failed and wait: until when, the failure in a line, and in full.
        self._alone: dict[int, tuple[float, str, str]] = {}
        self._answers: dict[int, dict[str, Any]] = {}
        self._connections = Connections(side.rank)
        self._lost: list[int] = []
        self._connect()
        threading.Thread(target=self._keep_watch, name="watch of the tests", daemon=True).start()

    def _connect(self) -> None:
        if self.side.size == 1:
            return
        listener, key = None, secrets.token_hex(16)
        host = "127.0.0.1" if self.side.one_node else socket.gethostname()
        if self.side.rank == 0:
            listener = socket.create_server(("127.0.0.1" if self.side.one_node else "", 0), backlog=self.side.size)
        port = None if listener is None else listener.getsockname()[1]
        host, port, key = self.side.exchange("connection", (host, port, key))[0].payload
        if listener is not None:
            self._connections.accept(listener, key, host, self.side.size, CONNECT_S)
            return
        try:
            self._connections.connect((host, port), key, host, 2 * CONNECT_S)
        except (OSError, ValueError) as error:
            self.write(f"rank {self.side.rank}: no connection to rank 0 ({host}): {error}; each rank watches itself")

    def _send(self, rank: int, **said: object) -> None:
        if rank in self._connections.peers:
            self._connections.send(json.dumps(said), rank)

    # -- called by the main thread --

    def start(self, item: pytest.Item, limit_s: float) -> None:
        """Begins the time limit of a test; 0: it has none."""
        self.item = item
        self._limit_s = longer(limit_s)
        self._deadline = time.monotonic() + self._limit_s if limit_s else None
        if self._limit_s != self._beat_s:
            self._beat()

    def _beat(self) -> None:
        """Lets a thread of C print the stacks if the thread of the watch gets no interpreter lock for as long as the limit."""
        self._beat_s = self._limit_s
        faulthandler.cancel_dump_traceback_later()
        if self._beat_s:  # the end of this process would end the job, perhaps before the report of rank 0
            alone = 0 not in self._connections.peers
            faulthandler.dump_traceback_later(self._beat_s + STACKS_S / 2, exit=alone, file=self._stderr)

    def stop(self) -> None:
        """Ends the time limit."""
        self._deadline = self.item = None

    def end(self) -> None:
        """Says that this rank has come to the end of its session."""
        self.stop()
        self.over = True
        faulthandler.cancel_dump_traceback_later()
        self._connections.send(json.dumps({"bye": True}))

    def fail_alone(self, place: str, text: str, headline: str) -> None:
        """Prints the failure of this rank at once, since the others do not come, and lets rank 0 end the job after a while."""
        self.write(f"{place}: failed, others are not there yet\n{text}", f"[rank {self.side.rank}] ")
        self.tell(alone=text, headline=headline.partition("\n")[0], test="" if self.item is None else name(self.item))

    def tell(self, **said: Any) -> None:
        """Tells rank 0 one of these. alone="": the others have come after `fail_alone`. reason: to end the job for it."""
        if self.side.rank == 0:
            self._obey(0, said)
        else:
            self._send(0, **said)

    def write(self, text: str, prefix: str = "") -> None:
        """To the real stderr, whatever is captured, in one piece."""
        lines = "".join(f"{prefix}{line}\n" for line in text.splitlines())
        os.write(self._stderr, lines.encode(errors="replace"))

    def captured(self) -> list[tuple[str, str]]:
        """What pytest has captured of the test under way. It captures no more."""
        capture = self.config.pluginmanager.get_plugin("capturemanager")
        if capture is None or not capture.is_globally_capturing():
            return []
        capture.suspend_global_capture(in_=True)
        out, err = capture.read_global_capture()
        return [(f"Captured {name}", text) for name, text in (("stdout", out), ("stderr", err)) if text]

    # -- the thread --

    def _keep_watch(self) -> None:
        while not self.over:
            self._hear(BLOCKED_S)
            now = time.monotonic()
            self._beat()
            if self._deadline is not None and now > self._deadline and not _is_debugged():
                self._expire(now)
            if any(now > until for until, _, _ in self._alone.copy().values()):
                self._end_job(f"the other ranks did not come within {longer(ALONE_S):g} s")

    def _expire(self, now: float) -> None:
        reason = f"no end after {self._limit_s:g} s"
        if self.side.rank == 0 or 0 not in self._connections.peers:
            self._end_job(reason)
        elif self._deadline is not None and now > self._deadline + 2 * STACKS_S:  # rank 0 should have asked
            self._end_job(f"{reason}, and nothing from rank 0")

    def _hear(self, limit_s: float) -> None:
        for rank, line in self._connections.read(limit_s):
            if line is not None:
                self._obey(rank, json.loads(line))
            elif not self.over:
                self._lost.append(rank)
                self._end_job(f"rank {rank} has ended" if not self._ending.locked() else "")

    def _obey(self, rank: int, said: dict[str, Any]) -> None:
        if said.get("bye"):
            self._connections.drop(rank)
        if "alone" in said:
            self._alone.pop(rank, None)
            if said["alone"]:
                self._alone[rank] = time.monotonic() + longer(ALONE_S), said["headline"], said["alone"]
                said |= {"failed": rank}
                self._connections.send(json.dumps({"failed": rank, "test": said["test"]}))
        if "failed" in said and self.item is not None and said["test"] == name(self.item):
            self.release(f"{OUT_OF_STEP}: rank {said['failed']} has failed in this test")
        if "reason" in said:
            self._end_job(said["reason"])
        if said.get("ask"):
            self._send(0, answer=self._answer())
        if "answer" in said:
            self._answers[rank] = said["answer"]
        if said.get("end"):
            self.over = True
            time.sleep(LAST_REPORTS_S / 2)
            os._exit(1)

    def _answer(self) -> dict[str, Any]:
        """Where this rank is, and what pytest has captured."""
        faulthandler.cancel_dump_traceback_later()
        waits_at, test = self.side.waits_at, "between two tests" if self.item is None else name(self.item)
        where = f"waits for the other ranks at: {waits_at}" if waits_at else f"in {self.phase} of {test}"
        with tempfile.TemporaryFile() as file:  # of a rank that waits, too: the others may wait for one of its threads
            faulthandler.dump_traceback(file=file, all_threads=True)
            file.seek(0)
            stacks = readable(file.read().decode(errors="replace"))
        return {"where": where, "stacks": stacks, "captured": [] if waits_at else self.captured()}

    # -- the end of the job --

    def _end_job(self, reason: str) -> None:
        """Reports and ends this process, and the others if this is rank 0."""
        if not self._ending.acquire(blocking=False):  # a connection has ended meanwhile
            return
        try:
            # By which a launcher ends this process. Python's function works in the main thread only.
            ctypes.CDLL(None).signal(signal.SIGTERM, signal.SIG_IGN)
            faulthandler.dump_traceback_later(SUMMARY_S, exit=True, file=self._stderr)
            if self.side.rank != 0 and self._lost == [0] and self.side.rank > 1:
                time.sleep(STACKS_S)  # rank 1 says it
            item = self.item
            reason = "; ".join([*(f"rank {rank}: {line}" for rank, (_, line, _) in sorted(self._alone.items())), reason])
            self._ask()
            last_words.why(f"{'between two tests' if item is None else f'{self.phase} of {name(item)}'}: {reason}")
            self._report(reason, item)
        except Exception:  # noqa: BLE001  of pytest or a plugin; the job ends all the same
            self.write(f"{reason}\n{traceback.format_exc()}")
        finally:
            self._connections.send(json.dumps({"end": True}))
            time.sleep(LAST_REPORTS_S)
            os._exit(1)

    def _ask(self) -> None:
        self._answers[self.side.rank] = self._answer()
        self.captured()  # suspends it: what is printed from now on is seen
        until = time.monotonic() + STACKS_S
        self._connections.send(json.dumps({"ask": True}))
        while (left := until - time.monotonic()) > 0 and set(self._connections.peers) - set(self._answers):
            self._hear(left)

    def _report(self, reason: str, item: pytest.Item | None) -> None:
        text, session = self.describe(reason), self.session
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is None or self.side.rank != 0 or session is None:
            self.write(text)
            return
        reporter.ensure_newline()
        if item is None:
            reporter.section(reason, red=True, bold=True)
            reporter.write_line(text)
        else:
            report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, self.phase)  # type: ignore[arg-type]
            for rank, answer in sorted(self._answers.items()):
                report.sections += [(f"{title} on rank {rank}", said) for title, said in answer["captured"]]
            item.ihook.pytest_runtest_logreport(report=report)
            session.testsfailed += 1
        untried = len(getattr(session, "items", ())) - self.finished - (item is not None)
        if untried > 0:
            reporter.write_line(f"\nnot run, because the job has ended: {untried} test{'s' if untried > 1 else ''}", yellow=True)
        plugins = self.config.pluginmanager
        # pytest's own alone, since a launcher that has seen a rank die leaves 0.4 s: the XML file, the cache, then the summary.
        foreign = [each for each in plugins.get_plugins() if not _module(each).startswith("_pytest.") or each is reporter]
        plugins.subset_hook_caller("pytest_sessionfinish", foreign)(session=session, exitstatus=pytest.ExitCode.TESTS_FAILED)
        for part in (reporter.summary_errors, reporter.summary_failures, reporter.short_test_summary, reporter.summary_stats):
            part()
        sys.stdout.flush()
        sys.stderr.flush()

    def describe(self, reason: str) -> str:
        """The failures of ranks first, then where each rank is."""
        lines = [reason]
        for rank, (_, _, text) in sorted(self._alone.items()):
            lines += [f"rank {rank}:", text]
        places: dict[str, list[int]] = {}
        for rank, answer in self._answers.items():
            places.setdefault(f"{answer['where']}\n{answer['stacks']}".rstrip(), []).append(rank)
        for rank in range(self.side.size):
            if rank not in self._answers:
                gone = "has ended" if rank in self._lost else "no answer: a call holds the interpreter lock, or its host is lost"
                places.setdefault(gone, []).append(rank)
        for place, ranks in sorted(places.items(), key=lambda each: each[1]):
            lines.append(f"{ranks_in_words(ranks)}: {place}")
        return "\n".join(lines)


def readable(stacks: str) -> str:
    """faulthandler's text without the thread of the watch and without the frames of pytest and of the plugin."""
    kept = [thread.splitlines() for thread in stacks.split("\n\n") if OWN_THREAD not in thread]
    threads = [[line for line in lines[1:] if not HIDDEN.search(line)] for lines in kept]
    return "\nanother thread:\n".join("\n".join(lines) for lines in threads[::-1] if lines)  # the main thread comes first


def _is_debugged() -> bool:
    """Whether a debugger traces this process; coverage traces, too."""
    return str(getattr(sys.gettrace(), "__module__", "")).partition(".")[0] in DEBUGGERS


def _module(plugin: object) -> str:
    return str(getattr(plugin, "__name__", None) or type(plugin).__module__)

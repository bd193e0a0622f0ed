"""Makes one pytest run out of N.

The suite is started as ``mpiexec -n N python -m pytest``; every rank collects the same tests and runs them in the same
order. Three parts keep the ranks together:

Side       a communicator of the tests' own, made by mpi4py alone, so that a bug in mpicoll cannot break the reports.
           Nobody blocks in it: it is polled, so that Python threads (the time limit) go on.
SpmdPlugin after each phase of each test (setup, call, teardown) the ranks exchange what became of it. Failed on one
           rank is failed on all, and rank 0 shows whose failure it was. Only rank 0 prints.
Watch      ends the job when a test takes longer than its time limit, and says which ranks stood where.

# Note [A rank that fails alone]
A test that raises on one rank only leaves the others in one of three places:
  [1] at the end of the same phase: the exchange there tells them;
  [2] in an ``agree`` of that test: the two meet in one exchange, see that they stand at different places, ``agree``
      raises on the ranks that are in it, and the rank at the end of the phase exchanges again until all are there;
  [3] inside a collective, which never ends: nothing but the time limit helps. The failed rank has by then printed its
      failure to stderr, since it waited for the others longer than PATIENCE_S.
"""

from __future__ import annotations

import faulthandler
import io
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TextIO

import numpy as np
import pytest
from mpi4py import MPI

from tests.support import busy

PATIENCE_S = 3.0  # a failed rank that waits longer than this for the others prints its failure at once
GRACE_S = 2.0  # between a rank's report of its expired time limit and its end: the other stuck ranks report meanwhile
COLLECTION_LIMIT_S = 180.0  # imports on many ranks, few cores and a cold disk
FAREWELL_S = 15.0  # at the end of the session, until ranks that do not come are given up and the job is aborted
EXIT_LIMIT_S = 60  # seconds (SIGALRM) for interpreter exit and MPI_Finalize

END = "end of session"
OUT_OF_STEP = "out of step"
PYTEST_FRAMES = ("/_pytest/", "/pluggy/", "/pytest/__main__.py", "<frozen ")


@dataclass(frozen=True)
class Record:
    """What one rank brings to an exchange: where it stands, and something that pickles."""

    place: str
    payload: Any


def name_ranks(ranks: list[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


class Side:
    """The ranks' side channel, beside everything under test."""

    def __init__(self) -> None:
        self.comm = MPI.COMM_WORLD.Dup()
        self.rank: int = self.comm.rank
        self.size: int = self.comm.size
        node = self.comm.Split_type(MPI.COMM_TYPE_SHARED)
        self.one_node: bool = node.size == self.size  # the ranks share memory, and MPI knows it
        node.Free()
        self.test = ""  # id of the test under way, "" between tests
        self.agreed = 0  # calls of agree in that test
        self.waits_at = ""  # the place of the exchange in which this rank waits now; read by the watch's thread

    def exchange(
        self, place: str, payload: Any, limit_s: float | None = None, impatient: Callable[[], None] | None = None
    ) -> list[Record]:
        """Every rank's record, by rank (collective: each rank in some exchange, not necessarily at the same place).

        limit_s: TimeoutError after that; None: the test's time limit is enough.
        impatient: called once if the others have not come within PATIENCE_S.
        """
        if self.size == 1:
            return [Record(place, payload)]
        if self.waits_at:  # an exception has ended that exchange: in the next one other messages would meet
            raise TimeoutError(f"rank {self.rank} of {self.size} was interrupted at: {self.waits_at}")
        self.waits_at = place
        mine = np.frombuffer(pickle.dumps(Record(place, payload)), dtype=np.uint8)
        counts = np.empty(self.size, dtype=np.int64)
        self._poll(self.comm.Iallgather(np.array([mine.size]), counts), limit_s, impatient)
        blocks = np.empty(int(counts.sum()), dtype=np.uint8)
        self._poll(self.comm.Iallgatherv(mine, (blocks, counts)), limit_s, None)
        self.waits_at = ""
        starts = np.cumsum(counts) - counts
        return [pickle.loads(blocks[s : s + n].tobytes()) for s, n in zip(starts, counts, strict=True)]

    def exchange_here(
        self, place: str, payload: Any, limit_s: float | None = None, impatient: Callable[[], None] | None = None
    ) -> list[Any]:
        """Payloads of all ranks once all stand at ``place``; leads on those that are in an ``agree``."""
        while True:
            records = self.exchange(place, payload, limit_s, impatient)
            gone = [r for r, record in enumerate(records) if record.place == END]
            if gone and place != END:
                raise pytest.exit.Exception(f"{name_ranks(gone)} left the session during {place}", returncode=1)
            if all(record.place == place for record in records):
                return [record.payload for record in records]

    def _poll(self, request: MPI.Request, limit_s: float | None, impatient: Callable[[], None] | None) -> None:
        began = time.monotonic()
        while not request.Test():
            waited = time.monotonic() - began
            time.sleep(0 if waited < 0.002 else 0.0005 if waited < 1 else 0.01)
            if impatient is not None and waited > PATIENCE_S:
                impatient()
                impatient = None
            if limit_s is not None and waited > limit_s:
                raise TimeoutError(f"rank {self.rank} of {self.size} waited {limit_s:g} s at: {self.waits_at}")


@dataclass(frozen=True)
class Outcome:
    """What became of one phase of one test on one rank."""

    outcome: str  # passed, failed, skipped
    text: str = ""  # the failure as pytest prints it
    crash: str = ""  # place and message of the exception: equal on two ranks means the same failure
    headline: str = ""
    captured: str = ""

    @staticmethod
    def of(report: pytest.TestReport) -> Outcome:
        if not report.failed:
            return Outcome(report.outcome)
        text = report.longreprtext
        where = getattr(report.longrepr, "reprcrash", None)
        headline = where.message if where else (text.splitlines() or ["failed"])[-1]
        crash = f"{where.path}:{where.lineno}: {where.message}" if where else text
        captured = "\n".join(f"--- {name} ---\n{content}" for name, content in report.sections)
        return Outcome("failed", text, crash, headline, captured)


class JointRepr:
    """The failures of all ranks in one test, as pytest prints a failure; the same failure on several ranks once."""

    def __init__(self, own: Any, rank: int, failures: dict[int, Outcome]) -> None:
        self.own, self.rank, self.failures = own, rank, failures
        groups: dict[str, list[int]] = {}
        for r, failure in failures.items():
            groups.setdefault(failure.crash, []).append(r)
        # Those that merely found themselves alone in an ``agree`` come last: they are a consequence.
        self.groups = sorted(groups.values(), key=lambda ranks: (OUT_OF_STEP in failures[ranks[0]].headline, ranks))
        first = self.groups[0]
        self.reprcrash = SimpleNamespace(message=f"{name_ranks(first)}: {failures[first[0]].headline}")

    def toterminal(self, out: Any) -> None:
        for ranks in self.groups:
            out.line(f"[{name_ranks(ranks)}]", bold=True)
            if self.rank in ranks and hasattr(self.own, "toterminal"):
                self.own.toterminal(out)
            else:
                out.line(self.failures[ranks[0]].text)

    def __str__(self) -> str:
        return "\n".join(f"[{name_ranks(ranks)}]\n{self.failures[ranks[0]].text}" for ranks in self.groups)


def readable(stacks: str) -> str:
    """faulthandler's text without the watch's own thread and without pytest's frames."""
    threads = [thread for thread in stacks.split("\n\n") if " in expire" not in thread]
    lines = "\n".join(threads).splitlines()
    return "\n".join(line for line in lines if not any(inside in line for inside in PYTEST_FRAMES))


class Watch:
    """The time limit of the test under way. Its thread works while the main thread is in a call that has released the
    GIL; where the GIL is held as well, faulthandler's C thread prints the stacks a little later."""

    def __init__(self, side: Side, config: pytest.Config) -> None:
        self.side, self.config = side, config
        self.stderr = os.dup(2)  # the real one: under capture, 2 is a temporary file
        self.timer: threading.Timer | None = None

    def start(self, test: str, limit_s: float) -> None:
        self.stop()
        self.timer = threading.Timer(limit_s, self.expire, (test, limit_s))
        self.timer.name = "time limit"
        self.timer.daemon = True
        self.timer.start()
        faulthandler.dump_traceback_later(limit_s + GRACE_S / 2, exit=True, file=self.stderr)  # before other ranks end the job

    def stop(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
            faulthandler.cancel_dump_traceback_later()

    def write(self, text: str, prefix: str = "") -> None:
        """To the real stderr, whatever is captured, in one piece."""
        lines = "".join(f"{prefix}{line}\n" for line in text.splitlines())
        os.write(self.stderr, lines.encode(errors="replace"))

    def expire(self, test: str, limit_s: float) -> None:
        import pytest_timeout

        if pytest_timeout.is_debugging():
            return
        faulthandler.cancel_dump_traceback_later()
        side = self.side
        where, waits_at = f"rank {side.rank} of {side.size}: {test}", side.waits_at
        if waits_at:
            self.write(f"{where}: waits for the other ranks after {limit_s:g} s, at: {waits_at}")
        else:
            self.write(f"{where}: no end after {limit_s:g} s")
        with tempfile.TemporaryFile() as stacks:  # of a rank that waits, too: the others may wait for one of its threads
            faulthandler.dump_traceback(file=stacks, all_threads=True)
            stacks.seek(0)
            self.write(readable(stacks.read().decode(errors="replace")), f"[rank {side.rank}] ")
        if not waits_at:
            self.write(self._captured(), f"[rank {side.rank}] ")
        if side.rank == 0:
            self._summary(test, limit_s)
        time.sleep(GRACE_S)
        os._exit(1)

    def showing(self, abort: Callable[..., None]) -> Callable[..., None]:
        """Returns ``abort``, which ends a job of several ranks. It first shows what pytest has captured."""
        process = os.getpid()

        def shown(*arguments: Any) -> None:
            if self.side.size > 1 and os.getpid() == process:
                self.write(self._captured(), f"[rank {self.side.rank}] ")
            abort(*arguments)

        return shown

    def _captured(self) -> str:
        capture = self.config.pluginmanager.get_plugin("capturemanager")
        if capture is None or not capture.is_globally_capturing():
            return ""
        capture.suspend_global_capture(in_=True)
        out, err = capture.read_global_capture()
        return "".join(f"captured {name}:\n{text}\n" for name, text in (("stdout", out), ("stderr", err)) if text)

    def _summary(self, test: str, limit_s: float) -> None:
        """What rank 0 would have shown at the end of the run: failures up to here must not be lost."""
        reporter = self.config.pluginmanager.get_plugin("terminalreporter")
        reporter.ensure_newline()
        reporter.summary_errors()
        reporter.summary_failures()
        counts = [f"{len(reporter.stats[key])} {key}" for key in ("failed", "error", "passed") if key in reporter.stats]
        reporter.write_sep("=", ", ".join([f"no end after {limit_s:g} s: {test}", *counts]), red=True, bold=True)
        sys.stdout.flush()


class PlainOutput(io.TextIOWrapper):
    """Open MPI gives its ranks a pseudo-terminal even where its own output goes to a file: no colours, no rewriting."""

    def isatty(self) -> bool:
        return False


class SpmdPlugin:
    """One session of one rank."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.side = Side()
        self.watch = Watch(self.side, config)
        self.collection_errors: list[str] = []
        self.lost_ranks = False
        if self.side.rank != 0:
            self._print_to(open(os.devnull, "w"))  # noqa: SIM115
            if getattr(config.option, "xmlpath", None):
                config.option.xmlpath = None  # rank 0 writes it
        elif "OMPI_COMM_WORLD_RANK" in os.environ:
            self._print_to(PlainOutput(os.fdopen(os.dup(1), "wb", 0), write_through=True))

    def _print_to(self, out: TextIO) -> None:
        manager = self.config.pluginmanager
        manager.unregister(name="terminalreporter")
        manager.register(pytest.TerminalReporter(self.config, out), "terminalreporter")

    def pytest_report_header(self) -> str:
        vendor, version = MPI.get_vendor()
        ranks = "1 rank" if self.side.size == 1 else f"{self.side.size} ranks"
        return f"mpi: {ranks}, {vendor} {'.'.join(map(str, version))}"

    # Collection: the same tests in the same order, or nothing.

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.collection_errors.append(report.longreprtext)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        mine = ([item.nodeid for item in session.items], self.collection_errors)
        everyone = self.side.exchange_here("collection", mine, limit_s=COLLECTION_LIMIT_S)
        if any(len(errors) != len(everyone[0][1]) for _, errors in everyone):
            lines = [f"[rank {r}]\n{text}" for r, (_, errors) in enumerate(everyone) for text in errors]
            pytest.exit("errors during collection, not the same on all ranks\n" + "\n".join(lines), returncode=2)
        for rank, (ids, _) in enumerate(everyone):
            if ids != everyone[0][0]:
                odd = [f"{a} / {b}" for a, b in zip(everyone[0][0], ids, strict=False) if a != b][:5]
                counts = f"{len(everyone[0][0])} / {len(ids)} tests"
                pytest.exit(f"rank 0 / rank {rank} collected different tests: {counts}; {odd}", returncode=2)

    # One test.

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.side.test = item.nodeid
        try:
            return (yield)
        finally:
            self.side.test = ""
            self.watch.stop()

    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> bool:
        """pytest-timeout reads option, ini and marks; the limit itself is ours, and grows with the load of the machine."""
        self.watch.start(item.nodeid, busy.longer(settings.timeout))
        return True

    def pytest_timeout_cancel_timer(self, item: pytest.Item) -> bool:
        """Not here: pytest-timeout cancels at a test's first failure, but teardown needs the limit too."""
        return True

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
        report = yield
        self.side.agreed = 0
        place = f"end of {report.when} of {item.nodeid}"
        mine = Outcome.of(report)

        def speak_up() -> None:
            self.watch.write(f"{place}: failed, others are not there yet\n{mine.text}", f"[rank {self.side.rank}] ")

        outcomes = self.side.exchange_here(place, mine, impatient=speak_up if report.failed else None)
        self._join(report, outcomes)
        return report

    def _join(self, report: pytest.TestReport, outcomes: list[Outcome]) -> None:
        if self.side.size == 1 or all(each.outcome == report.outcome != "failed" for each in outcomes):
            return
        failures = {r: each for r, each in enumerate(outcomes) if each.outcome == "failed"}
        if not failures:  # skipped on some ranks, passed on others
            text = f"{OUT_OF_STEP}: " + ", ".join(f"{each.outcome} on rank {r}" for r, each in enumerate(outcomes))
            failures = {r: Outcome("failed", text, text, text) for r in range(self.side.size)}
        own = report.longrepr if report.failed else None
        report.outcome = "failed"
        report.longrepr = JointRepr(own, self.side.rank, failures)  # type: ignore[assignment]
        for rank, each in enumerate(outcomes):
            if rank != self.side.rank and each.captured:
                report.sections.append((f"Captured on rank {rank}", each.captured))

    # The end.

    def pytest_internalerror(self, excrepr: Any) -> None:
        if self.side.rank != 0:
            self.watch.write(f"INTERNALERROR\n{excrepr}", f"[rank {self.side.rank}] ")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        self.watch.stop()
        try:
            session.exitstatus = max(self.side.exchange_here(END, int(exitstatus), limit_s=FAREWELL_S))
        except TimeoutError as error:
            self.lost_ranks = True
            self.watch.write(f"{error}; the job is aborted", f"[rank {self.side.rank}] ")

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        if self.lost_ranks:
            sys.stdout.flush()
            sys.stderr.flush()
            MPI.COMM_WORLD.Abort(1)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(EXIT_LIMIT_S)  # reaches into MPI_Finalize, where no Python thread runs any more


plugin: SpmdPlugin | None = None


def side() -> Side:
    """The session's side channel."""
    assert plugin is not None, "tests.support.spmd.plugin is set by tests/conftest.py"
    return plugin.side

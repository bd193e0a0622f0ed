"""Makes one pytest run out of N: every rank collects the same tests and runs them in the same order.

After each phase of each test (setup, call, teardown) the ranks exchange what became of it, and make one report of it
(`mpicoll.testing._reports`). Only rank 0 prints. `mpicoll.testing._watch` ends a test that hangs.

# Note [A rank that fails alone]
A test that raises on one rank only leaves the others in one of three places:
  [1] at the end of the same phase: the exchange there tells them;
  [2] in an ``agree`` of that test: the two meet in one exchange, see that they are at different places, ``agree``
      raises on the ranks that are in it, and the rank at the end of the phase exchanges again until all are there;
  [3] inside a collective. The failed rank waits PATIENCE_S, prints its failure, and tells rank 0. All ranks then leave the
      operations of mpicoll in which they wait (fixture ``world``). If some do not come, rank 0 ends the job after a while.
"""

from __future__ import annotations

import atexit
import io
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest

from mpicoll._base import last_words
from mpicoll._base.cpus import longer
from mpicoll._base.waits import COLLECTION_S, EXIT_LIMIT_S, FAREWELL_S, PATIENCE_S
from mpicoll._mpi.side_channel import END, Left, SideChannel
from mpicoll.testing import _companions, _jobs, sessions
from mpicoll.testing._reports import OUT_OF_STEP, Outcome, join, name
from mpicoll.testing._watch import Watch

MOST = 5  # tests that differ, named


class PlainOutput(io.TextIOWrapper):
    """Open MPI gives its ranks a pseudo-terminal even where its own output goes to a file: no colours, no rewriting."""

    def isatty(self) -> bool:
        return False


class Session:
    """The session of this rank."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.side = SideChannel()
        self.test = ""  # id of the test under way, "" between tests
        self.agreed = 0  # exchanges of the test itself in this phase: of `agree`, say
        self.watch = Watch(self.side, config)
        self.collection_errors: list[str] = []
        self.lost_ranks = False
        if self.side.rank != 0:
            self._print_to(open(os.devnull, "w"))  # noqa: SIM115
            if hasattr(config, "cache") and config.cache is not None:
                vars(config.cache)["set"] = lambda key, value: None
        elif "OMPI_COMM_WORLD_RANK" in os.environ:
            self._print_to(PlainOutput(os.fdopen(os.dup(1), "wb", 0), write_through=True))
        self._use_one_folder()
        atexit.register(_limit_exit)

    def _use_one_folder(self) -> None:
        """Puts the temporary folders of the ranks of a host below that of rank 0: else all would remove old ones, all at once."""
        factory = getattr(self.config, "_tmp_path_factory", None)
        if factory is not None and self.side.one_node and self.side.size > 1 and not self.config.option.basetemp:
            base = str(factory.getbasetemp()) if self.side.rank == 0 else ""
            base = self.side.exchange("temporary folder", base)[0].payload
            if self.side.rank > 0:
                factory._given_basetemp = Path(base, f"rank{self.side.rank}")

    def _print_to(self, out: TextIO) -> None:
        manager = self.config.pluginmanager
        if manager.hasplugin("terminalreporter"):
            manager.unregister(name="terminalreporter")
            manager.register(pytest.TerminalReporter(self.config, out), "terminalreporter")

    def exchange_in_test(self, value: Any, late: Any = ()) -> list[Any]:
        """Every rank's value, by rank (collective). Fails the test if ranks are at different places."""
        __tracebackhide__ = True
        self.agreed += 1
        records = self.side.exchange(f"agree #{self.agreed} of {self.test}", value, late)
        if len({record.place for record in records}) > 1:
            places = [f"  rank {r}: at {record.place}" for r, record in enumerate(records)]
            pytest.fail("\n".join([OUT_OF_STEP, *places]))
        return [record.payload for record in records]

    def pytest_report_header(self) -> str:
        return f"mpi: {'1 rank' if self.side.size == 1 else f'{self.side.size} ranks'}, {self.side.library}"

    # -- collection: the same tests in the same order, or nothing --

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self.watch.session = session
        if hasattr(self.config.option, "with_mpi") and not self.config.option.only_mpi:
            self.config.option.with_mpi = True  # pytest-mpi: @pytest.mark.mpi means run here, not skip

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.collection_errors.append(report.longreprtext)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        own = ([name(item) for item in session.items], self.collection_errors)

        def give_up() -> None:
            rank = f"rank {self.side.rank}"
            self.watch.tell(reason=f"{rank} has collected its tests, and other ranks have not {longer(COLLECTION_S):g} s later")

        everyone = self._exchange_at("collection", own, ((longer(COLLECTION_S), give_up),))
        if any(errors != everyone[0][1] for _, errors in everyone):
            lines = [f"rank {r}:\n{text}" for r, (_, errors) in enumerate(everyone) for text in errors]
            pytest.exit("errors during collection, not the same on all ranks\n" + "\n".join(lines), returncode=2)
        first = everyone[0][0]
        for rank, (ids, _) in enumerate(everyone):
            if ids != first:
                pytest.exit(f"rank 0 and rank {rank} collected different tests: {_differences(first, ids, rank)}", returncode=2)
        self.watch.phase = "setup"

    # -- one test --

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.test = name(item)
        last_words.doing(f"it was in {self.test}")  # MPICH's mpiexec kills the ranks before rank 0 can report that one has died
        self.watch.start(item, self._limit_s(item))
        if self.side.rank == 0:
            _jobs.note(f"ended early in {item.nodeid}", self.side.size)
        if self.side.size > 1:
            _companions.keep_in_step(item, self.exchange_in_test, self.watch.fail_alone)
        try:
            return (yield)
        finally:
            self.test = ""
            self.watch.stop()
            self.watch.finished += 1

    def _limit_s(self, item: pytest.Item) -> float:
        mark = item.get_closest_marker("timeout")
        limit = None if mark is None else mark.kwargs.get("timeout", mark.args[0] if mark.args else None)
        if limit is None:
            limit = self.config.getoption("ranks_timeout")
        if limit is None:
            limit = self.config.getini("ranks_timeout")
        return 0.0 if self.config.getoption("usepdb") else float(limit)

    @pytest.hookimpl(optionalhook=True)
    def pytest_timeout_set_timer(self, item: pytest.Item, settings: Any) -> bool:
        """pytest-timeout reads option, ini and marks; the limit itself is ours, and grows with the load of the machine."""
        self.watch.start(item, settings.timeout)
        return True

    @pytest.hookimpl(optionalhook=True)
    def pytest_timeout_cancel_timer(self, item: pytest.Item) -> bool:
        """Not here: pytest-timeout cancels at a test's first failure, but teardown needs the limit too."""
        return True

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        report: pytest.TestReport = yield
        self.agreed = 0
        place = f"end of {report.when} of {name(item)}"
        own, alone = Outcome.of(report, self.config), False

        def speak_up() -> None:
            nonlocal alone
            alone = True
            self.watch.fail_alone(place, report.longreprtext, own.headline)

        outcomes = self._exchange_at(place, own, ((PATIENCE_S, speak_up),) if own.kind == "failed" else ())
        if alone:
            self.watch.tell(alone="")
        if self.side.size > 1:
            join(report, outcomes, self.side.rank, self.config)
        following = {"setup": "call" if report.passed else "teardown", "call": "teardown", "teardown": "setup"}
        self.watch.phase = following[report.when]
        return report

    def _exchange_at(self, place: str, payload: Any, late: Any = ()) -> list[Any]:
        try:
            return self.side.exchange_at(place, payload, late)
        except Left as left:
            pytest.exit(str(left), returncode=1)

    # -- the end --

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Iterator[Any]:
        result = yield
        if self.side.size > 1:
            _companions.save_coverage(self.config, self.side.rank, lambda: self._exchange_at("coverage", None))
        return result

    def pytest_internalerror(self, excrepr: Any) -> None:
        if self.side.rank != 0:
            self.watch.write(f"INTERNALERROR\n{excrepr}", f"[rank {self.side.rank}] ")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        self.watch.stop()

        def give_up() -> None:
            self.lost_ranks = True
            raise TimeoutError(f"rank {self.side.rank} of {self.side.size} waited {longer(FAREWELL_S):g} s at: {END}")

        try:
            session.exitstatus = max(self.side.exchange_at(END, int(exitstatus), ((longer(FAREWELL_S), give_up),)))
        except TimeoutError as error:
            self.lost_ranks = True
            self.watch.write(f"{error}; the job is aborted", f"[rank {self.side.rank}] ")
        else:
            self.watch.end()

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        sessions.remove(self)
        if self.lost_ranks:
            sys.stdout.flush()
            sys.stderr.flush()
            self.side.abort()


def _differences(first: list[str], ids: list[str], rank: int) -> str:
    for number, some, others in (("0", first, ids), (str(rank), ids, first)):
        only = [each for each in some if each not in set(others)]
        if only:
            return f"only rank {number} has {', '.join(only[:MOST])}{f' and {len(only) - MOST} more' if len(only) > MOST else ''}"
    odd = next(f"{a} / {b}" for a, b in zip(first, ids, strict=False) if a != b)
    return f"the order differs from {odd} on"


def _limit_exit() -> None:
    """Reaches into MPI_Finalize, where no Python thread runs any more."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(EXIT_LIMIT_S)

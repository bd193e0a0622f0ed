"""Options of pytest and of pytest-timeout, and fixtures of every scope, on several ranks."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.testing.test_jobs import start

pytestmark = [pytest.mark.launch, pytest.mark.timeout(120)]

TESTS = """
import time


def test_one(rank):
    print(f"printed by {rank}")
    assert rank != 1, "first"


def test_two(rank):
    assert rank != 0, "second"


def test_three(rank):
    time.sleep(0.3 * rank)
"""


PRINTED = "(?s)printed by 0.*printed by 1.*|printed by 1.*printed by 0.*"


@dataclass(frozen=True)
class Case:
    """``said``: regular expressions, in order; ``unsaid``: one that is not there."""

    options: tuple[str, ...]
    status: int
    said: tuple[str, ...]
    unsaid: str = "INTERNALERROR"
    ini: str = ""


CASES = {
    "-x": Case(("--ranks=2", "-x"), 1, ("rank 1: AssertionError: first", "stopping after 1 failures", "1 failed in"), "second"),
    "-x and several jobs": Case(("--ranks=2,1", "-x"), 1, ("2 ranks: 1 failed", "^1 rank: not run"), "second"),
    "--maxfail": Case(("--ranks=2", "--maxfail=2"), 1, ("first", "second", "stopping after 2 failures", "2 failed in")),
    "-k": Case(("--ranks=2", "-k", "three"), 0, ("1 passed, 2 deselected",)),
    "-s": Case(("--ranks=2", "-s", "-k", "one"), 1, (PRINTED, "1 failed")),
    "--durations": Case(("--ranks=2", "--durations=1", "-k", "three"), 0, (r"0\.3\ds call +test_it.py::test_three",)),
    "--collect-only": Case(("--ranks=2", "--collect-only", "-q"), 0, ("test_it.py::test_one\n.*\n.*\n\n3 tests collected",)),
    "-v": Case(
        ("--ranks=2", "-v"), 1, ("test_one FAILED", "test_two FAILED", "test_three PASSED"), "(?s)test_one FAILED.*test_one F"
    ),
    "--tb": Case(("--ranks=2", "--tb=line", "-k", "one"), 1, ("rank 1: AssertionError: first", "1 failed"), "test_it.py:7"),
    "--stepwise": Case(("--ranks=2", "--stepwise"), 2, ("Interrupted: Test failed", "1 failed"), "second"),
    "no terminal": Case(("--ranks=2", "-p", "no:terminal"), 1, (), "test_one"),
    "an option in the configuration": Case((), 1, ("first", "second", "2 failed, 1 passed"), ini="addopts = --ranks=2"),
}


@pytest.mark.parametrize("name", CASES)
def test_options(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    (tmp_path / "pytest.ini").write_text(f"[pytest]\n{case.ini}\n")
    (tmp_path / "test_it.py").write_text(TESTS)
    status, printed = start(tmp_path, *case.options)
    assert status == case.status, printed
    at = 0
    for pattern in case.said:
        found = re.compile(pattern, re.MULTILINE).search(printed, at)
        assert found, f"{pattern} is not there, or not after the words before:\n{printed}"
        at = found.start()
    assert not re.search(case.unsaid, printed), printed


WRITERS = """
import logging

from mpicoll.testing import everyone


def test_writers(request):
    logging.getLogger().warning("heard")
    plugins = request.config.pluginmanager.get_plugins()
    assert everyone(sum(type(each).__name__ == "LogXML" for each in plugins)) == [1, 0]
"""


def test_only_rank_0_writes_files_of_reports(tmp_path: Path) -> None:
    """All ranks wrote the XML file at the same time: now and then it was not well-formed."""
    status, printed = start(tmp_path, "--ranks=2", "--junitxml=x.xml", "--log-file=x.log", program=WRITERS)
    assert status == 0, printed
    assert (tmp_path / "x.log").read_text().count("heard") == 1


HANGS = """
from mpi4py import MPI
import pytest


@pytest.mark.{mark}
def test_hangs(rank):
    if rank == 1:
        MPI.COMM_WORLD.recv(source=1, tag=5)
"""


@pytest.mark.parametrize("by", ["option", "ini", "mark"])
def test_the_limit_is_that_of_pytest_timeout(by: str, tmp_path: Path) -> None:
    """The plugin ends the job, and says where each rank is; pytest-timeout alone would end rank 1 only."""
    pytest.importorskip("pytest_timeout")
    (tmp_path / "pytest.ini").write_text("[pytest]\n" + "timeout = 2\n" * (by == "ini") + "markers = other\n")
    (tmp_path / "test_it.py").write_text(HANGS.format(mark="timeout(2)" if by == "mark" else "other"))
    status, printed = start(tmp_path, "--ranks=2", *["--timeout=2"] * (by == "option"), _MPICOLL_TIME_SCALE="0.03")
    assert status == 1, printed
    assert re.search("no end after [2-8]", printed), printed
    assert "rank 0: waits for the other ranks at: end of call of test_it.py::test_hangs" in printed
    assert "rank 1: in call of test_it.py::test_hangs" in printed


SCOPES = """
import pytest
from mpi4py import MPI

WORLD = MPI.COMM_WORLD
begun, ended = [], []


def fixture(scope):
    @pytest.fixture(scope=scope)
    def made():
        begun.append(scope)
        yield WORLD.allreduce(1)
        ended.append(scope)
        WORLD.barrier()

    return made


of_session, of_package, of_module, of_class, of_function = map(fixture, ["session", "package", "module", "class", "function"])


class TestFirst:
    def test_a(self, of_session, of_package, of_module, of_class, of_function, world_size):
        assert of_session == of_package == of_module == of_class == of_function == world_size

    def test_b(self, of_session, of_package, of_module, of_class, of_function, comm):
        comm.barrier()
        assert (ended, begun) == (["function"], ["session", "package", "module", "class", "function", "function"])


class TestSecond:
    def test_a(self, of_class):
        assert ended == ["function", "function", "class"]


@pytest.fixture(scope="session")
def odd(request):
    if WORLD.rank == 1:
        raise OSError("no data")
    return 1


def test_first(odd):
    WORLD.barrier()


def test_second(odd):
    WORLD.barrier()


def test_third(of_session):
    assert of_session == WORLD.size
"""


def test_fixtures_of_every_scope(tmp_path: Path) -> None:
    """They may have collectives. An error on one rank is one of each test that uses the fixture, on all ranks."""
    status, printed = start(tmp_path, "--ranks=2", program=SCOPES)
    assert status == 1, printed
    assert re.search("4 passed, 2 errors in", printed), printed
    assert printed.count("rank 1: OSError: no data") == 2, printed

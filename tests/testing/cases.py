"""Programs of failure: what goes wrong in a test on several ranks, and what the report says. test_failures.py runs them.

Rank 1 is the one that differs, so that they hold on 2, 3 and 8 ranks; OTHERS names the others, ALL all of them.
"""

from dataclasses import dataclass

HEAD = """
import ctypes, os, signal, sys, time, unittest
import pytest
from mpi4py import MPI
from hypothesis import given, settings, strategies
from mpicoll.testing import agree, everyone, only_on, raises_everywhere

WORLD = MPI.COMM_WORLD
RANK = WORLD.rank


@pytest.fixture
def broken():
    if RANK == 1:
        raise RuntimeError("fixture")


@pytest.fixture
def absent():
    if RANK == 1:
        pytest.skip("no file")


@pytest.fixture
def ends_badly():
    yield
    if RANK == 0:
        raise RuntimeError("end of fixture")


@pytest.fixture(scope="module")
def broken_for_all():
    if RANK == 1:
        raise RuntimeError("fixture of the module")
"""


@dataclass(frozen=True)
class Case:
    """A test, or several. ``name``: of the test that is looked at; ``said``: regular expressions, in order."""

    what: str
    program: str
    outcome: str  # passed, failed, error, skipped; at the end of the job: its exit status
    said: tuple[str, ...] = ()
    slow: bool = False

    @property
    def name(self) -> str:
        return self.program.partition("def test_")[2].partition("(")[0]


# All of them run in one job.
IN_STEP = [
    Case(
        "an assertion on one rank",
        """
def test_one(rank):
    local = ["kept", rank]
    print("printed by", rank)
    assert rank != 1, "only one"
    WORLD.barrier() if rank == 1 else None
""",
        "failed",
        ("^rank 1: AssertionError: only one", r"rank 1:\n", "assert 1 != 1", "local += .'kept', 1."),
    ),
    Case("the same on all", "def test_alike():\n    assert 1 == 2\n", "failed", ("^ALL: assert 1 == 2", "ALL:\n")),
    Case(
        "a failure of each rank",
        "def test_each(rank):\n    assert rank == 9\n",
        "failed",
        ("^rank 0: assert 0 == 9", "rank 0:\n", "assert 0 == 9", "rank 1:\n", "assert 1 == 9"),
    ),
    Case(
        "different errors",
        "def test_errors(rank):\n    if rank < 2:\n        raise (KeyError, ValueError)[rank]('odd')\n",
        "failed",
        ("^rank 0: KeyError: 'odd'", "rank 0:\n", "rank 1:\n", "ValueError: odd"),
    ),
    Case(
        "a failure on rank 0",
        "def test_first(rank):\n    assert rank\n",
        "failed",
        ("^rank 0: assert 0",),
    ),
    Case(
        "a failure before the exchange in which the others are",
        "def test_agree_alone(rank):\n    if rank == 1:\n        raise ValueError('before')\n    agree(True)\n",
        "failed",
        ("^rank 1: ValueError: before", "rank 1:\n", "OTHERS:\n", "out of step", "rank 1: at end of call of"),
    ),
    Case(
        "agree, wrong on one rank",
        "def test_agree(rank):\n    agree(rank != 1, f'mine is {rank}')\n",
        "failed",
        ("^ALL: Failed: wrong on 1 of N ranks", "rank 1: mine is 1"),
    ),
    Case(
        "raises_everywhere, raised on one rank",
        "def test_raises(rank):\n    with raises_everywhere(ValueError):\n        if rank == 1:\n            int('x')\n",
        "failed",
        ("^OTHERS: Failed: wrong on ", "rank 0: raised nothing"),
    ),
    Case(
        "raises_everywhere, another error on one rank",
        "def test_raises_other(rank):\n    with raises_everywhere(ValueError):\n        int('x') if rank != 1 else {}['y']\n",
        "failed",
        ("^ALL: Failed: wrong on 1 of N ranks", "rank 1: KeyError: 'y'"),
    ),
    Case("raises_everywhere", "def test_raises_all():\n    with raises_everywhere(ValueError):\n        int('x')\n", "passed"),
    Case(
        "only_on, which raises",
        "def test_only_on():\n    only_on(1, int, 'one')\n",
        "failed",
        ("^ALL: ValueError: invalid literal", "ALL:\n"),
    ),
    Case("only_on", "def test_only_on_returns(rank):\n    assert only_on(1, lambda: RANK) == 1\n", "passed"),
    Case(
        "a skip on one rank, in the body",
        "def test_skip(rank):\n    if rank == 1:\n        pytest.skip('no file')\n",
        "failed",
        (r"^ALL: out of step: passed on OTHERS, skipped on rank 1 \(no file\)",),
    ),
    Case(
        "a skip on one rank, by a mark",
        "@pytest.mark.skipif(RANK == 1, reason='no disk')\ndef test_skip_mark():\n    WORLD.barrier()\n",
        "skipped",
        ("^rank 1: no disk",),
    ),
    Case(
        "a skip on one rank, by a fixture",
        "def test_skip_fixture(absent):\n    WORLD.barrier()\n",
        "skipped",
        ("^rank 1: no file",),
    ),
    Case("a skip on all ranks", "def test_skip_all():\n    pytest.skip('not today')\n", "skipped", ("^not today",)),
    Case(
        "a failure on one rank that was expected",
        "@pytest.mark.xfail(reason='known')\ndef test_expected(rank):\n    assert rank != 1\n",
        "skipped",
        ("^known",),
    ),
    Case(
        "a strict expectation, and one rank passes",
        "@pytest.mark.xfail(reason='half known', strict=True)\ndef test_strict_one(rank):\n    assert rank != 1\n",
        "skipped",
        ("^half known",),
    ),
    Case(
        "a strict expectation, and all pass",
        "@pytest.mark.xfail(reason='repaired', strict=True)\ndef test_strict():\n    pass\n",
        "failed",
        (r"^ALL: .XPASS\(strict\). repaired",),
    ),
    Case(
        "an expected failure and another error",
        "@pytest.mark.xfail(raises=KeyError)\ndef test_unexpected(rank):\n    raise (KeyError, ValueError)[rank == 1]('odd')\n",
        "failed",
        ("^rank 1: ValueError: odd",),
    ),
    Case(
        "an error in a fixture",
        "def test_fixture(broken):\n    WORLD.barrier()\n",
        "error",
        ('^failed on setup with "rank 1: RuntimeError: fixture"', "rank 1:\n"),
    ),
    Case(
        "an error in a fixture of the module",
        "def test_module_fixture(broken_for_all):\n    WORLD.barrier()\n",
        "error",
        ('^failed on setup with "rank 1: RuntimeError: fixture of the module"',),
    ),
    Case(
        "an error at the end of a fixture",
        "def test_teardown(ends_badly):\n    WORLD.barrier()\n",
        "error",
        ('^failed on teardown with "rank 0: RuntimeError: end of fixture"',),
    ),
    Case(
        "a message that nobody receives",
        "def test_message(comm, rank):\n    if rank == 0:\n        comm.send('x', 1, 7)\n",
        "error",
        ("rank 1: a message of rank 0 with tag 7 was not received",),
    ),
    Case(
        "sys.exit on one rank",
        "def test_exit(rank):\n    if rank == 1:\n        sys.exit(3)\n",
        "failed",
        ("^rank 1: SystemExit: 3",),
    ),
    Case(
        "a long message",
        "def test_long(rank):\n    assert rank != 1, 'long' * 2000 + 'end'\n",
        "failed",
        ("longlong", "longend"),
    ),
    Case(
        "an exception that cannot be printed",
        """
class Odd(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def test_unprintable(rank):
    if rank == 1:
        raise Odd
""",
        "failed",
        ("^rank 1: ", "unprintable|no text"),
    ),
    Case(
        "unittest",
        """
class Unit(unittest.TestCase):
    def test_unit(self):
        self.assertNotEqual(RANK, 1)
""",
        "failed",
        ("^rank 1: AssertionError: 1 == 1",),
    ),
    Case(
        "a parameter",
        "@pytest.mark.parametrize('number', [7, 8])\ndef test_parameter(number, rank):\n    assert (number, rank) != (8, 1)\n",
        "failed",
        ("^rank 1: .*.8, 1. != .8, 1.",),
    ),
    Case(
        "hypothesis shrinks in step",
        """
@given(strategies.integers(0, 1000))
def test_shrinks(number):
    WORLD.allreduce(number)
    assert not (number >= 10 and RANK == 1)
""",
        "failed",
        ("rank 1: ", r"number=10\b"),
    ),
    Case(
        "hypothesis rejects in step",
        """
@given(strategies.integers(0, 1000))
def test_rejects(number):
    from hypothesis import assume
    assert WORLD.allreduce(number) == number * WORLD.size
    assume(RANK != 1 or number % 2 == 0)
    assert RANK != 1 or number % 2 == 0
""",
        "passed",
    ),
    Case(
        "every rank has a folder, and all have one",
        """
def test_folders(tmp_path, shared_path, mpi_tmp_path):
    assert len(set(everyone(tmp_path))) == WORLD.size
    assert len(set(everyone(shared_path))) == len(set(everyone(mpi_tmp_path))) == 1
""",
        "passed",
    ),
]

DIES = """
def test_before():
    pass


def test_dies():
    if RANK == 1:
        {}
    WORLD.barrier()


def test_after():
    pass
"""
DIED = "test_dies: rank 1 has ended|rank 1 of N on .*: .*test_it.py::test_dies"  # in the last line, of mpicoll.run
ENDED = ("1 failed, 1 passed",)

# Each ends its job. A test of 4 s at most.
ENDINGS = [
    Case(
        "an exception, and the others are in a collective",
        DIES.format("raise ValueError('first')"),
        "1",
        (
            "test_dies __",
            "^rank 1: ValueError: first; (the other ranks did not come within|no end after)",
            "^rank 1:\n",
            "ValueError: first",
            "OTHERS: in call of test_it.py::test_dies",
            "rank 1: waits for the other ranks at: end of call",
            *ENDED,
            r"\[rank 1\] E +ValueError: first",  # on stderr, at once
        ),
    ),
    Case(
        "no rank ends",
        DIES.format("pass").replace("WORLD.barrier()", "WORLD.recv(source=RANK, tag=5)"),
        "1",
        ("not run, because the job has ended: 1 test", "no end after", "ALL: in call of test_it.py::test_dies", *ENDED),
    ),
    Case(
        "a rank computes for ever",
        DIES.format("while True: pass"),
        "1",
        ("no end after", "OTHERS: in call of", "rank 1: in call of", *ENDED),
        slow=True,
    ),
    Case(
        "a rank holds the interpreter lock",
        DIES.format("ctypes.PyDLL(None).sleep(60)"),
        "1",
        ("no end after", "OTHERS: in call of", "rank 1: no answer: a call holds the interpreter lock", *ENDED),
        slow=True,
    ),
    Case(
        "a rank leaves by os._exit(0)",
        DIES.format("os._exit(0)"),
        "not 0",
        (DIED,),
    ),
    Case(
        "a rank leaves by os._exit(3)",
        DIES.format("os._exit(3)"),
        "not 0",
        (DIED,),
        slow=True,
    ),
    Case(
        "a segmentation fault",
        DIES.format("os.kill(os.getpid(), signal.SIGSEGV)"),
        "not 0",
        (DIED,),
    ),
    Case("MPI_Abort", DIES.format("WORLD.Abort(7)"), "not 0", (), slow=True),  # MPICH's mpiexec kills the ranks at once
    Case(
        "KeyboardInterrupt on one rank",
        DIES.format("raise KeyboardInterrupt"),
        "not 0",
        ("rank 1: waits for the other ranks at: end of session|waited .* s at: end of session",),
        slow=True,
    ),
    Case(
        "pytest.exit on one rank",
        "def test_leaves():\n    if RANK == 1:\n        pytest.exit('enough', returncode=7)\n\n\ndef test_after():\n    pass\n",
        "7",
        ("rank 1 left the session during end of call of test_it.py::test_leaves",),
    ),
    Case(
        "a hang in a fixture",
        "@pytest.fixture\ndef hangs():\n    yield\n    if RANK == 1:\n        WORLD.recv(source=1, tag=5)\n\n\n"
        "def test_hangs(hangs):\n    pass\n",
        "1",
        ("no end after", "OTHERS: waits for the other ranks at: end of teardown", "rank 1: in teardown of"),
        slow=True,
    ),
    Case(
        "an error at collection, on one rank",
        "if RANK == 1:\n    raise ImportError('no library')\n\n\ndef test_never():\n    pass\n",
        "2",
        ("errors during collection, not the same on all ranks", "rank 1:", "ImportError: no library"),
    ),
    Case("an error at collection, on all ranks", "def test_never(:\n    pass\n", "2", ("SyntaxError", "1 error"), slow=True),
    Case(
        "different tests",
        "def test_both():\n    pass\n\n\nif RANK == 1:\n\n    def test_more():\n        pass\n",
        "2",
        ("rank 0 and rank 1 collected different tests: only rank 1 has test_it.py::test_more",),
    ),
    Case(
        "a rank hangs at collection",
        "if RANK == 1:\n    time.sleep(100)\n\n\ndef test_never():\n    pass\n",
        "1",
        (r"rank \d has collected its tests, and other ranks have not", "rank 1: in collection", "time|sleep|test_it.py"),
        slow=True,
    ),
    Case("no tests", "", "5", ("no tests ran",)),
]

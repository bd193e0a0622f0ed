"""Jobs that go on when a rank dies: Open MPI with --with-ft ulfm. The jobs are in scripts/losing.py."""

import re
import subprocess
from collections import Counter

import pytest

from tests.docs import programs
from tests.faults.clock import FAST
from tests.support import ROOT, is_open_mpi, launch, run

SCRIPT = "tests/faults/scripts/losing.py"
EXAMPLE = ROOT / "examples" / "lost_rank.py"
PROVED = ("tests/project/scripts/proved.py", "lost_rank")  # the example, with a comparison before its last line
ULFM = ["--with-ft", "ulfm"]
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
# Open MPI's own report of a signal, with a frame of Open MPI on top: Note [A death while communicators are made], survivors.py.
CRASH = re.compile(r"Signal: (Segmentation fault|Aborted|Bus error)(.*\n){1,6}.*\[ [1-4]\] \S+/(libmpi|libopen-pal|mca_)")
STARTS = 3  # of one job, if Open MPI crashes

pytestmark = [pytest.mark.launch, pytest.mark.timeout(150)]
survivable = pytest.mark.skipif(not is_open_mpi(), reason="MPICH ends the job when a rank dies")


def start(ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a program; if Open MPI itself crashes, again."""
    for _ in range(STARTS):
        done = launch(ranks, *arguments, options=ULFM, timeout_s=60, env=FAST)
        if not CRASH.search(done.stderr):
            break
    return done


TWO_LEFT = {"world of 2: [0, 1]": 2, "end": 2}
LOST_AND_LEFT = {"all_reduce: lost": 3, **TWO_LEFT}


@survivable
@pytest.mark.parametrize(
    ("case", "ranks", "printed"),
    [
        (
            "operations", 4,  # of all kinds; then another rank is lost
            {
                "recv: lost": 3, "all_reduce: lost": 7, "barrier: lost": 1, "broadcast: lost": 3, "irecv: lost": 3,
                "isend: lost": 3, "world of 3: [0, 1, 2]": 3, **TWO_LEFT,
            },
        ),
        ("training", 3, {"all_reduce: lost": 2, "group of 1": 1, "waits": 1, **TWO_LEFT}),  # by torch.distributed
        ("endings", 4, {"all_reduce: lost": 5, "world of 3: [0, 1, 2]": 3, **TWO_LEFT}),
        ("leaving", 3, {"all_reduce: lost (2,)": 2, **TWO_LEFT}),
        # MPI_Allgatherv of Open MPI 5.0.11 itself returns without an error, and without data.
        ("results", 6, {"lost (1,) of 6": 5, "lost (1,) of 5": 4, "lost (1,) of 4": 3, "lost (1,) of 3": 2, "end": 2}),
        (
            "reconfigured", 4,
            {"all_reduce: lost": 3, "reconfigure: lost": 5, "world of 2: [0, 1]": 6, "world of 3: [0, 1, 2]": 3, "end": 2},
        ),
        # MPI_Comm_create_from_group of Open MPI 5.0.11 hung after some 50 times: Note [One thread in ...], _mpi/survivors.py.
        ("remade 60", 4, {"end": 4}),
        # A second rank dies.
        pytest.param("several 2 0", 4, TWO_LEFT, id="two ranks at once"),
        pytest.param("several 0 0", 4, TWO_LEFT, id="the first rank and another at once"),
        pytest.param("store", 4, LOST_AND_LEFT, id="the rank with the new store, before others have connected"),
        pytest.param("noticed", 4, LOST_AND_LEFT, id="the first rank, noticed before another joins the new world"),
        *(
            pytest.param(f"several 0 {0.05 + i / 100:.2f}", 4, TWO_LEFT, id=f"while they shrink, {i}", marks=pytest.mark.slow)
            for i in range(20)
        ),
    ],
)  # fmt: skip
def test_the_others_go_on(case: str, ranks: int, printed: dict[str, int]) -> None:
    """printed: how often each line of the case, in losing.py."""
    done = start(ranks, SCRIPT, *case.split())
    assert Counter(done.stdout.splitlines()) == printed, f"{done.stdout}\n{done.stderr}"
    if case == "endings":
        assert "uncaught ZeroDivisionError; this rank ends, and the others go on" in done.stderr
        assert "os._exit(5) in process" in done.stderr


def finished(done: subprocess.CompletedProcess[str], ranks: int) -> None:
    """The example has lost all but ``ranks`` of 4 ranks, and its weights are those of one process."""
    expected = ["weights as in one process", f"lost_rank: 96 steps, 4 ranks at first, {ranks} at last"]
    assert done.stdout.splitlines()[-2:] == expected, f"{done.stdout}\n{done.stderr}"


@survivable
def test_the_example_loses_a_rank_and_finishes() -> None:
    """By the command on its first line."""
    job = programs.with_proof(programs.shown(EXAMPLE), says="weights as in one process")
    done = run(job.argv, timeout_s=120)
    programs.printed_as_shown(job, done)
    finished(done, ranks=3)


@pytest.mark.skipif(is_open_mpi(), reason="Open MPI can go on when a rank dies")
def test_the_example_is_refused_with_mpich() -> None:
    done = run(programs.shown(EXAMPLE).argv, timeout_s=120)
    assert done.returncode == 2
    assert "--fault-tolerant: MPICH" in done.stderr


@survivable
@pytest.mark.slow
@pytest.mark.parametrize("_", range(5))
@pytest.mark.parametrize("victims", ["1@30", "1@30 2@30", "1@30 0@30+150"])
def test_the_example_survives(victims: str, _: int) -> None:
    options = [word for victim in victims.split() for word in ("--kill", victim)]
    finished(start(4, *PROVED, *options), ranks=4 - len(victims.split()))


@survivable
def test_a_rank_that_waits_sleeps() -> None:
    """As in other jobs: tests/faults/test_late_ranks.py."""
    done = launch(2, *PYTEST, "tests/faults/test_late_ranks.py", "-k", "signals_are_handled", options=ULFM, timeout_s=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout, done.stdout

"""Jobs that go on when a rank dies: Open MPI with --with-ft ulfm. The jobs are in scripts/losing.py."""

from __future__ import annotations

import subprocess
from collections import Counter

import pytest

from tests.support import is_open_mpi, launch

SCRIPT = "tests/faults/scripts/losing.py"
ULFM = ["--with-ft", "ulfm"]

pytestmark = [
    pytest.mark.launch,
    pytest.mark.skipif(not is_open_mpi(), reason="MPICH ends the job when a rank dies"),
]


def job(ranks: int, *case: str) -> tuple[Counter[str], subprocess.CompletedProcess[str]]:
    """Runs a case. Returns how often each line was printed."""
    done = launch(ranks, SCRIPT, *case, options=ULFM)
    return Counter(done.stdout.splitlines()), done


def test_a_lost_rank_ends_every_operation_and_the_others_go_on() -> None:
    lines, done = job(4, "operations")
    expected = {
        "recv: lost": 3, "all_reduce: lost": 7, "barrier: lost": 1, "broadcast: lost": 3, "irecv: lost": 3, "isend: lost": 3,
        "world of 3: [0, 1, 2]": 3, "world of 2: [0, 1]": 2, "end": 2,
    }  # fmt: skip
    assert lines == expected, f"{done.stdout}\n{done.stderr}"


def test_training_goes_on_through_torch() -> None:
    lines, done = job(3, "training")
    expected = {"all_reduce: lost": 2, "world of 2: [0, 1]": 2, "group of 1": 1, "waits": 1, "end": 2}
    assert lines == expected, f"{done.stdout}\n{done.stderr}"


def test_a_rank_that_fails_counts_as_lost_however_it_ends() -> None:
    lines, done = job(4, "endings")
    expected = {"all_reduce: lost": 5, "world of 3: [0, 1, 2]": 3, "world of 2: [0, 1]": 2, "end": 2}
    assert lines == expected, f"{done.stdout}\n{done.stderr}"
    assert "uncaught ZeroDivisionError; this rank ends, and the others go on" in done.stderr
    assert "os._exit(5) in process" in done.stderr


def test_a_rank_whose_program_has_ended_counts_as_lost_if_others_wait_for_it() -> None:
    lines, done = job(3, "leaving")
    assert lines == {"all_reduce: lost (2,)": 2, "world of 2: [0, 1]": 2, "end": 2}, f"{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("second", ["2", "0"])
def test_two_ranks_at_once(second: str) -> None:
    lines, done = job(4, "several", second, "0")
    assert lines == {"world of 2: [0, 1]": 2, "end": 2}, f"{done.stdout}\n{done.stderr}"


@pytest.mark.slow
@pytest.mark.parametrize("delay", [f"{0.05 + i / 100:.2f}" for i in range(20)])
def test_a_rank_that_dies_while_the_others_shrink(delay: str) -> None:
    lines, done = job(4, "several", "0", delay)
    assert lines == {"world of 2: [0, 1]": 2, "end": 2}, f"{done.stdout}\n{done.stderr}"

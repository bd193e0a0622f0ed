"""A worker that goes without shutdown, in a job of its own: nobody hangs, and it is named."""

from __future__ import annotations

import pytest

from tests.support import is_open_mpi, launch

pytestmark = [pytest.mark.launch, pytest.mark.timeout(90)]
SCRIPT = "tests/rpc/scripts/leaving.py"


@pytest.mark.parametrize("how", ["exits", "killed"])
def test_the_others_go_on(how: str) -> None:
    """Calls to it fail, those under way and later ones; others are still called, and all come to their end."""
    if how == "killed" and not is_open_mpi():
        pytest.skip("MPICH's launcher ends the job of a process that is killed")
    done = launch(3, SCRIPT, how, timeout_s=60, options=["--with-ft", "ulfm"] if how == "killed" else [])
    said = f"status {done.returncode}\nstdout:\n{done.stdout}\nstderr:\n{done.stderr}"
    assert done.returncode == 0, said
    assert "learned: worker 'pupil' (rank 1) has left before it answered go" in done.stdout, said
    assert "afterwards: worker 'pupil' (rank 1) has left" in done.stdout, said
    assert "Traceback" not in done.stderr, said
    assert "there and back: other2" in done.stdout, said
    assert "other2: through its shutdown" in done.stdout, said


def test_an_uncaught_exception() -> None:
    """Ends the job, as everywhere in mpicoll, with its traceback and rank."""
    done = launch(2, SCRIPT, "raises", timeout_s=60)
    said = f"status {done.returncode}\nstdout:\n{done.stdout}\nstderr:\n{done.stderr}"
    assert done.returncode != 0, said
    assert "LookupError: the pupil is lost" in done.stderr, said
    assert "mpicoll: rank 1 of 2" in done.stderr, said


def test_killed() -> None:
    """MPI's launcher ends the job; whoever waits is not left waiting."""
    done = launch(2, SCRIPT, "killed", timeout_s=60)
    assert done.returncode != 0, f"stdout:\n{done.stdout}\nstderr:\n{done.stderr}"

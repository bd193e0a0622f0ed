"""MPI_THREAD_MULTIPLE and MPI_THREAD_SERIALIZED work; less is refused, and different levels where MPI fails (traps 55, 70)."""

import pytest

from tests.support import ROOT, is_open_mpi, launch

pytestmark = pytest.mark.launch

SCRIPT = str(ROOT / "tests" / "mpi" / "scripts" / "smoke.py")


@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    ("levels", "ranks"),
    [
        (("serialized",), 2),
        (("serialized", "multiple"), 3),
        pytest.param(("serialized",), 3, marks=pytest.mark.slow),
        pytest.param(("serialized", "multiple"), 2, marks=pytest.mark.slow),
    ],
)
def test_a_little_of_everything(levels: tuple[str, ...], ranks: int) -> None:
    done = launch(ranks, SCRIPT, *levels, timeout_s=90)
    if len(levels) > 1 and not is_open_mpi():
        refused = "ThreadLevelError: MPI was initialised at MPI_THREAD_SERIALIZED on rank 0 and at MPI_THREAD_MULTIPLE on rank 1"
        assert done.returncode != 0
        assert refused in done.stderr, done.stderr
        return
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    for rank in range(ranks):
        # an MPI may give more than it was asked for: MPICH gives what it was built for
        assert f"rank {rank} at {levels[rank % len(levels)]}: all is well" in done.stdout, done.stdout


@pytest.mark.parametrize("level", ["funneled", "single"])
def test_less_is_refused(level: str) -> None:
    done = launch(1, SCRIPT, level)
    assert done.returncode != 0
    assert f"ThreadLevelError: MPI was initialised at MPI_THREAD_{level.upper()}" in done.stderr, done.stderr


BY_A_LIBRARY = """
import ctypes, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI  # loads the library that the solver starts
ctypes.CDLL(MPI.__file__).MPI_Init_thread(None, None, MPI.THREAD_SINGLE, ctypes.byref(ctypes.c_int()))
import mpicoll
mpicoll.init_process_group()
"""


def test_of_another_library() -> None:
    """A solver that calls MPI_Init. The error says which line helps; MPI4PY_RC_THREAD_LEVEL would not."""
    done = launch(1, "-c", BY_A_LIBRARY)
    assert done.returncode != 0
    assert "ThreadLevelError: MPI was initialised at MPI_THREAD_SINGLE" in done.stderr, done.stderr
    assert "Write `from mpi4py import MPI` above the line that imports or starts that library" in done.stderr
    assert "MPI4PY_RC" not in done.stderr

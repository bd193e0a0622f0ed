"""What a rank costs does not grow with the number of ranks, or the job grows with its square (docs/performance.md)."""

from __future__ import annotations

import pytest

from mpicoll.bench import footprint, options
from tests.support import launch

MODULE = "mpicoll.bench.footprint"
THREADS = 12  # of a rank: 5 of mpicoll with RPC, and those of MPI and of torch's store
FILES = 8  # of a rank, beyond those that it has with mpi4py alone
STORE_FILES = 16  # of rank 0, and a connection of each rank
SHARED = 4 << 20  # bytes for each rank, beyond those with mpi4py alone


def measured(ranks: int, program: str) -> dict[str, footprint.Use]:
    done = launch(ranks, "-m", MODULE, program, timeout_s=120)
    assert done.returncode == 0, done.stderr
    return {use.stage: use for use in footprint.summary(ranks, program, done.stdout)}


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.timeout(600)
def test_files_threads_and_shared_memory_of_eight_ranks() -> None:
    """The launcher of MPICH gives a rank two files for each rank before it: so only what mpi4py alone does not have counts."""
    few = measured(3, "mpi")
    many, alone = measured(8, "mpi"), measured(8, "raw")
    assert [*many] == list(footprint.STAGES)
    assert [*alone] == list(footprint.STAGES[:-1])
    for stage, use in many.items():
        raw = alone.get(stage, alone["messages"])
        text = "\n".join((*footprint.HEAD, few[stage].line(), use.line(), raw.line()))
        # The poller starts with the first message that has not ended when it is posted: often, not always.
        assert abs(few[stage].threads - use.threads) <= 1, text
        assert use.threads <= THREADS, text
        assert use.files - raw.files <= FILES, text
        assert use.first_files - raw.first_files <= STORE_FILES + 8, text
        assert use.shared - raw.shared <= 8 * SHARED, text


def test_the_command_line() -> None:
    """The words were read as those of a benchmark with sizes, and the command failed."""
    assert options.read(["ranks"], "").ranks == [2, 4, 8, 16, 32]
    assert options.read(["ranks", "--ranks", "2", "3"], "").ranks == [2, 3]


def test_a_rank_that_is_silent_is_noticed() -> None:
    with pytest.raises(footprint.jobs.ChildFailed, match="start: 0 of 2 ranks answered"):
        footprint.summary(2, "mpi", "warning: something\n")

"""MPI_Init that waits for a rank says so."""

import re

import pytest

from tests.support import launch

LATE = """
import os, time
if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "LATE":
    time.sleep(4)
import mpicoll
mpicoll.init_process_group()
print(f"rank {mpicoll.get_rank()}")
mpicoll.destroy_process_group()
"""
SOON = {"_MPICOLL_TIME_SCALE": "0.02"}  # 30 s become 0.6


@pytest.mark.launch
@pytest.mark.parametrize("late", [0, 2])
def test_who_waits_in_mpi_init_says_so(late: int) -> None:
    """Under plain mpiexec, where nobody watches. One or two ranks of many say it."""
    done = launch(3, "-c", LATE.replace("LATE", str(late)), env=SOON)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"rank \d", done.stdout)) == ["rank 0", "rank 1", "rank 2"]
    said = [line for line in done.stderr.splitlines() if " has waited in MPI_Init for 0.6 s. " in line]
    assert sorted(line.split()[2] for line in said) == [str(rank) for rank in (0, 1) if rank != late], done.stderr

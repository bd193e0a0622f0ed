"""shrink_group where all ranks live, on every MPI. Where ranks have died: tests/faults/test_fault_tolerant.py."""

import pytest
import torch.distributed

import mpicoll
from tests.support import ROOT, is_open_mpi, launch

DOORS = ["mpicoll", *(["torch"] if hasattr(torch.distributed, "shrink_group") else [])]  # torch has it from 2.13 on


@pytest.mark.launch
@pytest.mark.parametrize("ulfm", [False, True] if is_open_mpi() else [False])
@pytest.mark.parametrize("door", DOORS)
def test_live_ranks_are_left_out(door: str, ulfm: bool) -> None:
    script = str(ROOT / "tests" / "c10d" / "scripts" / "shrinking.py")
    done = launch(3, script, door, options=["--with-ft", "ulfm"] if ulfm else [])
    assert done.stdout.splitlines() == ["10 of 2, True"] * 2, f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0


@pytest.mark.usefixtures("world")
def test_a_job_that_ends_when_a_rank_dies_has_nothing_to_shrink() -> None:
    with pytest.raises(mpicoll.LaunchError, match=r"mpicoll\.run --fault-tolerant"):
        mpicoll.shrink()


USERS_COMMUNICATOR = """
import torch, mpicoll as dist
from mpi4py import MPI
dist.init_process_group(comm=MPI.COMM_SELF)
dist.destroy_process_group()
dist.init_process_group()
total = torch.ones(1)
dist.all_reduce(total)
print(f"{total.item():g} of {dist.get_world_size()}\\n", end="", flush=True)
"""


@pytest.mark.launch
@pytest.mark.skipif(not is_open_mpi(), reason="MPICH ends the job when a rank dies")
def test_a_world_of_a_users_communicator_does_not_shrink_the_next_one() -> None:
    done = launch(2, "-c", USERS_COMMUNICATOR, options=["--with-ft", "ulfm"])
    assert done.stdout.splitlines() == ["2 of 2"] * 2, f"{done.stdout}\n{done.stderr}"

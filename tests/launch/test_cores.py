"""Which cores count for a job: those of the hosts of its ranks, not those of the host on which `mpicoll.run` is called."""

from __future__ import annotations

import pytest

from mpicoll._launch.job import Program
from tests.launch.made_up import a_site, one, planned

ALLOCATED = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2],n7", "SLURM_TASKS_PER_NODE": "4(x2),2", "SLURM_NTASKS": "10"}
CPUS_16 = {**ALLOCATED, "SLURM_JOB_CPUS_PER_NODE": "16(x3)"}


@pytest.mark.parametrize(
    ("program", "environ", "threads", "crowded"),
    [
        (one(), CPUS_16, "4", False),  # as the login node has 2 cores, this was 1, and ranks gave their cores away
        (one(), {**ALLOCATED, "SLURM_JOB_CPUS_PER_NODE": "16(x2),8"}, "2", False),
        (one(), {**ALLOCATED, "SLURM_JOB_CPUS_PER_NODE": "2(x3)"}, "1", True),
        (one(8, hosts="n1:4,n7:4"), CPUS_16, "4", False),
        (one(4, hosts="here:4"), CPUS_16, "1", True),  # outside the allocation
        (one(), ALLOCATED, None, False),  # an old Slurm: the ranks choose
        (one(8, hosts="a:4,b:4"), {}, None, False),
        (one(4), {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n3", "SLURM_JOB_CPUS_PER_NODE": "8"}, "2", False),
        (one(4), {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "here", "SLURM_JOB_CPUS_PER_NODE": "8"}, "1", True),
    ],
)
def test_the_cores_are_those_of_the_hosts_of_the_ranks(
    program: Program, environ: dict[str, str], threads: str | None, crowded: bool
) -> None:
    made = planned(program, site=a_site(cores=2, **environ))
    assert made.added.get("OMP_NUM_THREADS") == threads
    assert ("OMPI_MCA_mpi_yield_when_idle" in made.added) == crowded
    assert ("PRTE_MCA_rmaps_default_mapping_policy" in made.added) == crowded
    (note,) = (note for note in made.notes if "OMP_NUM_THREADS" in note)
    assert ("for each rank: its share of the cores of its host" in note) == (threads is None)

"""The nodes of a scheduler's job, from variables and files as the schedulers make them."""

import pytest

from mpicoll._launch.find.allocation import Allocation, find, lines, lsf_pairs

FILES = {
    "/var/spool/pbs/aux/1234.pbs01": "x1000c0s0b0n0.hsn\nx1000c0s0b0n0.hsn\nx1000c0s0b1n0.hsn\nx1000c0s0b1n0.hsn\n",
    "/home/u/.lsbatch/1700.77.hostfile": "batch2\na01n01\na01n01\na01n02\na01n02\n",
}
PBS = {
    "PBS_ENVIRONMENT": "PBS_BATCH", "PBS_JOBID": "1234.pbs01", "PBS_NODEFILE": "/var/spool/pbs/aux/1234.pbs01",
    "PBS_NUM_PPN": "2",
}  # fmt: skip
LSF = {"LSB_JOBID": "77", "LSB_DJOB_HOSTFILE": "/home/u/.lsbatch/1700.77.hostfile", "LSB_MCPU_HOSTS": "c3 1 c5 1 c1 2"}
SLURM = {"SLURM_JOB_ID": "9", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_NTASKS": "6"}


def files(path: str) -> str:
    return FILES.get(path, "")


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        (SLURM, Allocation("Slurm", "9", (("n1", 4), ("n2", 4)), 6)),
        (PBS, Allocation("PBS", "1234.pbs01", (("x1000c0s0b0n0.hsn", 2), ("x1000c0s0b1n0.hsn", 2)), 4)),
        ({**PBS, "PBS_NODEFILE": "/gone"}, None),  # the file is on the first node only
        (LSF, Allocation("LSF", "77", (("batch2", 1), ("a01n01", 2), ("a01n02", 2)), 5)),
        ({**LSF, "LSB_DJOB_HOSTFILE": "/gone"}, Allocation("LSF", "77", (("c3", 1), ("c5", 1), ("c1", 2)), 4)),
    ],
)
def test_the_allocation_of_each_scheduler(environ: dict[str, str], expected: Allocation | None) -> None:
    assert find(environ, files) == expected


def test_malformed_lists() -> None:
    assert lsf_pairs("a 4 b") == lsf_pairs("a b") == lsf_pairs("") == ()
    assert lines("\n\n") == ()

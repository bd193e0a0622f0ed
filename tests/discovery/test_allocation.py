"""The nodes of a scheduler's job, from variables and files as the schedulers make them."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from mpicoll._discovery.allocation import Allocation, find, flux_nodes, flux_resources, grid_engine_table, lines, lsf_pairs

FLUX_R = (
    '{"version": 1, "execution": {"R_lite": [{"rank": "0-1", "children": {"core": "0-3", "gpu": "0"}}, '
    '{"rank": "2", "children": {"core": "0,4-5"}}], "starttime": 1700000000.0, "expiration": 0.0, '
    '"nodelist": ["tioga[18-19]", "big1"]}}'
)
FILES = {
    "/var/spool/pbs/aux/1234.pbs01": "x1000c0s0b0n0.hsn\nx1000c0s0b0n0.hsn\nx1000c0s0b1n0.hsn\nx1000c0s0b1n0.hsn\n",
    "/home/u/.lsbatch/1700.77.hostfile": "batch2\na01n01\na01n01\na01n02\na01n02\n",
    "/opt/sge/spool/pe_hostfile": "c1 2 all.q@c1 UNDEFINED\nc1 2 long.q@c1 UNDEFINED\nc2 4 all.q@c2 <NULL>\n",
}
PBS = {
    "PBS_ENVIRONMENT": "PBS_BATCH", "PBS_JOBID": "1234.pbs01", "PBS_NODEFILE": "/var/spool/pbs/aux/1234.pbs01",
    "PBS_NUM_PPN": "2",
}  # fmt: skip
LSF = {"LSB_JOBID": "77", "LSB_DJOB_HOSTFILE": "/home/u/.lsbatch/1700.77.hostfile", "LSB_MCPU_HOSTS": "c3 1 c5 1 c1 2"}
GRID_ENGINE = {"JOB_ID": "5", "PE_HOSTFILE": "/opt/sge/spool/pe_hostfile", "NSLOTS": "8", "NHOSTS": "2"}
FLUX = {"FLUX_URI": "local:///run/user/1/flux/local-0", "FLUX_ENCLOSING_ID": "f2kXQ"}
SLURM = {"SLURM_JOB_ID": "9", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "4(x2)", "SLURM_NTASKS": "6"}


def files(path: str) -> str:
    return FILES.get(path, "")


def flux(environ: Mapping[str, str]) -> str:
    return FLUX_R


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        (SLURM, Allocation("Slurm", "9", (("n1", 4), ("n2", 4)), 6)),
        (PBS, Allocation("PBS", "1234.pbs01", (("x1000c0s0b0n0.hsn", 2), ("x1000c0s0b1n0.hsn", 2)), 4)),
        ({**PBS, "PBS_NODEFILE": "/gone"}, None),  # the file is on the first node only
        (LSF, Allocation("LSF", "77", (("batch2", 1), ("a01n01", 2), ("a01n02", 2)), 5)),
        ({**LSF, "CSM_ALLOCATION_ID": "3"}, Allocation("LSF", "77", (("a01n01", 2), ("a01n02", 2)), 4)),
        ({**LSF, "LSB_DJOB_HOSTFILE": "/gone"}, Allocation("LSF", "77", (("c3", 1), ("c5", 1), ("c1", 2)), 4)),
        (GRID_ENGINE, Allocation("Grid Engine", "5", (("c1", 4), ("c2", 4)), 8)),
        ({"JOB_ID": "5"}, None),  # a job of Grid Engine without a parallel environment
        (FLUX, Allocation("Flux", "f2kXQ", (("tioga18", 4), ("tioga19", 4), ("big1", 3)), 11)),
        ({**LSF, **FLUX}, Allocation("Flux", "f2kXQ", (("tioga18", 4), ("tioga19", 4), ("big1", 3)), 11)),
        ({**FLUX, "FLUX_JOB_ID": "f3"}, None),  # a task of `flux run`
    ],
)
def test_the_allocation_of_each_scheduler(environ: dict[str, str], expected: Allocation | None) -> None:
    assert find(environ, files, flux) == expected


@pytest.mark.parametrize("text", ["", "no JSON", "{}", "[]", '{"execution": {"R_lite": [], "nodelist": ["a"]}}'])
def test_texts_that_are_no_resources_of_flux(text: str) -> None:
    assert flux_nodes(text) == ()


def test_malformed_lists() -> None:
    assert lsf_pairs("a 4 b") == lsf_pairs("a b") == lsf_pairs("") == ()
    assert grid_engine_table("c1") == grid_engine_table("c1 many") == ()
    assert lines("\n\n") == ()


def test_flux_is_asked(tmp_path: Path) -> None:
    (tmp_path / "flux").write_text(f"#!/bin/sh\necho warning >&2\n[ \"$*\" = 'resource R' ] && echo '{FLUX_R}'\n")
    (tmp_path / "flux").chmod(0o755)
    assert flux_resources({"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}) == FLUX_R
    assert flux_resources({"PATH": str(tmp_path / "nowhere")}) == ""

"""Which launcher of a scheduler can start the ranks of an MPI; the launchers are small programs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mpicoll._discovery.find import Mpi
from mpicoll._discovery.launchers import find_launcher, find_other, srun_type
from mpicoll.errors import LaunchError

OPENMPI = Mpi("Open MPI", (5, 0, 11), "/o/lib/libmpi.so.40")
MPICH = Mpi("MPICH", (5, 0, 2), "/m/lib/libmpi.so.12")


def install(folder: Path, name: str, says: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / name
    program.write_text(f"#!/bin/sh\nprintf '{says}'\n")
    program.chmod(0o755)
    return program


def path(*folders: Path) -> dict[str, str]:
    return {"PATH": os.pathsep.join([*map(str, folders), "/usr/bin", "/bin"])}


def test_the_interface_of_srun() -> None:
    assert srun_type(OPENMPI, ("none", "pmi2", "pmix", "pmix_v4")) == "pmix"
    assert srun_type(OPENMPI, ("none", "pmi2", "pmix_v4")) == "pmix_v4"
    assert srun_type(MPICH, ("none", "cray_shasta", "pmi2")) == "pmi2"
    assert srun_type(MPICH, ("none", "cray_shasta")) == "cray_shasta"
    assert srun_type(OPENMPI, ("none", "pmi2")) is None


def test_srun(tmp_path: Path) -> None:
    program = install(tmp_path, "srun", "MPI plugin types are...\\n\\tnone\\n\\tpmi2\\n")
    found = find_launcher("srun", MPICH, path(tmp_path))
    assert (found.path, found.family, found.pmi) == (str(program), "srun", "pmi2")
    with pytest.raises(LaunchError, match="Open MPI needs --mpi=pmix, and this srun offers none, pmi2: each rank would be alone"):
        find_launcher("srun", OPENMPI, path(tmp_path))


def test_pals_is_known_by_its_folder(tmp_path: Path) -> None:
    install(tmp_path / "cray/pe/pals/1.2.12/bin", "mpiexec")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "mpiexec").symlink_to(tmp_path / "cray/pe/pals/1.2.12/bin/mpiexec")
    assert find_launcher("pals", OPENMPI, path(tmp_path / "bin")).pmi == "pmix"
    assert find_launcher("pals", MPICH, path(tmp_path / "bin")).pmi == ""
    install(tmp_path / "other", "mpiexec")
    with pytest.raises(LaunchError, match="is no mpiexec of PALS"):
        find_launcher("pals", MPICH, path(tmp_path / "other"))


def test_flux_and_jsrun(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="--launcher flux: no flux in PATH"):
        find_launcher("flux", MPICH, {"PATH": str(tmp_path)})
    install(tmp_path, "flux")
    install(tmp_path, "jsrun")
    assert (find_launcher("flux", OPENMPI, path(tmp_path)).pmi, find_launcher("flux", MPICH, path(tmp_path)).pmi) == ("pmix", "")
    assert find_launcher("jsrun", OPENMPI, path(tmp_path)).family == "jsrun"
    with pytest.raises(LaunchError, match=r"--launcher jsrun: .* this is MPICH"):
        find_launcher("jsrun", MPICH, path(tmp_path))


def test_the_launcher_of_the_scheduler_stands_in_for_a_missing_mpiexec(tmp_path: Path) -> None:
    install(tmp_path, "flux")
    environ = path(tmp_path)
    assert find_other(MPICH, environ) is None  # outside a job
    found = find_other(MPICH, {**environ, "FLUX_URI": "local:///f"})
    assert found is not None
    assert found.family == "flux"
    assert find_other(MPICH, {"PATH": str(tmp_path), "LSB_JOBID": "7"}) is None

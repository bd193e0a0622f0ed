"""Settings for ranks in containers of their own; tests/launch/test_containers.py starts such ranks."""

import pytest

from mpicoll._base import containers, processes
from mpicoll._base.launcher import Launch

LAUNCH = Launch("openmpi", 0, 2, 0, 2)


def prepared(monkeypatch: pytest.MonkeyPatch, what: str | None, **environ: str) -> dict[str, str]:
    monkeypatch.setattr(containers, "apart", lambda environ, launch: what)
    containers.prepare(environ, LAUNCH)
    return environ


@pytest.mark.parametrize("what", [containers.PROCESSES, containers.SHARED_MEMORY])
def test_the_settings(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    expected = {"OMPI_MCA_btl": "^sm,vader", "MPIR_CVAR_NOLOCAL": "1", "I_MPI_FABRICS": "ofi"}
    assert prepared(monkeypatch, what) == expected


@pytest.mark.parametrize(
    ("value", "becomes"),
    [("^ofi", "^ofi,sm,vader"), ("^sm,vader", "^sm,vader"), ("^vader", "^vader,sm"), ("self,sm", "self,sm"), ("", "")],
)
def test_transports_of_the_user(monkeypatch: pytest.MonkeyPatch, value: str, becomes: str) -> None:
    assert prepared(monkeypatch, containers.PROCESSES, OMPI_MCA_btl=value)["OMPI_MCA_btl"] == becomes


def test_other_values_of_the_user_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    assert prepared(monkeypatch, containers.PROCESSES, MPIR_CVAR_NOLOCAL="0")["MPIR_CVAR_NOLOCAL"] == "0"


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str | int, tuple[int, int] | None]:
    """/dev/shm of each process; a number is a launcher's. Of a machine whose namespace is not the initial one."""
    folders: dict[str | int, tuple[int, int] | None] = {"self": (1, 1)}
    monkeypatch.setattr(containers, "_launchers", lambda: [pid for pid in folders if isinstance(pid, int)])
    monkeypatch.setattr(containers, "_shared_memory", folders.__getitem__)
    monkeypatch.setattr(processes, "namespace", lambda _: 1)
    containers._not_shared.cache_clear()
    return folders


def apart(launch: Launch | None = LAUNCH, **environ: str) -> str | None:
    try:
        return containers.apart(environ, launch)
    finally:
        containers._not_shared.cache_clear()


def test_no_launcher_in_sight(seen: dict[str | int, tuple[int, int] | None], monkeypatch: pytest.MonkeyPatch) -> None:
    assert apart() == containers.PROCESSES
    monkeypatch.setattr(processes, "namespace", lambda _: containers.INITIAL_NAMESPACE)
    assert apart() is None  # on the host itself: a launcher of another name


def test_a_launcher_in_sight(seen: dict[str | int, tuple[int, int] | None]) -> None:
    seen[10] = (2, 1)
    assert apart() == containers.SHARED_MEMORY
    seen[11] = (1, 1)  # one of several jobs on this host
    assert apart() is None


def test_a_launcher_of_another_user_tells_nothing(seen: dict[str | int, tuple[int, int] | None]) -> None:
    seen[10] = None
    assert apart() is None


def test_a_rank_without_neighbours(seen: dict[str | int, tuple[int, int] | None]) -> None:
    assert apart(None) is None
    assert apart(Launch("openmpi", 0, 2, 0, 1)) is None


def test_mpiexec_of_mpich_with_a_port_tells_no_rank(seen: dict[str | int, tuple[int, int] | None]) -> None:
    assert apart(None, PMI_PORT="host:4711", PMI_ID="0") == containers.PROCESSES

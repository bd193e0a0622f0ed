"""MPICH of Debian and Ubuntu, which an mpi4py wheel finds under the name libmpi.so.12 only."""

from pathlib import Path

import pytest

from mpicoll._base import packages
from mpicoll._launch.find import installations
from mpicoll.errors import LaunchError


def test_the_advice_names_each_command(tmp_path: Path) -> None:
    library = tmp_path / "x86_64-linux-gnu" / "libmpich.so.12"
    pattern = str(tmp_path / "*" / library.name)
    for environ in ({}, {"MPI4PY_LIBMPI": str(library)}):
        assert packages.advice_of_debian(environ, pattern) == ""  # not installed
    library.parent.mkdir()
    library.touch()
    for environ in ({}, {"MPI4PY_LIBMPI": str(library)}):
        text = packages.advice_of_debian(environ, pattern)
        assert f"ln -sf {library} " in text
        assert "export LD_LIBRARY_PATH=" in text
    assert packages.advice_of_debian({"MPI4PY_LIBMPI": "/opt/lib/libmpi.so.40"}, pattern) == ""  # another one is asked for


def test_a_library_that_cannot_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As mpi4py 4.1.2 says it of MPICH 4.0.2 of Debian 12. The message gave no way to load it."""
    library = tmp_path / "libmpich.so.12"
    library.touch()
    monkeypatch.setattr(
        installations, "probe", lambda *_: {"error": "ImportError: libmpi.so.12: cannot open shared object file: No such file"}
    )
    with pytest.raises(
        LaunchError, match=r"cannot load the MPI library .*libmpich\.so\.12 .*\n.*works under another name(.*\n)*.*ln -sf"
    ):
        installations.find_mpi(None, {"MPI4PY_LIBMPI": str(library)})

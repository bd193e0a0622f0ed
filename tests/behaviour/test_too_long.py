"""A message that is longer than the tensor that should receive it: an error, and not one byte beyond the tensor (trap 16).

Note [Messages that are too long] in mpicoll/_mpi/open_mpi.py says when Open MPI would write there.
"""

import sys

import pytest

from mpicoll._base import open_mpi_settings
from tests.support import is_open_mpi, launch, run

SCRIPT = "tests/behaviour/scripts/too_long.py"
pytestmark = [pytest.mark.launch, pytest.mark.timeout(120)]


def all_refused(stdout: str, matched_first: bool) -> bool:
    """Whether both ranks came to their end, and received in this way; wherever on a line they say so."""
    said = [f"rank {rank}: all refused, matched first: {matched_first and is_open_mpi()}" for rank in range(2)]
    return [stdout.count(words) for words in said] == [1, 1]


TCP = {"OMPI_MCA_btl": "tcp,self"}  # as between two hosts
open_mpi_only = pytest.mark.skipif(not is_open_mpi(), reason="Open MPI's transports are chosen by its own variables")


@pytest.mark.parametrize(
    ("first", "environ"),
    [
        pytest.param("mpicoll", {}, id="mpicoll"),
        pytest.param("mpi4py torch", {}, id="mpi4py", marks=pytest.mark.slow),
        pytest.param("first mpi4py", {}, id="torch, then mpi4py", marks=pytest.mark.slow),
        pytest.param("mpicoll", TCP, id="mpicoll over TCP", marks=open_mpi_only),
        pytest.param("mpi4py", TCP, id="mpi4py over TCP", marks=(open_mpi_only, pytest.mark.slow)),
    ],
)
def test_under_plain_mpiexec(first: str, environ: dict[str, str]) -> None:
    """Whoever starts MPI: mpicoll with its settings, or mpi4py without them.

    `import torch` sets the variables in a rank, so that they count for whoever starts MPI (Lightning's MPIEnvironment).
    """
    result = launch(2, SCRIPT, *first.split(), timeout_s=90, env=environ, fresh="mpi4py" in first)
    assert result.returncode == 0, result.stderr
    assert all_refused(result.stdout, matched_first=first.startswith("mpi4py")), result.stdout


def test_under_mpicoll_run() -> None:
    """The settings are in the launcher's environment, so that they count for mpi4py too."""
    result = run([sys.executable, "-m", "mpicoll.run", "--quiet", "-n", "2", SCRIPT, "mpi4py"], timeout_s=90)
    assert result.returncode == 0, result.stderr
    assert all_refused(result.stdout, matched_first=False), result.stdout


@pytest.mark.parametrize(("name", "value"), [("OMPI_MCA_smsc", "cma"), ("OMPI_MCA_btl_tcp_flags", "send,put,inplace")])
@open_mpi_only
def test_a_value_of_the_users(name: str, value: str) -> None:
    """It is kept, and receives match first."""
    assert name in open_mpi_settings.ALWAYS
    result = launch(2, SCRIPT, "mpicoll", timeout_s=90, env={name: value})
    assert result.returncode == 0, result.stderr
    assert all_refused(result.stdout, matched_first=True), result.stdout


@pytest.mark.timeout(170)
def test_what_messages_promise_holds_where_receives_match_first() -> None:
    """Order, tags, any source, dropped handles, groups: the tests of messages, with settings of the user's that let Open MPI
    write beyond a receive."""
    options = ("-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider")
    user = dict.fromkeys(open_mpi_settings.ALWAYS, "")
    user |= {"OMPI_MCA_btl_self_flags": "send,put,get,inplace", "OMPI_MCA_btl_tcp_flags": "send,put,inplace"}
    result = launch(
        3,
        *options,
        "tests/api/test_p2p.py",
        "tests/api/test_gathers.py",
        "tests/engine/test_work.py::test_dropped_works_are_harmless",
        "tests/behaviour/test_random_operations.py",
        timeout_s=150,
        env={**user, "OMPI_MCA_btl_vader_single_copy_mechanism": "cma"},
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout, result.stdout

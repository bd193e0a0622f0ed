"""Hugging Face Accelerate chooses a backend by is_mpi_available(): "mpi" in the ranks of an MPI launcher, gloo elsewhere.

Every way of starting is tried with mpicoll and, for comparison, with ``TORCH_DEVICE_BACKEND_AUTOLOAD=0``, where torch does not
load it: the processes, their backend and the losses must be what they are there, but for mpirun, where MPI carries the job.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import free_port
from tests.support.jobs import OVER_MPI, attempt, command
from tests.support.jobs import reports as lines

SCRIPT = str(Path(__file__).parent / "scripts" / "accelerate_train.py")
# Jobs to compare with. Their processes leave by os._exit; with mpicoll they end as programs do.
WITHOUT = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
HUNG_S = 60  # seconds; a job imports torch and Accelerate up to three times, which takes 5 to 10

COMMANDS = {
    "python": [sys.executable, SCRIPT, "--debug"],
    "torchrun": command("torchrun", SCRIPT),
    "accelerate launch": [
        *(sys.executable, "-m", "accelerate.commands.launch"),
        *("--cpu", "--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", SCRIPT),
    ],
    "mpirun": command("mpirun", SCRIPT),
    "mpicoll.run": command("mpicoll.run", SCRIPT),
}

pytestmark = [pytest.mark.launch, pytest.mark.timeout(200)]


def reports(by: str, **env: str) -> dict[str, list[dict[str, Any]]]:
    """What the processes of one job have printed, by rank, for each name."""
    found: dict[str, list[dict[str, Any]]] = {}
    for report in lines(attempt(COMMANDS[by], HUNG_S, **env)):
        found.setdefault(report["name"], []).append(report)
    return found


def trained(found: Sequence[dict[str, Any]], size: int, backend: str | None, losses: Sequence[float], mpicoll: bool) -> None:
    """Checks one job: its processes, its backend, and its losses against those of one process."""
    assert [report["rank"] for report in found] == list(range(size)), found
    for report in found:
        assert (report["size"], report["backend"], report["mpicoll"]) == (size, backend, mpicoll), report
        assert report["gathered"] == list(range(size)), report
        assert report["reduced"] == [size * (size + 1) / 2], report
        assert report["losses"] == pytest.approx(losses, rel=1e-5), report


@pytest.fixture(scope="module")
def losses() -> list[float]:
    """Of one process without mpicoll; debug_launcher's two, without it, have the same."""
    found = reports("python", **WITHOUT)
    expected: list[float] = found["script"][0]["losses"]
    assert len(expected) == 3
    assert expected[-1] < expected[0]
    trained(found["script"], 1, None, expected, mpicoll=False)
    trained(found["debug_launcher"], 2, "gloo", expected, mpicoll=False)
    return expected


def test_plain_python_and_debug_launcher(losses: list[float]) -> None:
    found = reports("python")
    trained(found["script"], 1, None, losses, mpicoll=True)
    trained(found["debug_launcher"], 2, "gloo", losses, mpicoll=True)


@pytest.mark.slow
def test_torchrun_stays_on_gloo(losses: list[float]) -> None:
    trained(reports("torchrun")["script"], 2, "gloo", losses, mpicoll=True)


def test_accelerate_launch(losses: list[float]) -> None:
    trained(reports("accelerate launch")["script"], 1, None, losses, mpicoll=True)


@pytest.mark.parametrize("by", OVER_MPI)
def test_ranks_of_mpi_run_on_mpicoll(by: str, losses: list[float]) -> None:
    trained(reports(by)["script"], 2, "mpi", losses, mpicoll=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("by", "size", "backend"), [("torchrun", 2, "gloo"), ("accelerate launch", 1, None), ("mpirun", 2, "gloo")]
)
def test_without_mpicoll(by: str, size: int, backend: str | None, losses: list[float]) -> None:
    # nobody tells gloo under mpirun where to meet
    found = reports(by, **WITHOUT, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    trained(found["script"], size, backend, losses, mpicoll=False)

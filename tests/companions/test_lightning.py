"""What Lightning decides by itself: its backend, and that FSDP needs a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.jobs import attempt, command, same_training, trained

SCRIPT = str(Path(__file__).parent / "scripts" / "lightning_ddp.py")
HUNG_S = 100  # seconds; a job takes 10 to 30

pytestmark = [pytest.mark.companion, pytest.mark.launch, pytest.mark.timeout(2 * HUNG_S + 20)]


def test_strategy_ddp_stays_on_gloo_under_mpirun() -> None:
    """Lightning picks the backend by the device (``_get_default_process_group_backend_for_device``), not by what is available."""
    expected = trained("torchrun", SCRIPT, "ddp", timeout_s=HUNG_S)
    same_training(trained("mpirun", SCRIPT, "ddp", timeout_s=HUNG_S), expected, "gloo")


def test_strategy_ddp_takes_the_default_backend_of_the_job() -> None:
    """``mpicoll run --backend mpi`` sets this variable; Lightning reads torch's table of default backends."""
    expected = trained("torchrun", SCRIPT, "ddp", timeout_s=HUNG_S)
    found = trained("mpirun", SCRIPT, "ddp", timeout_s=HUNG_S, env=(("MPICOLL_BACKEND", "mpi"),))
    same_training(found, expected, "mpi")


def test_fsdp_refuses_cpus_in_words_of_lightning() -> None:
    done = attempt(command("mpirun", SCRIPT, "fsdp"), HUNG_S)
    assert done.returncode != 0, done.stdout
    assert "The strategy `fsdp` requires a GPU accelerator" in done.stderr, done.stderr

"""What Lightning decides by itself: its backend, who numbers its ranks, and that FSDP needs a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.jobs import attempt, command, same_training, trained

SCRIPT = str(Path(__file__).parent / "scripts" / "lightning_ddp.py")
HUNG_S = 100  # seconds; a job takes 10 to 30

# Slurm sets this in a batch script, and ranks of mpirun inherit it. Around mpirun it is not set: Open MPI would ask Slurm for its
# hosts.
IN_SLURM = """
import os, sys
os.environ.update(SLURM_NTASKS="2", SLURM_NTASKS_PER_NODE="2", SLURM_PROCID="0", SLURM_LOCALID="0", SLURM_NODEID="0")
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import MPIEnvironment
for plugins in [], [MPIEnvironment()]:
    trainer = Trainer(accelerator="cpu", devices=2, strategy="ddp", plugins=plugins, logger=False)
    sys.stdout.write(f"by {type(trainer.strategy.cluster_environment).__name__}\\n")
"""

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


def test_ranks_are_numbered_by_slurm_unless_the_program_says_mpi() -> None:
    done = attempt(command("mpirun", "-c", IN_SLURM), HUNG_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("by SLURMEnvironment\n") == done.stdout.count("by MPIEnvironment\n") == 2, done.stdout

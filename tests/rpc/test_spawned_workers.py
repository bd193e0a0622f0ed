"""PyTorch's examples for RPC start their workers themselves: by mp.spawn, some several times, or as a child of each rank."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support import LAUNCH_ENVIRONMENT, is_open_mpi, run
from tests.support.jobs import OVER_MPI, command

SCRIPT = str(Path(__file__).parent / "scripts" / "spawned_workers.py")
HUNG_S = 60  # seconds; 10 on two free cores
TRAINED = "4.0, then [0.5, 0.5]"

pytestmark = [pytest.mark.launch, pytest.mark.timeout(HUNG_S + 20)]


def test_a_program_spawns_workers_twice() -> None:
    done = run([sys.executable, SCRIPT, "rounds"], timeout_s=HUNG_S, env=LAUNCH_ENVIRONMENT)
    assert done.stdout.splitlines() == [f"first: {TRAINED}", f"second: {TRAINED}"], done.stdout + done.stderr
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("by", OVER_MPI)
def test_a_child_of_each_rank_is_the_worker(by: str) -> None:
    """With MPICH the start method closes the child's connection to mpiexec, and the child says so."""
    done = run(command(by, SCRIPT, "children"), timeout_s=HUNG_S, env=LAUNCH_ENVIRONMENT)
    if is_open_mpi():
        assert f"child: {TRAINED}" in done.stdout, done.stdout + done.stderr
        assert done.returncode == 0, done.stderr
    else:
        assert "multiprocessing's start method 'spawn' closes it" in done.stderr, done.stdout + done.stderr
        assert done.returncode == 1, done.stderr

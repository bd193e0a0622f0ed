"""MPI has no communicator left: the error names the remedy, which helps."""

import pytest

from tests.support import launch

pytestmark = [pytest.mark.launch, pytest.mark.timeout(90)]


def test_init_process_group_and_init_rpc_with_no_communicator_left() -> None:
    done = launch(2, "tests/mpi/scripts/no_communicator.py", timeout_s=60)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout.splitlines()
    for operation in ("init_process_group", "init_rpc"):
        refusals = [line for line in said if line.startswith(f"refused: {operation}: MPI could not make the communicator: ")]
        assert len(refusals) == 2, done.stdout
        assert all("destroy groups that you no longer need" in line for line in refusals), done.stdout
    assert said.count("then 3.0") == 2, done.stdout

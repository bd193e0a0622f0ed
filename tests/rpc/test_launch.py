"""init_rpc in processes that no launcher started."""

from __future__ import annotations

import sys

import pytest

from tests.support import LAUNCH_ENVIRONMENT, run

pytestmark = pytest.mark.launch


@pytest.mark.parametrize(
    ("arguments", "ranks"), [("world_size=4", 4), ("world_size=4, rank=1", 4), ("rank=2", 3)], ids=["size", "both", "rank"]
)
def test_several_workers_without_a_launcher(arguments: str, ranks: int) -> None:
    code = f"from mpicoll import rpc; rpc.init_rpc('worker', {arguments})"
    done = run([sys.executable, "-c", code], env=dict(LAUNCH_ENVIRONMENT))
    assert done.returncode == 1
    assert f"LaunchError: init_rpc: {arguments.split(',')[0]} asks for {ranks} ranks, but no MPI launcher" in done.stderr
    assert f"python -m mpicoll.run -n {ranks} script.py" in done.stderr


def test_one_worker_without_a_launcher() -> None:
    code = "from mpicoll import rpc; rpc.init_rpc('me', rank=0); print(rpc.rpc_sync('me', abs, (-3,))); rpc.shutdown()"
    done = run([sys.executable, "-c", code], env=dict(LAUNCH_ENVIRONMENT))
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "3", "")

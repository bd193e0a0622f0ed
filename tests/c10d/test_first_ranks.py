"""A world of MPI's first ranks, which meet at the store that the program names; RPC goes on over all of them."""

import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from mpicoll import LaunchError
from mpicoll._c10d import requested_ranks
from tests.launch.jobs import run
from tests.support import ROOT, free_port, launch

SCRIPT = str(ROOT / "tests" / "c10d" / "scripts" / "first_ranks.py")
SECOND: Any = SimpleNamespace(rank=1, size=4)
TWO: dict[str, Any] = {"rank": 1, "world_size": 2}
TCP = {"init_method": "tcp://localhost:1"}


@pytest.mark.parametrize(
    ("arguments", "environ"),
    [
        ({**TWO, **TCP}, {"WORLD_SIZE": "2"}),  # what an outer torchrun has left, by way of the program's arguments
        ({"rank": 1, "world_size": 4, **TCP}, {}),
        ({"rank": 1, "world_size": 8, **TCP}, {}),
        ({"world_size": 2, **TCP}, {}),
        ({"rank": 1, **TCP}, {}),
        ({"rank": -1, "world_size": -1}, {}),
    ],
)
def test_not_asked_for(arguments: dict[str, Any], environ: dict[str, str]) -> None:
    assert requested_ranks.meet_first(arguments, SECOND, environ) == arguments


@pytest.mark.parametrize("more", [{}, {"init_method": "env://"}, {"init_method": "mpi://"}, {**TCP, "rank": 0}])
def test_no_place_to_meet_or_another_rank(more: dict[str, Any]) -> None:
    with pytest.raises(LaunchError, match=r"this is rank 1 of 4 in MPI\. .* a place where they can meet: init_method='tcp://"):
        requested_ranks.meet_first({**TWO, **more}, SECOND, {"WORLD_SIZE": "4"})


def test_a_rank_that_does_not_come() -> None:
    arguments = {"rank": 1, "world_size": 3, "store": dist.HashStore(), "timeout": datetime.timedelta(seconds=1)}
    with pytest.raises(LaunchError, match="rank 0, 2 has not come within 1 s"):
        requested_ranks.meet_first(arguments, SECOND, {})


ALONE = """
import torch.distributed as dist
from mpicoll._base import launcher
if launcher.detect().rank == 0:
    dist.init_process_group("mpi", rank=0, world_size=1)
"""


@pytest.mark.launch
def test_one_rank_of_a_job_alone_is_refused_before_mpi_starts(tmp_path: Path) -> None:
    """It waited in MPI_Init for the other ranks, which end without MPI."""
    done = run(tmp_path, "-n", "2", "-c", ALONE, OMP_NUM_THREADS="1")
    assert done.returncode != 0
    for words in ("rank 0 of 2", "started 2 ranks, and MPI starts on all of them together"):
        assert words in done.stderr, done.stderr


@pytest.mark.launch
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("case", "ranks"), [("tutorial", 4), ("rpc_first", 3), ("fails", 4)])
def test_a_job(case: str, ranks: int) -> None:
    done = launch(ranks, SCRIPT, case, str(free_port()), timeout_s=280)
    said = done.stdout + done.stderr
    if case == "fails":
        assert done.returncode != 0, said
        assert "ZeroDivisionError: on purpose" in done.stderr, said
        assert "rank 1 of 4" in done.stderr, said
        return
    assert done.returncode == 0, said
    assert done.stdout.count("is well") == ranks, said
    assert "is ignored" not in done.stderr, said

"""A world of some of MPI's ranks, which meet at the store that they were given; RPC goes on over all of them."""

import datetime
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mpicoll import LaunchError
from mpicoll._c10d import requested_ranks
from tests.support import ROOT, free_port, launch

SCRIPT = str(ROOT / "tests" / "c10d" / "scripts" / "some_ranks.py")
TWO: dict[str, Any] = {"rank": 1, "world_size": 2}
TCP = {"init_method": "tcp://localhost:1"}


@pytest.mark.parametrize(
    ("arguments", "environ", "expected"),
    [
        ({**TWO, **TCP}, {"WORLD_SIZE": "4"}, True),
        ({**TWO, "init_method": "file:///tmp/x"}, {}, True),
        ({**TWO, "store": dist.HashStore()}, {}, True),
        ({**TWO, **TCP}, {"WORLD_SIZE": "2"}, False),  # what an outer torchrun has left, by way of the program's arguments
        ({"rank": 1, "world_size": 4, **TCP}, {}, False),
        ({"rank": 1, "world_size": 8, **TCP}, {}, False),
        ({"world_size": 2, **TCP}, {}, False),
        ({"rank": 1, **TCP}, {}, False),
        ({"rank": -1, "world_size": -1}, {}, False),
        ({}, {}, False),
    ],
)
def test_asked_for(arguments: dict[str, Any], environ: dict[str, str], expected: bool) -> None:
    assert requested_ranks.asks_for_some(arguments, 4, environ) is expected


def test_a_rank_beyond_the_world() -> None:
    with pytest.raises(ValueError, match="rank=2 with world_size=2"):
        requested_ranks.asks_for_some({"rank": 2, "world_size": 2, **TCP}, 4, {})


def test_a_member_that_does_not_come() -> None:
    second = datetime.timedelta(seconds=1)
    with pytest.raises(LaunchError, match=r"rank 0, 2 has not come to the store within 1 s"):
        requested_ranks._exchange(dist.HashStore(), 1, 3, 7, second)


def test_two_processes_of_one_rank() -> None:
    store = dist.HashStore()
    store.add("0/1/claimed", 1)
    with pytest.raises(LaunchError, match="two processes have come as rank 1 of a world of 3"):
        requested_ranks._exchange(store, 1, 3, 7, datetime.timedelta(seconds=1))


@pytest.mark.launch
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("case", "ranks"), [("tutorial", 4), ("rpc_first", 3), ("again", 3), ("store", 3), ("nowhere", 4), ("fails", 4)]
)
def test_a_job(case: str, ranks: int, tmp_path: Path) -> None:
    done = launch(ranks, SCRIPT, case, str(tmp_path if case == "again" else free_port()), timeout_s=280)
    said = done.stdout + done.stderr
    if case == "fails":
        assert done.returncode != 0, said
        assert "ZeroDivisionError: on purpose" in done.stderr, said
        assert "rank 1 of 4" in done.stderr, said
        return
    assert done.returncode == 0, said
    assert done.stdout.count("is well") == ranks, said
    assert "is ignored" not in done.stderr, said

"""The ranks that a call of init_process_group names: never a world of one for a program that means several."""

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mpicoll._c10d.requested_ranks import unified
from tests.support import LAUNCH_ENVIRONMENT, agree, everyone, free_port, launch, run

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"backend": "mpi"}, {"backend": "mpi"}),
        ({"rank": 0, "world_size": 0}, {}),
        ({"rank": 1, "world_size": 0}, {"rank": 1, "world_size": 0}),
        ({"rank": 0, "world_size": 1}, {"rank": 0, "world_size": 1}),
        (
            {"init_method": "tcp://a:1?rank=1&world_size=4", "rank": -1},
            {"init_method": "tcp://a:1", "rank": 1, "world_size": 4},
        ),
        ({"init_method": "tcp://a:1?use_libuv=0&rank=1"}, {"init_method": "tcp://a:1?use_libuv=0", "rank": 1}),
        ({"init_method": "file:///tmp/x?world_size=4"}, {"init_method": "file:///tmp/x", "world_size": 4}),
        # torch's complaint: named twice, or no numbers
        ({"init_method": "tcp://a:1?rank=1", "rank": 1}, {"init_method": "tcp://a:1?rank=1", "rank": 1}),
        ({"init_method": "tcp://a:1?rank=x"}, {"init_method": "tcp://a:1?rank=x"}),
        ({"init_method": 7}, {"init_method": 7}),
    ],
)
def test_unified(arguments: dict[str, Any], expected: dict[str, Any]) -> None:
    assert unified(arguments) == expected


@pytest.mark.launch
@pytest.mark.timeout(120)
def test_spawned_processes_are_no_ranks() -> None:
    """trap 76: mp.spawn with rank and world_size, which gave worlds of one rank."""
    done = run([sys.executable, str(SCRIPTS / "spawned.py")], timeout_s=90, env=LAUNCH_ENVIRONMENT)
    said = f"status {done.returncode}\nstdout:\n{done.stdout}\nstderr:\n{done.stderr}"
    assert done.returncode == 0, said
    lines = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    for rank in (0, 1):
        assert lines.pop(f"{rank} tutorial") == "a world of 1", said
        for name, source in [
            ("environment", "WORLD_SIZE=2"),
            ("arguments", "init_process_group: world_size=2"),
            ("url", "init_process_group: world_size=2"),
            ("scheme", "init_process_group: world_size=2"),
            ("mpicoll", "init_process_group: world_size=2"),
            ("environment again", "WORLD_SIZE=2"),
        ]:
            text = lines.pop(f"{rank} {name}")
            assert text.startswith(f"LaunchError: {source} asks for 2 ranks, but no MPI launcher started this process"), said
            assert "`python -m mpicoll.run -n 2 script.py`" in text, said
            assert "mpicoll.spawn(function, args, nprocs=2)" in text, said
    assert not lines, said


@pytest.mark.launch
def test_a_rank_alone_names_several() -> None:
    """As `srun -n 1` and mp.spawn inside would."""
    done = launch(1, "-c", "import torch.distributed as d; d.init_process_group('mpi', rank=1, world_size=4)")
    assert done.returncode != 0
    assert "LaunchError: init_process_group: world_size=4 asks for 4 ranks, but the launcher" in done.stderr, done.stderr


@pytest.mark.usefixtures("no_world")
@pytest.mark.parametrize("form", ["tutorial", "url"])
def test_taken_without_a_warning(rank: int, size: int, form: str) -> None:
    port = everyone(free_port())[0]
    url = f"tcp://127.0.0.1:{port}?rank={rank}&world_size={size}"
    arguments: dict[str, Any] = {"rank": 0, "world_size": 0} if form == "tutorial" else {"init_method": url}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dist.init_process_group("mpi", **arguments)
    texts = [str(w.message) for w in caught if "init_process_group" in str(w.message)]
    agree(not texts and (dist.get_rank(), dist.get_world_size()) == (rank, size), texts)

"""The ranks that a call of init_process_group names: never a world of one for a program that means several."""

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mpicoll import LaunchError
from mpicoll._c10d.requested_ranks import OF_SOME_RANKS, unified
from mpicoll._mpi import runtime
from tests.launch import jobs
from tests.support import LAUNCH_ENVIRONMENT, agree, everyone, free_port, launch, run

SCRIPTS = Path(__file__).parent / "scripts"


def refuse_contradictions(arguments: dict[str, Any], environ: dict[str, str], **truth: int) -> None:
    for name, number in truth.items():
        runtime.refuse_contradiction("init_process_group", name, arguments.get(name), number, OF_SOME_RANKS, environ)


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


@pytest.mark.parametrize(
    ("arguments", "environ"),
    [
        ({"rank": 1, "world_size": 4}, {}),
        ({"rank": -1, "world_size": None}, {}),
        ({"rank": 1, "world_size": 2}, {"WORLD_SIZE": "2"}),  # what an outer torchrun has left, by way of the program's arguments
        ({"rank": 0, "world_size": 2}, {"RANK": "0", "WORLD_SIZE": "2"}),
    ],
)
def test_not_refused(arguments: dict[str, Any], environ: dict[str, str]) -> None:
    refuse_contradictions(arguments, environ, rank=1, world_size=4)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ({"rank": 1, "world_size": 2, "init_method": "tcp://localhost:1"}, "world_size=2, but MPI says 4"),
        ({"world_size": 8}, "world_size=8, but MPI says 4"),
        ({"rank": 0, "world_size": 1}, "rank=0, but MPI says 1"),
        ({"rank": 0}, "rank=0, but MPI says 1"),
    ],
)
def test_refused(arguments: dict[str, Any], what: str) -> None:
    remedy = r"Leave out rank .* new_group\(\[\.\.\.\]\) .*\(comm=\.\.\.\)"
    with pytest.raises(LaunchError, match=rf"^init_process_group: {what}\. {remedy}$"):
        refuse_contradictions(arguments, {"RANK": "1", "WORLD_SIZE": "4"}, rank=1, world_size=4)


SOME = """
import torch.distributed as dist
from mpicoll._base import launcher
if launcher.detect().rank == 0:
    dist.init_process_group("mpi", rank=0, world_size=1)
"""


@pytest.mark.launch
def test_some_ranks_alone_are_refused_before_mpi_starts(tmp_path: Path) -> None:
    """They waited in MPI_Init for the other ranks, which end without MPI."""
    done = jobs.run(tmp_path, "-n", "2", "-c", SOME, OMP_NUM_THREADS="1")
    assert done.returncode != 0
    assert "rank 0 of 2" in done.stderr, done.stderr
    assert "world_size=1, but MPI says 2" in done.stderr, done.stderr


@pytest.mark.launch
@pytest.mark.timeout(120)
def test_spawned_processes_are_no_ranks() -> None:
    """trap 76: mp.spawn with rank and world_size, and nothing to meet at, which gave worlds of one rank."""
    done = run([sys.executable, str(SCRIPTS / "spawned.py")], timeout_s=90, env=LAUNCH_ENVIRONMENT)
    said = f"status {done.returncode}\nstdout:\n{done.stdout}\nstderr:\n{done.stderr}"
    assert done.returncode == 0, said
    lines = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    for rank in (0, 1):
        assert lines.pop(f"{rank} tutorial") == "a world of 1", said
        for name, source in [
            ("environment", "WORLD_SIZE=2"),
            ("arguments", "init_process_group: world_size=2"),
            ("scheme", "init_process_group: world_size=2"),
            ("mpicoll", "init_process_group: world_size=2"),
            ("environment again", "WORLD_SIZE=2"),
        ]:
            text = lines.pop(f"{rank} {name}")
            assert text.startswith(f"LaunchError: {source} asks for 2 ranks, but no MPI launcher started this process"), said
            assert "`python -m mpicoll.run -n 2 script.py`" in text, said
            assert "a place to meet: a store, an init_method, or MASTER_ADDR and MASTER_PORT" in text, said
    assert not lines, said


@pytest.mark.launch
def test_a_rank_alone_names_several() -> None:
    """As `srun -n 1` and mp.spawn inside would."""
    done = launch(1, "-c", "import torch.distributed as d; d.init_process_group('mpi', rank=1, world_size=4)")
    assert done.returncode != 0
    assert "LaunchError: init_process_group: world_size=4 asks for 4 ranks, but the launcher" in done.stderr, done.stderr


@pytest.mark.usefixtures("no_world")
@pytest.mark.parametrize("backend", ["mpi", "cpu:mpi", "gloo"])
def test_other_numbers_than_those_of_mpi(rank: int, size: int, backend: str) -> None:
    """Refused on all ranks, and the next call works."""
    method = "mpi://" if backend == "gloo" else None
    for wrong in ({"rank": rank + size}, {"rank": rank + 1, "world_size": size}, {"world_size": 1 if size > 1 else 0}):
        with pytest.raises(LaunchError, match="init_process_group: "):
            dist.init_process_group(backend, init_method=method, **wrong)
    dist.init_process_group(backend, init_method=method)
    agree((dist.get_rank(), dist.get_world_size()) == (rank, size))


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

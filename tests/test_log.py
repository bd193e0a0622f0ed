"""What mpicoll logs, when, and where to."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

import mpicoll._log as log
from mpicoll import _config
from mpicoll._device import consensus
from mpicoll._device.consensus import DeviceChoices
from tests.support import agree, launch

JOB = """
import torch, mpicoll as dist
dist.init_process_group()
small, large, half = torch.ones(2), torch.ones(1 << 22), torch.ones(1 << 20, dtype=torch.bfloat16)
for i in range(3):
    dist.all_reduce(small); dist.all_reduce(large); dist.all_reduce(half); dist.broadcast(large, 0)
    dist.all_reduce(torch.ones(4, dtype=torch.bool), dist.ReduceOp.MAX)
    dist.all_to_all_single(torch.empty(2 * dist.get_world_size()), torch.ones(2 * dist.get_world_size()))
dist.destroy_process_group()
dist.init_process_group()
dist.destroy_process_group()
"""


def job(tmp_path: Path, ranks: int = 2, **environ: str) -> list[str]:
    """What the job prints to standard error, line by line."""
    (tmp_path / "job.py").write_text(JOB)
    done = launch(ranks, str(tmp_path / "job.py"), env=environ)
    assert done.returncode == 0, done.stderr
    return [line for line in done.stderr.splitlines() if "mpicoll" in line]


@pytest.mark.launch
def test_nothing_is_printed_by_default(tmp_path: Path) -> None:
    assert job(tmp_path) == []


@pytest.mark.launch
def test_info_is_one_line_of_rank_0_for_each_world(tmp_path: Path) -> None:
    lines = job(tmp_path, MPICOLL_LOG="INFO")
    assert len(lines) == 2, lines  # the job makes two worlds
    assert re.fullmatch(
        r"mpicoll rank 0: (Open MPI|MPICH) [0-9.]+, MPI_THREAD_MULTIPLE; started by (openmpi|hydra); 2 ranks on 1 node"
        r"(, more ranks than cores)?; no rank has a GPU",
        lines[0],
    ), lines


@pytest.mark.launch
def test_debug_is_one_line_for_each_algorithm_of_an_operation(tmp_path: Path) -> None:
    lines = job(tmp_path, MPICOLL_LOG="debug", MPICOLL_WINDOW_FROM="1000000")
    for rank in (0, 1):
        said = [line for line in lines if line.startswith(f"mpicoll rank {rank}: group")]
        where = re.escape(f"(rank {rank} of 2): ")
        assert sum("one MPI call below so many bytes" in line for line in said) == 2
        for expected in (
            "all_reduce of 16777216 bytes: shared memory",
            "broadcast of 16777216 bytes: shared memory",
            "all_reduce of 4 bytes: MPI's own, as .*",
            "all_to_all of 16 bytes: .*",
        ):
            assert sum(bool(re.search(f"{where}{expected}$", line)) for line in said) == 1, (expected, said)


@pytest.mark.launch
def test_two_nodes_are_told(tmp_path: Path) -> None:
    lines = job(tmp_path, ranks=4, MPICOLL_LOG="debug", MPICOLL_NODE_SIZE="2")
    assert "4 ranks on 2 nodes" in lines[0] or any("4 ranks on 2 nodes" in line for line in lines)
    assert any("all_reduce of 16777216 bytes: shared memory in each node, MPI between nodes" in line for line in lines), lines


@pytest.mark.launch
def test_a_wrong_level_is_a_warning_and_the_job_runs(tmp_path: Path) -> None:
    lines = job(tmp_path, MPICOLL_LOG="loud")
    assert any("MPICOLL_LOG='loud' is not allowed; use one of info, debug" in line for line in lines), lines


def test_the_level() -> None:
    assert log.wanted_level({}) is None
    assert log.wanted_level({"MPICOLL_LOG": "info"}) == logging.INFO
    assert log.wanted_level({"MPICOLL_LOG": "DEBUG"}) == logging.DEBUG
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert log.wanted_level({"MPICOLL_LOG": "2"}) is None
    assert "use one of info, debug" in str(caught[0].message)
    assert _config.problems({"MPICOLL_LOG": "2"})


def test_a_library_adds_no_handler_that_prints() -> None:
    (handler,) = [handler for handler in log.logger.handlers if type(handler) is logging.NullHandler]
    assert log.logger.name == "mpicoll"
    assert handler is not None


@pytest.fixture
def records(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """A program's own logging, set to DEBUG, without MPICOLL_LOG."""
    with caplog.at_level(logging.DEBUG, logger="mpicoll"):
        yield caplog


def test_an_algorithm_is_logged_once(records: pytest.LogCaptureFixture) -> None:
    algorithms = log.Algorithms("g", 1, 4)
    for nbytes in (8, 16):
        algorithms.took("all_reduce", "MPI's own", nbytes)
        algorithms.took("all_reduce", "shared memory", nbytes)
    assert records.messages == [
        "group 'g' (rank 1 of 4): all_reduce of 8 bytes: MPI's own",
        "group 'g' (rank 1 of 4): all_reduce of 8 bytes: shared memory",
    ]


def test_what_is_logged_later_was_not_seen_before() -> None:
    """Nothing is remembered while nobody listens: a program may turn the log on in the middle."""
    algorithms = log.Algorithms("g", 0, 1)
    algorithms.took("reduce", "MPI's own", 8)
    assert not algorithms._seen


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        (None, "no rank has a GPU"),
        (DeviceChoices(direct=True), "handed to MPI"),
        (DeviceChoices(shares=True), "by CUDA IPC within a node, and through pinned host memory"),
        (DeviceChoices(), "travels through pinned host memory"),
    ],
)
def test_the_gpu_path(choices: DeviceChoices | None, words: str) -> None:
    assert words in consensus.describe(choices)


def test_a_program_that_logs_sees_the_records(world: object, size: int, rank: int, caplog: pytest.LogCaptureFixture) -> None:
    import torch

    import mpicoll as dist

    with caplog.at_level(logging.DEBUG, logger="mpicoll"):
        group = dist.new_group(list(range(size)))
        dist.broadcast(torch.ones(1 << 20), 0, group=group)
        dist.destroy_process_group(group)
    said = [message for message in caplog.messages if message.startswith("group ")]
    agree(len(said) >= 1 and f"(rank {rank} of {size})" in said[0], said)

"""What mpicoll logs, when, and where to."""

import io
import logging
import logging.config
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import mpicoll as dist
from mpicoll._base import log
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
@pytest.mark.parametrize(("ranks", "node_size", "nodes"), [(2, "2", "2 ranks on 1 node"), (4, "2", "4 ranks on 2 nodes")])
def test_info_is_one_line_of_rank_0_for_each_world(ranks: int, node_size: str, nodes: str, tmp_path: Path) -> None:
    lines = job(tmp_path, ranks, MPICOLL_LOG="INFO", _MPICOLL_NODE_SIZE=node_size)
    assert len(lines) == 2, lines  # the job makes two worlds
    assert re.fullmatch(
        rf"mpicoll rank 0: (Open MPI|MPICH) [0-9.]+, MPI_THREAD_MULTIPLE; started by (openmpi|hydra); {nodes}"
        r"(, more ranks than cores)?; no rank has a GPU",
        lines[0],
    ), lines


@pytest.mark.launch
def test_debug_is_one_line_for_each_algorithm_of_an_operation(tmp_path: Path) -> None:
    lines = job(tmp_path, MPICOLL_LOG="DEBUG", MPICOLL_WINDOW_FROM="1000000")
    for rank in (0, 1):
        said = [line for line in lines if line.startswith(f"mpicoll rank {rank}: group")]
        where = re.escape(f"(rank {rank} of 2): ")
        for expected in (
            "all_reduce of 16777216 bytes: shared memory",
            "broadcast of 16777216 bytes: shared memory",
            "all_reduce of 4 bytes: MPI's own, as .*",
            "all_to_all of 16 bytes: .*",
        ):
            assert sum(bool(re.search(f"{where}{expected}$", line)) for line in said) == 1, (expected, said)


@pytest.mark.launch
def test_a_wrong_level_is_a_warning_and_the_job_runs(tmp_path: Path) -> None:
    lines = job(tmp_path, MPICOLL_LOG="loud")
    assert any("MPICOLL_LOG='loud' is not allowed; use one of info, debug" in line for line in lines), lines


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


@pytest.mark.min_ranks(2)
def test_a_program_that_logs_sees_the_records(world: object, size: int, rank: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="mpicoll"):
        group = dist.new_group(list(range(size)))
        dist.broadcast(torch.ones(1 << 20), 0, group=group)
        dist.destroy_process_group(group)
    said = [message for message in caplog.messages if message.startswith("group ")]
    agree(len(said) >= 1 and f"(rank {rank} of {size})" in said[0], said)


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root of the loggers; its handlers, and what the test has changed of the logger of mpicoll, are put back."""
    logger, ours, level = logging.getLogger(), list(log.logger.handlers), log.logger.level
    handlers = list(logger.handlers)
    yield logger
    logger.handlers[:], log.logger.handlers[:], log.logger.disabled = handlers, ours, False
    log.logger.setLevel(level)


def test_what_users_must_know_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    log.say("rank 3 is 100 % late")
    assert capsys.readouterr().err == "mpicoll: rank 3 is 100 % late\n"


def test_pytest_shows_it(caplog: pytest.LogCaptureFixture) -> None:
    log.say("rank 3 is late")
    assert caplog.record_tuples == [("mpicoll", logging.WARNING, "rank 3 is late")]


def test_a_program_that_prints_its_log_prints_it_once(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    root.addHandler(handler := logging.StreamHandler(sys.stderr))
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s %(message)s"))
    log.say("rank 3 is late")
    assert capsys.readouterr().err == "WARNING mpicoll rank 3 is late\n"
    handler.setLevel(logging.ERROR)  # it does not print warnings
    log.say("rank 4 is late")
    assert capsys.readouterr().err == "mpicoll: rank 4 is late\n"
    handler.setLevel(logging.NOTSET)
    log.logger.propagate = False  # it does not get the record
    try:
        log.say("rank 5 is late")
    finally:
        log.logger.propagate = True
    assert capsys.readouterr().err == "mpicoll: rank 5 is late\n"


def test_a_site_takes_it_elsewhere(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    log.logger.addHandler(logging.StreamHandler(file := io.StringIO()))
    log.say("rank 3 is late")
    assert file.getvalue() == "rank 3 is late\n"
    assert capsys.readouterr().err == "mpicoll: rank 3 is late\n"  # a handler for a file does not replace the terminal
    log.logger.handlers[:] = log.logger.handlers[-1:]
    log.say("rank 4 is late")
    assert (file.getvalue(), capsys.readouterr().err) == ("rank 3 is late\nrank 4 is late\n", "")
    log.logger.setLevel(logging.CRITICAL)
    log.say("rank 5 is late")
    assert (file.getvalue().count("\n"), capsys.readouterr().err) == (2, "")


def test_a_configuration_of_other_loggers_does_not_silence_it(root: logging.Logger, capsys: pytest.CaptureFixture[str]) -> None:
    logging.config.dictConfig({"version": 1, "loggers": {"another": {"level": "INFO"}}})
    assert log.logger.disabled
    log.say("rank 3 is late")
    assert capsys.readouterr().err == "mpicoll: rank 3 is late\n"

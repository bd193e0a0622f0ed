"""The scripts of benchmarks/ run and print what they are for; figures are not tested."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import footprint, plot, targets
from benchmarks.bandwidth import network_factor
from mpicoll.bench import options
from mpicoll.bench.row import API, BACKEND, GLOO, RAW, Row
from tests.support import launch

STRICT = """
import sys, torch
from benchmarks import check
limits = [check.Limit("/ MPI", lambda row: row.ratio("mpicoll", "MPI"), most) for most in (0, 1e9)]
check.CASES[:] = [check.Case("all_reduce", 8, torch.float32, ("mpicoll", "MPI"), limits)]
check.STEEP[:] = [("latency", 8, 16, 1e-9)]
sys.exit(check.main(["--quick"]))
"""
MACHINE = {"mpi": "Open MPI v5.0.11, package: a", "ranks": 2, "cores": 2, "cpu": "a processor", "torch": "2.13.0"}
THREADS = 12  # of a rank: 5 of mpicoll with RPC, and those of MPI and of torch's store
FILES = 8  # of a rank, beyond those that it has with mpi4py alone
STORE_FILES = 16  # of rank 0, and a connection of each rank
SHARED = 4 << 20  # bytes for each rank, beyond those with mpi4py alone


@pytest.mark.launch
def test_check_names_what_is_lost() -> None:
    result = launch(2, "-c", STRICT)
    assert result.returncode == 1, result.stderr
    assert re.findall("lost: .*: ", result.stdout) == [
        "lost: 8 B all_reduce float32 / MPI: ",
        "lost: 16 B latency / half of it: ",
    ]


@pytest.mark.launch
def test_steps_are_checked_and_measured(tmp_path: Path) -> None:
    file = tmp_path / "steps.json"
    words = ["--quick", "--rows", "bf16", "fsdp", "1f1b", "tensor", "--json", str(file)]
    result = launch(2, "-m", "benchmarks.steps", *words)
    assert result.returncode == 0, result.stderr
    kinds = [row["what"].split()[0] for row in json.loads(file.read_text())["rows"]]
    assert kinds == ["DDP", "FSDP2", "pipeline", "tensor"]
    assert all({BACKEND, GLOO} < set(row["ways"]) for row in json.loads(file.read_text())["rows"])


@pytest.mark.launch
def test_remote_calls_have_a_row_each() -> None:
    result = launch(2, "-m", "benchmarks.remote_calls", "--sizes", "4096", "--repeat", "1")
    assert result.returncode == 0, result.stderr
    assert re.findall(r"^ *(.*?)  +\S+ \[", result.stdout, re.M) == ["empty call", "4096 bytes", "64 in flight"], result.stdout


def measured(ranks: int, program: str, folder: Path) -> dict[str, footprint.Use]:
    files = folder / f"{program}{ranks}"
    files.mkdir()
    done = launch(ranks, "-m", "benchmarks.footprint", program, str(files), timeout_s=120)
    assert done.returncode == 0, done.stderr
    return {use.stage: use for use in footprint.summary(ranks, program, done.stdout)}


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.timeout(600)
def test_files_threads_and_shared_memory_of_eight_ranks(tmp_path: Path) -> None:
    """What a rank costs does not grow with the number of ranks, or the job grows with its square (docs/performance.md).

    The launcher of MPICH gives a rank two files for each rank before it: so only what mpi4py alone does not have counts.
    """
    few = measured(3, "mpi", tmp_path)
    many, alone = measured(8, "mpi", tmp_path), measured(8, "raw", tmp_path)
    assert [*many] == list(footprint.STAGES)
    assert [*alone] == list(footprint.STAGES[:-1])
    for stage, use in many.items():
        raw = alone.get(stage, alone["messages"])
        text = "\n".join((*footprint.HEAD, few[stage].line(), use.line(), raw.line()))
        # The poller starts with the first message that has not ended when it is posted: often, not always.
        assert abs(few[stage].threads - use.threads) <= 1, text
        assert use.threads <= THREADS, text
        assert use.files - raw.files <= FILES, text
        assert use.first_files - raw.first_files <= STORE_FILES + 8, text
        assert use.shared - raw.shared <= 8 * SHARED, text


def test_one_operation_is_drawn_over_size(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    times = {API: [1e-6, 1.2e-6], GLOO: [4e-6, 4.8e-6], RAW: [5e-7, 6e-7]}
    rows = [Row("all_reduce", nbytes, 2, times, "float32", "SUM").facts() for nbytes in (8, 1 << 20)]
    file = tmp_path / "all_reduce.svg"
    plot.draw({"machine": MACHINE, "rows": rows}, str(file))
    shown = re.findall(r"<!-- (.*) -->", file.read_text())  # matplotlib leaves each text beside its outlines
    assert "all_reduce of 1 MiB, float32: mpicoll's time is 0.25 times Gloo's, and 2 times raw MPI's" in shown
    assert {"mpicoll", "Gloo", "raw MPI", "1 MiB"} <= set(shown)


def test_targets_are_judged_and_runs_are_one_table() -> None:
    for _, command in targets.commands():
        if command.startswith("mpicoll.bench"):
            options.read(command.split()[1:])
    assert len({target.what for target in targets.TARGETS}) == len(targets.TARGETS)
    ratios = (1.4, 1.6, 1.8)
    runs = [targets.judged([Row("all_reduce", 8, 2, {API: [ratio], RAW: [1.0]}, "float32", "SUM")], MACHINE) for ratio in ratios]
    lines = targets.table(runs)
    assert lines[0] == "| what | against | at most | Open MPI 5.0.11 |  |"
    assert lines[2] == "| all_reduce, 8 B | MPI | 1.50x | **1.60x** [1.40x,1.80x] |  |"
    assert lines[3] == "| broadcast, 8 B | MPI | 1.50x | - |  |"
    assert targets.table(runs[:1])[2].endswith("| 1.40x | all_reduce float32 8 B |")


def test_the_limit_of_the_network_counts_the_bytes_of_the_busiest_card() -> None:
    assert network_factor("all_reduce", [1] * 4) == 1.5
    assert network_factor("all_reduce", [2, 2]) == 1
    assert network_factor("all_gather", [2, 2]) == 0.5
    assert network_factor("all_gather", [2, 1]) == pytest.approx(2 / 3)  # what the single rank receives
    assert network_factor("all_to_all", [2, 2]) == 1
    assert [network_factor(what, [1, 1]) for what in ("broadcast", "reduce", "barrier")] == [1, 1, 0]
    assert network_factor("all_reduce", [4]) == 0

"""The table of docs/guides/gpus.md says what the reports say: what passed, how fast it was, what was not run and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mpicoll.bench import row
from tests.gpu import table
from tests.support import pages

BYTES = str(table.NBYTES)
PASSED = {"status": 0, "seconds": 9.5, "passed": 38, "failures": []}
FAILED = {"status": 1, "seconds": 9.5, "passed": 36, "failed": 2, "failures": ["tests/gpu/real/test_matrix.py::test_all_reduce"]}
SKIPPED = {"status": 0, "passed": 37, "skipped": 1}


def path(ours: float = 10_000.0, **tests: Any) -> dict[str, Any]:
    """Of a path that was run: the microseconds of all_reduce, a quarter of them for a message; runs by number of ranks."""
    bench = {
        "latency": {"8": {row.API: 5.0}, BYTES: {row.API: ours / 4, row.COPY: 250.0, row.BUS: 500.0, row.RAW: 800.0}},
        "all_reduce": {"8": {row.API: 5.0}, BYTES: {row.API: ours, row.COPY: 250.0, "NCCL": "ranks share a GPU"}},
    }
    return {
        "tests": {"2": PASSED, "4": PASSED, **{ranks.removeprefix("on_"): run for ranks, run in tests.items()}},
        "bench": bench,
    }


def mpi(version: str, aware: bool, **paths: Any) -> dict[str, Any]:
    return {"version": version, "verdict": {"moves": aware, "evidence": ["made up"]}, "paths": paths}


def report(device: str = "cuda", **mpis: Any) -> dict[str, Any]:
    machine = {"gpu": "NVIDIA H100 80GB HBM3", "gpus": 1, "torch": "2.13.0+cu126", "cuda": "12.6"}
    return {"machine": machine, "device": device, "when": "2025-11-22", "mpis": mpis}


def cells(here: dict[str, Any]) -> list[str]:
    """Those of the row of path "ipc"."""
    made = table.row("ipc", "site", mpi("MPICH 5", False, ipc=here))
    return [cell.strip() for cell in made.split("|")[3:-1]]


def test_the_page_shows_the_reports() -> None:
    assert pages.shown(table.PAGE, table.NAME) == table.markdown(table.reports()), "run: python tests/gpu/table.py --write"


def test_the_ways_are_the_benchmarks() -> None:
    assert (table.OURS, table.COPY, table.BUS, table.HOST) == (row.API, row.COPY, row.BUS, row.RAW)


def test_without_a_report_nothing_was_run() -> None:
    rows = table.markdown([]).removeprefix(table.HEAD).splitlines()
    said = "| - | not run: no GPU was there | not run | not run | not run |"
    assert rows == [f"| {words} {said}" for words in table.PATHS.values()]


def test_two_mpis_by_three_paths() -> None:
    found = report(
        site=mpi("Open MPI 5.0.11", True, direct=path(4_000), ipc=path(2_000), staged=path(16_000)),
        mpich=mpi("MPICH 5.0.2", False, direct={"not run": "not CUDA-aware"}, ipc=path(2_500, on_4=FAILED), staged=path(20_000)),
    )
    aware, unaware = "Open MPI 5.0.11 (site), CUDA-aware", "MPICH 5.0.2 (mpich), not CUDA-aware"
    direct, ipc, staged = table.PATHS.values()
    assert table.markdown([found]).splitlines() == [
        "1 x NVIDIA H100 80GB HBM3, torch 2.13.0+cu126, CUDA 12.6, 2025-11-22:",
        "",
        *table.HEAD.splitlines(),
        f"| {direct} | {aware} | 38 passed | 38 passed | 268 GB/s, 80 % | 4 ms, 16x, 0.25x |",
        f"| {direct} | {unaware} | not run: not CUDA-aware | not run | not run | not run |",
        f"| {ipc} | {aware} | 38 passed | 38 passed | 537 GB/s, 160 % | 2 ms, 8x, 0.125x |",
        f"| {ipc} | {unaware} | 38 passed | **2 failed**, 36 passed | 429 GB/s, 128 % | 2.5 ms, 10x, 0.125x |",
        f"| {staged} | {aware} | 38 passed | 38 passed | 67.1 GB/s, 20 % | 16 ms, 64x, 1x |",
        f"| {staged} | {unaware} | 38 passed | 38 passed | 53.7 GB/s, 16 % | 20 ms, 80x, 1x |",
    ]


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (SKIPPED, "37 passed, 1 skipped"),
        ({"status": 0, "passed": 1, "deselected": 38}, "1 passed, 38 deselected"),  # by run.py -- -k
        ({"status": 1, "failed": 1, "errors": 2}, "**3 failed**"),
        ({"status": 1}, "**ended with status 1**"),
        ({"status": 139, "passed": 5}, "**ended with status 139**, 5 passed"),
        ({"status": 124, "failed": 1, "passed": 5}, "**1 failed**, **did not end in time**, 5 passed"),
        ({"status": 0, "failures": []}, "**none ran**"),  # an mpirun that lost its ranks may end with 0
        ({"not run": "4 ranks\nare | many"}, r"not run: 4 ranks are \| many"),
    ],
)
def test_what_became_of_the_tests(run: dict[str, Any], says: str) -> None:
    made = table.row("ipc", "site", mpi("MPICH 5", False, ipc=path(on_4=run)))
    assert f"| 38 passed | {says} |" in made


def test_what_was_not_measured() -> None:
    here = path()
    del here["tests"]["4"], here["bench"]["latency"][BYTES]
    here["bench"]["all_reduce"] = {"status": 1, "output": "AssertionError: wrong result on rank 0 of 2"}
    lacks = ["38 passed", "not run: the report has no run on 4 ranks", "not run: the report has no latency of 256 MiB"]
    assert cells(here) == [*lacks, "**ended with status 1**"]


def test_a_trial_on_the_cpu_says_nothing_of_gpus(tmp_path: Path) -> None:
    for name, device in (("cpu", "cpu"), ("h100", "cuda"), ("h200", "cuda")):
        (tmp_path / f"report-{name}.json").write_text(json.dumps({**report(device), "when": name}))
    assert [found["when"] for found in table.reports(tmp_path)] == ["h100", "h200"]

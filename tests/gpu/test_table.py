"""The table of docs/guides/gpus.md says what the reports say: what passed, how fast it was, what was not run and why."""

from typing import Any

from mpicoll.bench import row
from tests.gpu import table
from tests.support import pages

BYTES = str(table.NBYTES)
PASSED = {"status": 0, "seconds": 9.5, "passed": 38, "failures": []}
FAILED = {"status": 1, "seconds": 9.5, "passed": 36, "failed": 2, "failures": ["tests/gpu/real/test_matrix.py::test_all_reduce"]}


def path(ours: float, on_4: dict[str, Any] = PASSED) -> dict[str, Any]:
    """Of a path that was run: the microseconds of all_reduce, a quarter of them for a message."""
    bench = {
        "latency": {"8": {row.API: 5.0}, BYTES: {row.API: ours / 4, row.COPY: 250.0, row.BUS: 500.0, row.RAW: 800.0}},
        "all_reduce": {"8": {row.API: 5.0}, BYTES: {row.API: ours, row.COPY: 250.0, "NCCL": "ranks share a GPU"}},
    }
    return {"tests": {"2": PASSED, "4": on_4}, "bench": bench}


def test_the_page_shows_the_reports() -> None:
    assert pages.shown(table.PAGE, table.NAME) == table.markdown(table.reports()), "run: python tests/gpu/table.py --write"


def test_two_mpis_by_three_paths() -> None:
    unmeasured = {"tests": {"2": {"status": 124}, "4": {"status": 0}}, "bench": {"latency": {"not run": "status 1"}}}
    paths = {"direct": {"not run": "not\nCUDA-aware"}, "ipc": path(2_500.0, on_4=FAILED), "staged": unmeasured}
    mpis = {
        "site": {
            "version": "Open MPI 5.0.11", "verdict": {"moves": True},
            "paths": {"direct": path(4_000.0), "ipc": path(2_000.0), "staged": path(16_000.0)},
        },
        "mpich": {"version": "MPICH 5.0.2", "verdict": {"moves": False}, "paths": paths},
    }  # fmt: skip
    machine = {"gpu": "NVIDIA H100 80GB HBM3", "gpus": 1, "torch": "2.13.0+cu126", "cuda": "12.6"}
    aware, unaware = "Open MPI 5.0.11 (site), CUDA-aware", "MPICH 5.0.2 (mpich), not CUDA-aware"
    direct, ipc, staged = table.PATHS.values()
    assert table.markdown([{"machine": machine, "when": "2025-11-22", "mpis": mpis}]).splitlines() == [
        "1 x NVIDIA H100 80GB HBM3, torch 2.13.0+cu126, CUDA 12.6, 2025-11-22:",
        "",
        *table.HEAD.splitlines(),
        f"| {direct} | {aware} | 38 passed | 38 passed | 268 GB/s, 80 % | 4 ms, 16x, 0.25x |",
        f"| {direct} | {unaware} | not run: not CUDA-aware | not run | not run | not run |",
        f"| {ipc} | {aware} | 38 passed | 38 passed | 537 GB/s, 160 % | 2 ms, 8x, 0.125x |",
        f"| {ipc} | {unaware} | 38 passed | **2 failed**, 36 passed | 429 GB/s, 128 % | 2.5 ms, 10x, - |",
        f"| {staged} | {aware} | 38 passed | 38 passed | 67.1 GB/s, 20 % | 16 ms, 64x, 1x |",
        f"| {staged} | {unaware} | **did not end in time** | **none ran** | not run | not run |",
    ]

"""The table of docs/reference/bandwidth.md, and what makes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster import bandwidth
from tests.cluster.bandwidth import FIGURES, NAME, OPERATIONS, PAGE, nearest, over_the_limit, table
from tests.support import pages


def test_the_page_shows_the_figures() -> None:
    assert pages.shown(PAGE, NAME) == table(pages.figures(FIGURES))


def test_new_figures_stand_beside_the_old_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- bandwidth -->\n<!-- /bandwidth -->\nbehind\n")
    monkeypatch.setattr(bandwidth, "PAGE", page)
    monkeypatch.setattr(bandwidth, "FIGURES", tmp_path / "figures.json")
    row, other = (f"MPICH 5.0.2|100|2x1|broadcast|float32|{nbytes}" for nbytes in (1 << 20, 4 << 20))
    bandwidth.write({row: {"mpicoll": 2.0, "Gloo": 3.0}, other: {"mpicoll": 1.5}})
    bandwidth.write({row: {"mpicoll": 1.0}})
    assert pages.figures(tmp_path / "figures.json") == {row: {"mpicoll": 1.0, "Gloo": 3.0}, other: {"mpicoll": 1.5}}
    assert "| 1.00 / 3.00 / - | 1.50 / - / - |" in pages.shown(page, NAME)
    lines = page.read_text().splitlines()
    assert (lines[0], lines[-1]) == ("before", "behind")


def test_time_over_the_limit() -> None:
    """1 MB at 100 Mbit/s takes 80 ms. On 4 hosts an all_reduce moves 1.5 times its bytes through each card, a broadcast once."""
    ways = {"mpicoll": {"rounds_us": [240e3, 120e3, 132e3]}, "Gloo": {"rounds_us": [180e3]}, "copy": {"rounds_us": [1.0]}}
    row = {"what": "all_reduce", "bytes": 1_000_000, "ways": ways}
    assert over_the_limit(row, 100, [1, 1, 1, 1]) == {"mpicoll": 1.1, "Gloo": 1.5}
    assert over_the_limit({**row, "what": "broadcast"}, 100, [1, 1, 1, 1]) == {"mpicoll": 1.65, "Gloo": 2.25}
    assert over_the_limit(row, 1000, [2, 2]) == {"mpicoll": 16.5, "Gloo": 22.5}


def test_sizes_that_ranks_cannot_share() -> None:
    assert [nearest(nbytes, [1 << 20, 16 << 20]) for nbytes in (1048572, 1048576, 16777212)] == [1 << 20, 1 << 20, 16 << 20]


def test_rows_and_columns_of_the_table() -> None:
    figures = {
        "MPICH 5.0.2|100|2x1|broadcast|float32|1048576": {"mpicoll": 1.0},
        f"Open MPI 5.0.11|1000|4x1|{OPERATIONS[0]}|float32|4194304": {"mpicoll": 1.25, "Gloo": 2.0, "MPI": 3.0},
        f"Open MPI 5.0.11|100|4x1|{OPERATIONS[0]}|bfloat16|1048576": {"mpicoll": 1.5, "Gloo": 2.0},
    }
    assert table(figures).splitlines() == [
        "| MPI | Mbit/s | hosts x ranks | operation | 1 MiB | 4 MiB |",
        "|---|---|---|---|---|---|",
        "| Open MPI 5.0.11 | 100 | 4x1 | all_reduce, bfloat16 | 1.50 / 2.00 / - | - / - / - |",
        "| Open MPI 5.0.11 | 1000 | 4x1 | all_reduce | - / - / - | 1.25 / 2.00 / 3.00 |",
        "| MPICH 5.0.2 | 100 | 2x1 | broadcast | 1.00 / - / - | - / - / - |",
    ]

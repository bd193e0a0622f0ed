"""The pictures of bench --plot: what is in them, and what their titles say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from mpicoll.bench import plot
from mpicoll.bench.machine import Machine
from mpicoll.bench.row import API, BACKEND, GLOO, RAW, Row

MACHINE = Machine(2, "a processor", 2, 2, "Open MPI v5.0.11, package: somebody's, ident: 5", "2.13.0", "0.1.0", "3.11.7", 1)


def rows(what: str, raw: bool = True) -> list[Row]:
    found = []
    for nbytes in (8, 1 << 20):
        ours = [1e-6 * nbytes, 1.2e-6 * nbytes]
        times = {API: ours, BACKEND: ours, GLOO: [4 * second for second in ours]}
        found.append(Row(what, nbytes, 2, {**times, RAW: [second / 2 for second in ours]} if raw else times, "float32", "SUM"))
    return found


def texts(file: Path) -> list[str]:
    """An SVG's texts; matplotlib leaves each as a comment beside its outlines."""
    return re.findall(r"<!-- (.*) -->", file.read_text())


def test_one_operation_is_drawn_over_size(tmp_path: Path) -> None:
    file = tmp_path / "all_reduce.svg"
    plot.draw(rows("all_reduce"), MACHINE, str(file))
    shown = texts(file)
    assert "all_reduce of 1 MiB: mpicoll's time is 0.25 times Gloo's, and 2 times raw MPI's" in shown
    assert {"mpicoll", "Gloo", "raw MPI", "8 B", "1 MiB", "lines: median of 2 rounds; bands: least to most"} <= set(shown)
    assert "torch backend" not in shown
    again = tmp_path / "again.svg"
    plot.draw(rows("all_reduce"), MACHINE, str(again))
    assert again.read_text() == file.read_text()


def test_several_operations_are_drawn_as_ratios(tmp_path: Path) -> None:
    file = tmp_path / "all.svg"
    plot.draw([*rows("all_reduce"), *rows("broadcast"), *rows("gather", raw=False), *rows("reduce")], MACHINE, str(file))
    shown = texts(file)
    assert {"all_reduce float32 SUM", "broadcast float32 SUM", "gather float32 SUM", "reduce float32 SUM"} <= set(shown)
    assert (shown.count("Gloo"), shown.count("raw MPI")) == (4, 3)


def test_rows_without_a_size_make_no_picture(tmp_path: Path) -> None:
    file = tmp_path / "barrier.svg"
    plot.draw([Row("barrier", 0, 2, {API: [1.0]})], MACHINE, str(file))
    assert not file.exists()


def test_the_title_names_what_was_compared() -> None:
    assert plot.headline(rows("reduce", raw=False)) == "reduce of 1 MiB: mpicoll's time is 0.25 times Gloo's"
    assert plot.headline([Row("gather", 8, 2, {API: [1.0]}, "bfloat16")]) == "gather of bfloat16: time over message size"

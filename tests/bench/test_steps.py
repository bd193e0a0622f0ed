"""`bench step`: every row runs, its gradients are compared with one process, and its figures follow their definitions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mpicoll.bench import steps
from mpicoll.bench.row import BACKEND, COPIES, GLOO, Row
from mpicoll.bench.steps import catalog, models
from mpicoll.bench.steps.measure import ALONE, StepRow
from mpicoll.bench.steps.step import compare, reference, weight_bytes
from tests.support import launch

BENCH = ("-m", "mpicoll.bench", "step", "--quick")

# An implementation that communicates nothing
MUTE = """
import torch.distributed as dist
import mpicoll.bench.__main__ as bench
from mpicoll.bench.steps import measure
from mpicoll.bench.steps.step import Means
measure.Means = lambda rank, size, group, nothing: Means(rank, size, None if {mute} else group, nothing)
bench.main(["step", "--quick", "--rows", "{row}"])
"""


def step_row(ours: float, gloo: float, alone: list[float]) -> StepRow:
    rounds = len(alone)
    times = {BACKEND: [ours] * rounds, GLOO: [gloo] * rounds, ALONE: alone, COPIES: [0.1] * rounds}
    return StepRow(Row("DDP", 4, 2, times), "images", 8)


def test_every_row_has_a_name_for_the_command_line() -> None:
    assert tuple(catalog.ROWS) == steps.NAMES


@pytest.mark.parametrize("size", [2, 4])
def test_the_rows_have_names_of_their_own(size: int) -> None:
    for small in (False, True):
        names = [workload.name for workload in catalog.steps(steps.NAMES, size, small)]
        assert len(set(names)) == len(names), names


def test_gradients_are_as_large_as_the_names_say() -> None:
    assert weight_bytes(models.mlp(4 << 20)) == 4 << 20
    assert weight_bytes(models.resnet18()) == 4 * 11_689_512  # the weights of torchvision's
    norms = 2 * 2 * 2 * 512 * 4
    assert weight_bytes(models.transformer(512)) == (24 << 20) + norms


def test_exposed_communication_is_the_step_without_computation() -> None:
    row = step_row(1.5, 3.0, [1.0, 1.0, 1.0])
    assert (row.exposed(BACKEND), row.exposed(GLOO), row.exposed_ratio) == (0.5, 2.0, 0.25)
    assert row.per_second(BACKEND) == 8 / 1.5
    assert step_row(1.5, 1.0, [1.0, 1.0, 1.0]).exposed_ratio is None, "Gloo exposes nothing that could be measured"
    assert step_row(1.5, 1.2, [0.8, 1.0, 1.2]).exposed_ratio is None, "no more than computation alone varies by"


def test_a_wrong_gradient_is_named() -> None:
    task = models.transformer(128, tokens=8)
    expected = reference(task, 2)
    compare("DDP", reference(task, 2), expected, 1e-6)
    wrong = {**expected, "0.up.weight": expected["0.up.weight"] / 2}
    with pytest.raises(AssertionError, match=r"DDP: the gradient of 0\.up\.weight differs from that of one process"):
        compare("DDP", wrong, expected, 1e-3)
    lost = {**expected, "1.out.weight": torch.full_like(expected["1.out.weight"], float("nan"))}
    with pytest.raises(AssertionError, match=r"1\.out\.weight"):
        compare("DDP", lost, expected, 1e-3)


def figures(ranks: int, file: Path, *words: str) -> tuple[str, dict[str, Any]]:
    """What a run prints, and its figures."""
    result = launch(ranks, *BENCH, *words, "--json", str(file), timeout_s=100)
    assert result.returncode == 0, result.stderr
    return result.stdout, json.loads(file.read_text())


@pytest.mark.launch
@pytest.mark.timeout(120)
def test_every_row_is_checked_and_measured(tmp_path: Path) -> None:
    text, facts = figures(2, tmp_path / "steps.json")
    names = [workload.name for workload in catalog.steps(steps.NAMES, 2, small=True)]
    assert [step["what"] for step in facts["steps"]] == [row["what"] for row in facts["rows"]] == names
    assert all(set(row["ways"]) == {BACKEND, GLOO, ALONE, COPIES} for row in facts["rows"])
    assert all(set(step["exposed_us"]) == {BACKEND, GLOO} for step in facts["steps"])
    assert [line.split("  ")[0] for line in text.splitlines() if BACKEND in line] == names


@pytest.mark.launch
@pytest.mark.timeout(120)
def test_rows_that_do_not_fit_the_ranks_are_left_out(tmp_path: Path) -> None:
    text, facts = figures(1, tmp_path / "one.json", "--rows", "fsdp", "1f1b")
    assert "left out: needs two ranks" in text
    assert [step["what"].split()[0] for step in facts["steps"]] == ["FSDP2"]
    text, facts = figures(3, tmp_path / "three.json", "--rows", "tensor", "1f1b")
    assert "left out: 2 heads on 3 ranks" in text
    assert [step["what"].split()[:2] for step in facts["steps"]] == [["pipeline", "1F1B"]]


@pytest.mark.launch
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("row", "mute", "way"),
    [
        ("resnet", "group is dist.group.WORLD", BACKEND),
        ("bf16", "group is dist.group.WORLD", BACKEND),
        ("fsdp", "group is dist.group.WORLD", BACKEND),
        ("1f1b", "group is dist.group.WORLD", BACKEND),
        ("tensor", "group is not dist.group.WORLD", GLOO),
    ],
)
def test_an_implementation_that_communicates_nothing_is_found(row: str, mute: str, way: str) -> None:
    result = launch(2, "-c", MUTE.format(mute=mute, row=row))
    assert result.returncode != 0
    assert f": {way}: the gradient of " in result.stderr

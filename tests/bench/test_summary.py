"""`bench summary`: one table of several runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpicoll.bench import summary, targets
from mpicoll.bench.__main__ import main
from mpicoll.bench.row import API, BACKEND, COPIES, GLOO, RAW, Row
from mpicoll.bench.steps.measure import ALONE, StepRow


@pytest.fixture(autouse=True)
def first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only rank 0 of a job prints; each rank of a session tries it."""
    monkeypatch.setattr("mpicoll.bench.overview.rank", lambda: 0)


def run(folder: Path, name: str, library: str, us: float) -> str:
    """Writes the file of a run in which an all_reduce of 8 bytes took ``us`` microseconds, and MPI's 1."""
    rows = [Row("all_reduce", 8, 2, {API: [us / 1e6], RAW: [1e-6]}, "float32", "SUM")]
    outcomes = [outcome.facts() for outcome in targets.judge(targets.Measured(rows, full=True))]
    file = folder / name
    file.write_text(json.dumps({"machine": {"mpi": library}, "rows": [], "targets": outcomes}))
    return str(file)


def table(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, list[str]]:
    """The cells of the printed Markdown by the column "what"."""
    assert main(["summary", *words, "--markdown"]) == 0
    lines = [line[2:-2].split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    return {cells[1 if len(lines[0]) > 4 else 0]: cells for cells in lines}


def test_a_figure_is_the_median_of_the_runs_with_their_spread(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [run(tmp_path, f"{us}.json", "Open MPI v5.0.11, package: built by somebody", us) for us in (9.0, 3.0, 3.5)]
    files.append(run(tmp_path, "other.json", "MPICH Version: 5.0.2", 4.5))
    cells = table(capsys, *files)
    assert cells["what"][-2:] == ["Open MPI 5.0.11", "MPICH 5.0.2"]
    assert cells["time of all_reduce, 8 B"][-3:] == ["4.0 us", "3.5 us [3.0 us,9.0 us]", "**4.5 us**"]
    assert cells["broadcast, 8 B"][-2:] == ["-", "-"]  # not measured
    assert len(cells) == 1 + len(targets.TARGETS)


def test_training_steps_have_a_table_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = []
    for step_s in (0.112, 0.12, 0.14):
        row = Row("DDP", 8, 2, {BACKEND: [step_s], GLOO: [0.2], ALONE: [0.1], COPIES: [0.001]})
        file = tmp_path / f"{step_s}.json"
        facts = {"machine": {"mpi": "MPICH"}, "rows": [row.facts()], "steps": [StepRow(row, "images", 1).facts()]}
        file.write_text(json.dumps(facts))
        files.append(str(file))
    assert table(capsys, *files)["DDP"][-3:] == ["0.60x [0.56x,0.70x]", "20.0 [12.0,40.0]", "0.20x [0.12x,0.40x]"]


@pytest.mark.parametrize("text", ["no JSON", "[]", '{"machine": {"mpi": "MPICH"}, "rows": []}', None])
def test_another_file_is_named(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "run.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(summary.WrongFile, match=r"run\.json: no figures of `bench all --json`"):
        summary.read([str(file)])

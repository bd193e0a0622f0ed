"""mpicoll.info: the doctor's facts inside a program."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from mpi4py import MPI

import mpicoll as dist
from tests.support import agree, run
from tests.support.jobs import attempt, command, reports

PROGRAM = """
import json
import mpicoll as dist
before = dist.info()
dist.init_process_group()
print(json.dumps({"rank": dist.get_rank(), "before": before, "after": dist.info()}))
dist.destroy_process_group()
"""


@pytest.mark.usefixtures("world")
def test_it_tells_what_runs_here(rank: int, size: int) -> None:
    facts = dist.info()
    assert json.loads(json.dumps(facts)) == facts
    assert facts["torch"]["version"] == torch.__version__
    vendor, version = MPI.get_vendor()
    assert (facts["mpi"]["vendor"], facts["mpi"]["version"]) == (vendor, list(version))
    assert facts["mpi"]["size"] == size
    assert facts["mpi"]["thread_level"] == "MULTIPLE"
    assert (size == 1) or (facts["job"]["rank"], facts["job"]["size"]) == (rank, size)
    agree(1 <= facts["cores"] <= (os.cpu_count() or 1), facts)


def test_settings_are_those_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPICOLL_TIMEOUT", "12.5")
    monkeypatch.setenv("MPICOLL_WINDOW_BYTES", "many")
    monkeypatch.setenv("MPICOLL_NO_SUCH", "1")
    facts = dist.info()
    assert facts["settings"]["MPICOLL_TIMEOUT"] == 12.5
    assert facts["settings"]["MPICOLL_PROBE_TIMEOUT"] == 60.0
    assert "MPICOLL_WINDOW_BYTES" not in facts["settings"]
    assert [problem.split("=")[0].split()[0] for problem in facts["problems"]] == ["MPICOLL_NO_SUCH", "MPICOLL_WINDOW_BYTES"]


@pytest.mark.launch
def test_it_starts_no_mpi_and_agrees_with_the_doctor(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    ranks = reports(attempt(command("mpicoll.run", str(program)), 45))
    assert [rank["after"]["job"]["rank"] for rank in ranks] == [0, 1]
    for rank in ranks:
        assert rank["before"]["mpi"] is None
        assert rank["before"]["job"] == rank["after"]["job"]
        assert rank["after"]["job"]["size"] == rank["after"]["mpi"]["size"] == 2
    doctor = json.loads(run([sys.executable, "-m", "mpicoll.doctor", "--json"], 60).stdout)["facts"]
    facts = ranks[0]["after"]
    threads = {"threads": facts["torch"]["threads"]}  # mpicoll.run has set how many
    assert facts["torch"] == {**doctor["torch"], **threads}
    assert facts["mpi"] == {**doctor["mpi"], "size": 2}

"""torch.distributed.elastic's `record`: the error file that torchrun's agent reads, beside our ending of the job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from tests.support import agree, everyone, launch

SECTION = "State"
SCRIPT = "tests/stack/scripts/recorded.py"
HUNG_S = 60  # seconds; the scripts take 3 to 10


@pytest.mark.feature("elastic's record: error file of the rank that failed")
@pytest.mark.filterwarnings("ignore:Unable to enable fault handler")
def test_error_files(rank: int, size: int, shared_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has a file of its own, as under torchrun; the one that raises writes its own, with the traceback."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(shared_path / f"{rank}.json"))
    last = size - 1

    @record
    def main(start: float, *, factor: int) -> float:
        total = torch.full((2,), start)
        dist.all_reduce(total)
        if rank == last:
            raise KeyError("after the collective")
        return float(total[0]) * factor

    answer: Any
    try:
        answer = main(1.0, factor=3)
    except KeyError as error:
        answer = error
    everyone(None)  # so that every rank has written before any looks
    files = [path.name for path in shared_path.iterdir()]
    right = isinstance(answer, KeyError) if rank == last else answer == 3.0 * size
    if rank == last:
        written = json.loads((shared_path / f"{rank}.json").read_text())["message"]
        right = right and "after the collective" in written["message"] and "in main" in written["extraInfo"]["py_callstack"]
    agree(right and files == [f"{last}.json"], (answer, files))


@pytest.mark.feature("elastic's record: the job ends, and says by whose fault")
@pytest.mark.launch
@pytest.mark.timeout(90)
@pytest.mark.parametrize("how", ["raises", "exits"])
def test_the_job_ends(how: str, tmp_path: Path) -> None:
    """The file is written before the job is aborted, the traceback printed once, by that rank alone; sys.exit is no error."""
    path = tmp_path / "error.json"
    done = launch(2, SCRIPT, how, timeout_s=HUNG_S, env={"TORCHELASTIC_ERROR_FILE": str(path)})
    said = f"status {done.returncode}\nstdout:\n{done.stdout}\nstderr:\n{done.stderr}"
    assert done.returncode != 0, said
    if how == "exits":
        assert "waits for rank 1, whose program has ended" in done.stderr, said
        assert not path.exists()
        return
    assert done.stderr.count("[rank1]: RuntimeError: nobody there") == 1, said
    assert "[rank1]: [rank1]" not in done.stderr, said
    assert "[rank0]" not in done.stderr, said
    assert "mpicoll: rank 1 of 2" in done.stderr, said
    written = json.loads(path.read_text())["message"]
    assert written["message"] == "RuntimeError: nobody there", written
    assert "the direct cause" in written["extraInfo"]["py_callstack"], written

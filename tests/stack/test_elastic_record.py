"""torch.distributed.elastic's `record`: the error file that torchrun's agent reads, beside our ending of the job."""

import json
import re
from pathlib import Path

import pytest

from tests.support import launch

SCRIPT = "tests/stack/scripts/recorded.py"
HUNG_S = 60  # seconds; the scripts take 3 to 10


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
        assert re.search("[Rr]ank 1.*program has ended", done.stderr), said
        assert not path.exists()
        return
    assert done.stderr.count("[rank1]: RuntimeError: nobody there") == 1, said
    assert "[rank1]: [rank1]" not in done.stderr, said
    assert "[rank0]" not in done.stderr, said
    assert "mpicoll: rank 1 of 2" in done.stderr, said
    written = json.loads(path.read_text())["message"]
    assert written["message"] == "RuntimeError: nobody there", written
    assert "the direct cause" in written["extraInfo"]["py_callstack"], written

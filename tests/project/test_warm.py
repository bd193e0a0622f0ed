"""A process that is forked from one that has imported torch behaves as one that mpiexec starts."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import clean_environment, eventually, run, warm, warm_server

pytestmark = pytest.mark.launch


RANK = "import sys\nforked = 'torch' in sys.modules\nimport os, torch\nprint(f\"{os.environ['RANK']}: {forked}, {sys.argv}\")"


@pytest.mark.parametrize("fresh", [False, True])
def test_ranks_of_mpicoll_run_are_forked_too(fresh: bool, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(RANK)
    done = run([sys.executable, "-m", "mpicoll.run", "-n", "2", str(script), "word"], fresh=fresh)
    assert sorted(done.stdout.splitlines()) == [f"{rank}: {not fresh}, {[str(script), 'word']}" for rank in (0, 1)], done.stderr


WAITS = "import os, time; print(os.getpid(), flush=True); time.sleep(30)"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_both(number: int) -> None:
    """The client, started here as mpiexec starts it, and the process that was forked for it."""
    command, environ = [sys.executable, "-SE", warm.__file__, "-c", WAITS], clean_environment(**{warm.ADDRESS: warm_server()})
    process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.send_signal(number)
    _, err = process.communicate(timeout=20)
    assert process.returncode == -number, err
    assert ("KeyboardInterrupt" in err) == (number == signal.SIGINT), err
    assert eventually(lambda: not Path(f"/proc/{pid}").exists()), f"process {pid} has outlived its client"

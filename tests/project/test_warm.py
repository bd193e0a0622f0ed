"""A process that is forked from one that has imported torch behaves as one that mpiexec starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import clean_environment, run, warm, warm_server

pytestmark = pytest.mark.launch


def python(*arguments: str, **environ: str) -> subprocess.Popen[str]:
    """The client as mpiexec starts it, without an mpiexec."""
    environ = clean_environment(**{warm.ADDRESS: warm_server()}, **environ)
    command = [sys.executable, "-SE", warm.__file__, *arguments]
    return subprocess.Popen(
        command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_script_a_module_and_a_command_find_what_they_would(tmp_path: Path) -> None:
    code = "import os, sys; print(__name__, sys.argv, sys.path[0], os.environ['WORD'], sys.stdin.read())"
    script = tmp_path / "program.py"
    script.write_text(code + "\nprint(__file__)")
    for arguments, argv, place in (
        (["-c", code, "a"], ["-c", "a"], ""),
        ([str(script), "a"], [str(script), "a"], str(tmp_path)),
    ):
        out, err = python(*arguments, WORD="said").communicate("asked", timeout=40)
        assert out.startswith(f"__main__ {argv} {place} said asked\n"), out + err
    assert out.endswith(f"\n{script}\n")
    out, err = python("-m", "program", "a", PYTHONPATH=str(tmp_path), WORD="said").communicate("asked", timeout=40)
    assert out.startswith(f"__main__ {[str(script), 'a']} {os.getcwd()} said asked\n"), out + err


def test_the_plug_ins_are_loaded_in_its_own_environment() -> None:
    code = "import sys, torch; print('mpicoll' in sys.modules, 'mpi4py' in sys.modules)"
    assert python("-c", code).communicate(timeout=40) == ("True False\n", "")
    assert python("-c", code, TORCH_DEVICE_BACKEND_AUTOLOAD="0").communicate(timeout=40) == ("False False\n", "")


RANK = "import sys\nforked = 'torch' in sys.modules\nimport os, torch\nprint(f\"{os.environ['RANK']}: {forked}, {sys.argv}\")"


@pytest.mark.parametrize("fresh", [False, True])
def test_ranks_of_mpicoll_run_are_forked_too(fresh: bool, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(RANK)
    done = run([sys.executable, "-m", "mpicoll.run", "-n", "2", str(script), "word"], fresh=fresh)
    assert sorted(done.stdout.splitlines()) == [f"{rank}: {not fresh}, {[str(script), 'word']}" for rank in (0, 1)], done.stderr


@pytest.mark.parametrize(
    ("code", "status"),
    [("pass", 0), ("raise SystemExit(3)", 3), ("1 / 0", 1), ("import os; os._exit(5)", 5), ("import os; os.abort()", -6)],
)
def test_its_end_is_the_clients(code: str, status: int) -> None:
    process = python("-c", code)
    _, err = process.communicate(timeout=40)
    assert process.returncode == status, err
    assert ("ZeroDivisionError" in err) == ("1 / 0" in code), err


WAITS = "import os, time; print(os.getpid(), flush=True); time.sleep(30)"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_ends_both(number: int) -> None:
    process = python("-c", WAITS)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.send_signal(number)
    _, err = process.communicate(timeout=20)
    assert process.returncode == -number, err
    assert ("KeyboardInterrupt" in err) == (number == signal.SIGINT), err
    for _ in range(200):
        if not Path(f"/proc/{pid}").exists():
            break
        time.sleep(0.05)
    else:
        pytest.fail(f"process {pid} has outlived its client")

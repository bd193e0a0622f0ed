"""A failing rank never leaves the others hanging, and stderr names it (traps 42, 56, 75).

Each test is a job of its own, in which rank 1 fails and the others wait for it.
"""

import platform
import re
import subprocess
import time
from pathlib import Path

import pytest

from tests.faults.clock import FAST
from tests.support import ROOT, is_open_mpi, launch

pytestmark = pytest.mark.launch

SCRIPT = str(ROOT / "tests" / "behaviour" / "scripts" / "failures.py")
PROMPT_S = 25.0  # from the start of mpiexec to the end of the job: seconds of imports on a busy machine, and the end itself


def job(way: str, operation: str, timeout_s: float = 1800, ranks: int = 2) -> subprocess.CompletedProcess[str]:
    """Runs the case; asserts that it ended by itself, soon, and not well."""
    began = time.monotonic()
    done = launch(ranks, SCRIPT, way, operation, str(timeout_s), timeout_s=PROMPT_S + 10, env=FAST)
    took = time.monotonic() - began
    assert done.returncode != 0, done.stderr
    assert took < PROMPT_S, f"{took:.1f} s\n{done.stderr}"
    assert "survived" not in done.stdout, done.stdout
    return done


@pytest.mark.parametrize(
    ("way", "operation", "words"),
    [
        *(("exception", operation, "uncaught ZeroDivisionError;") for operation in ("all_reduce", "recv", "exit", "new_group")),
        ("thread", "all_reduce", "uncaught ZeroDivisionError in thread Thread-"),
        ("interrupt", "all_reduce", "uncaught KeyboardInterrupt;"),
        ("import", "all_reduce", "uncaught ModuleNotFoundError;"),
    ],
)
def test_an_uncaught_exception_ends_the_job(way: str, operation: str, words: str) -> None:
    stderr = job(way, operation).stderr
    assert re.search(rf"^mpicoll: rank 1 of 2 .*{words}.* aborting the job$", stderr, re.MULTILINE), stderr
    assert "in fail_by" in stderr, stderr
    if "ZeroDivisionError" in words:
        assert stderr.count("ZeroDivisionError: the culprit's own words") == 1, stderr


@pytest.mark.parametrize(
    ("way", "operation"),
    [
        ("sys.exit(3)", "all_reduce"),
        ("sys.exit(0)", "recv"),
        ("sys.exit(0)", "all_reduce async"),
        ("destroy", "barrier"),
        ("destroy", "recv from anybody"),
    ],
)
def test_a_rank_that_comes_to_its_end_too_early_is_named(way: str, operation: str) -> None:
    """One batch less on one rank, or sys.exit: long before the timeout of the group (20 s here) the job ends."""
    stderr = job(way, operation, timeout_s=20).stderr
    name = operation.split()[0]
    words = r".*[Rr]ank 1.*(program has ended|has destroyed this group)"  # it destroys the group first
    if operation.endswith("async"):
        assert re.search(rf"OperationTimeout: {name} on group '0' \(rank 0 of 2\): it can never end: {words}", stderr), stderr
        assert "uncaught OperationTimeout; aborting the job" in stderr, stderr
        return
    assert re.search(rf"mpicoll: {name} on group '0' \(rank 0 of 2\): {words}", stderr), stderr
    assert f"mpicoll: rank 0 of 2 ({platform.node()}): {name} can never end; aborting the job" in stderr, stderr


@pytest.mark.parametrize("way", ["sys.exit(0)", "destroy"])
def test_new_group_raises_if_the_program_of_a_member_has_ended(way: str) -> None:
    stderr = job(way, "new_group", ranks=3).stderr
    for rank in (0, 2):
        assert f"OperationTimeout: new_group (rank {rank} of 3): rank 1 cannot come: its program has ended" in stderr, stderr


def test_a_rank_that_has_done_its_part_may_leave() -> None:
    """Rank 1 ends after its part of a reduction; rank 0 waits for rank 2, which comes later: no fault, one line."""
    done = launch(3, SCRIPT, "reduce", "reduce", "20", timeout_s=PROMPT_S + 20, env=FAST)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(
        r"mpicoll: reduce on group '0' \(rank 0 of 3\) has waited for \d s. Rank 2 has not come: .*\n", done.stderr
    )
    assert done.stdout.count("survived reduce") == 2, done.stdout


def test_a_crash_ends_the_job() -> None:
    job("segfault", "all_reduce")


def test_what_can_raise_a_timeout_raises_it() -> None:
    """Uncaught here. All others that raise, and the ends of those that cannot: faults/test_missing_rank.py."""
    stderr = job("sleep", "barrier", timeout_s=1).stderr
    assert "mpicoll.errors.OperationTimeout: barrier on group '0' (rank 0 of 2): " in stderr, stderr
    assert "1 s" in stderr, stderr
    assert "mpicoll: rank 0 of 2" in stderr, stderr


KILLED = """
import os, signal, time, torch, mpicoll as dist
dist.init_process_group()
x = torch.ones(1 << 20)
dist.all_reduce(x)
if dist.get_rank() == 1:
    time.sleep(0.3)  # the others are inside by then
    os.kill(os.getpid(), signal.SIGKILL)
try:
    dist.all_reduce(x)
except dist.CommunicationError as error:
    print(f"learned: {error}\\n", end="", flush=True)
os._exit(0)
"""


def test_a_rank_that_is_killed_while_others_wait_in_shared_memory(tmp_path: Path) -> None:
    """Nobody is inside MPI then, which alone knows of it."""
    if not is_open_mpi():
        pytest.skip("MPICH's launcher ends the job of a process that is killed")
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    done = launch(3, str(script), options=["--with-ft", "ulfm"])
    assert done.stdout.count("learned: all_reduce on group '0'") == 2, f"{done.stdout}\n{done.stderr}"

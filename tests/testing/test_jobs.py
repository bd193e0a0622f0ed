"""`--ranks`, options of pytest and other plugins on several ranks, and that the plugin does nothing elsewhere."""

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from mpicoll._base.cpus import longer
from mpicoll.testing._jobs import without_option, worst
from mpicoll.testing._reports import name
from mpicoll.testing._watch import readable
from tests.support import ROOT, clean_environment, eventually, run

launch = pytest.mark.launch

MIXED = """
import os, sys
import pytest


def test_where(rank, world_size):
    assert rank < world_size


@pytest.mark.ranks(2)
def test_two(rank):
    assert rank != 1


@pytest.mark.min_ranks(3)
def test_three():
    pass


@pytest.mark.mpi(min_size=3)
def test_of_pytest_mpi():
    pass


@pytest.mark.mpi_skip
def test_skip(world_size):
    assert world_size == 1


@pytest.mark.mpi_xfail
def test_xfail(world_size):
    assert world_size == 1


@pytest.mark.parallel(nprocs=2)
def test_of_mpi_pytest(world_size):
    assert world_size == 2


@pytest.mark.parallel([2, 3])
def test_of_mpi_pytest_too(world_size, mpi_tmp_path):
    assert world_size in (2, 3)
"""


def start(folder: Path, *options: str, program: str = "", **env: str) -> tuple[int, str]:
    if program:
        (folder / "test_it.py").write_text(program)
        (folder / "pytest.ini").write_text("[pytest]\n")
    done = run([sys.executable, "-m", "pytest", *options], timeout_s=100, cwd=folder, env=env, fresh=True)
    return done.returncode, done.stdout + done.stderr


def test_the_option_is_taken_out_of_the_arguments() -> None:
    args = ["-x", "--ranks", "2", "a", "--ranks=3", "--ranks-timeout=5", "b"]
    assert without_option(args, "--ranks") == [
        "-x",
        "a",
        "--ranks-timeout=5",
        "b",
    ]


@pytest.mark.parametrize(("statuses", "expected"), [([0, 0], 0), ([0, 5], 0), ([5, 5], 5), ([1, 0, 5], 1), ([1, 139, 2], 139)])
def test_the_worst_status_counts(statuses: list[int], expected: int) -> None:
    assert worst(statuses) == expected


def test_stacks_show_the_program() -> None:
    text = """Thread 0x01 (most recent call first):
  File "/x/mpicoll/testing/_watch.py", line 3 in _answer
  File "/x/mpicoll/testing/_watch.py", line 2 in _keep_watch

Thread 0x02 (most recent call first):
  File "/x/site-packages/mine.py", line 5 in loop

Thread 0x03 (most recent call first):
  File "/x/test_it.py", line 7 in test_it
  File "/x/site-packages/_pytest/python.py", line 8 in run
"""
    assert readable(text).splitlines() == [
        '  File "/x/test_it.py", line 7 in test_it', "another thread:", '  File "/x/site-packages/mine.py", line 5 in loop'
    ]  # fmt: skip


@launch
def test_it_does_nothing_in_a_run_of_one_process(tmp_path: Path) -> None:
    """Neither torch nor MPI is imported, and the fixtures are there."""
    program = "import sys\n\n\ndef test_it(rank, world_size, shared_path):\n    assert (rank, world_size) == (0, 1)\n"
    program += "    assert not {'torch', 'mpi4py', 'mpi4py.MPI', 'mpicoll.testing._session', 'mpicoll._api'} & {*sys.modules}\n"
    status, printed = start(tmp_path, "-p", "no:pytest_mpi", "-W", "error", program=program)
    assert status == 0, printed


@launch
def test_a_program_without_torch_may_pickle_what_mpi4py_has() -> None:
    """pickle asks each module for COMM_WORLD. mpicoll's import of torch failed, and the test with it (tests of mpi4py)."""
    program = """
import pickle, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(name="torch")

sys.meta_path.insert(0, Absent())
import mpicoll.testing
from mpi4py import MPI
assert pickle.loads(pickle.dumps(MPI.COMM_WORLD)) == MPI.COMM_WORLD
assert not hasattr(mpicoll, "all_the_same")
"""
    done = run([sys.executable, "-c", program])
    assert done.returncode == 0, done.stderr


@launch
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--ranks", "x"], "--ranks x: give a number of ranks, or several with commas"),
        (["--ranks=0"], "give a number of ranks"),
        (["--ranks", "2", "--pdb"], "--ranks and --pdb do not go together"),
        (["--ranks", "2", "-n", "2"], r"--ranks and -n \(pytest-xdist\) do not go together"),
    ],
)
def test_what_is_refused(options: list[str], said: str, tmp_path: Path) -> None:
    status, printed = start(tmp_path, *options, program="")
    assert status == pytest.ExitCode.USAGE_ERROR, printed
    assert re.search(said, printed), printed


@launch
@pytest.mark.parametrize(("option", "said"), [("--pdb", "--pdb does not work on 2 ranks"), ("-n2", "xdist. does not work")])
def test_what_ranks_refuse(option: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_it():\n    pass\n")
    done = run([sys.executable, "-m", "mpicoll.run", "-n", "2", "-m", "pytest", option], cwd=tmp_path, fresh=True)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert re.search(said, done.stderr), done.stderr


@launch
def test_processes_that_mpi_does_not_connect_are_refused(tmp_path: Path) -> None:
    """As below an mpiexec of another MPI: each would be a rank of its own, and the tests would pass."""
    variables = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "OMPI_MCA_ess": "singleton"}
    (tmp_path / "test_it.py").write_text("def test_it():\n    pass\n")
    done = run([sys.executable, "-m", "pytest"], cwd=tmp_path, env=variables, fresh=True)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout + done.stderr
    assert "the launcher has started 2 processes, and MPI sees 1 rank" in done.stderr


@functools.cache
def example() -> tuple[int, str, list[str]]:
    """The suite of examples/testing on 1 and 3 ranks: status, output, and the suites of the XML file."""
    folder = Path(clean_environment().get("TMPDIR", "/tmp")) / f"mpicoll-example-{sys.implementation.name}"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "examples/testing", folder)
    status, printed = start(folder, "--ranks", "1,3", "--junitxml=x.xml", "-p", "no:cacheprovider")
    names = [f"{suite.get('name')}: {suite.get('tests')}" for suite in ElementTree.parse(folder / "x.xml").getroot()]
    shutil.rmtree(folder)
    return status, printed, names


@launch
def test_the_example_passes() -> None:
    status, printed, suites = example()
    assert status == 0, printed
    assert re.search(r"^1 rank: 5 passed\n3 ranks: 6 passed$", printed, re.MULTILINE), printed
    assert "mpi: not on 1 rank: 1 test needs 2 ranks or more" in printed
    assert suites == ["pytest, 1 ranks: 5", "pytest, 3 ranks: 6"]


@launch
@pytest.mark.parametrize("other", ["no:pytest_mpi", "pytest_mpi"])
def test_marks(other: str, tmp_path: Path) -> None:
    """With pytest-mpi installed, and without: the marks mean the same. Failures are for --lf."""
    status, printed = start(tmp_path, "--ranks=1,2", "-p", other, program=MIXED)
    assert status == 1, printed
    assert "FAILED test_it.py::test_two - rank 1: " in printed
    if other == "no:pytest_mpi":
        assert "mpi: not on 1 rank: 2 tests need 2 ranks" in printed, printed
    assert json.loads((tmp_path / ".pytest_cache/v/cache/lastfailed").read_text()) == {"test_it.py::test_two": True}
    status, printed = start(tmp_path, "--ranks=2", "-p", other, "--lf")
    assert status == 1, printed
    assert re.search(r"\b1 failed in", printed), printed


def test_a_project_may_put_the_rank_into_the_id_of_a_test() -> None:
    """pylops-mpi does, with pytest 8: the ranks seemed to have collected different tests."""
    items: list[Any] = [SimpleNamespace(nodeid=f"a.py::C::t[1][Rank {r}]", location=("a.py", 3, "C.t[1]")) for r in range(2)]
    assert name(items[0]) == name(items[1]) == "a.py::C.t[1]"


@launch
@pytest.mark.parametrize("by_terminal", [True, False], ids=["SIGINT", "SIGTERM"])
def test_a_signal_ends_the_job(by_terminal: bool, tmp_path: Path) -> None:
    """The job inherited that its parent ignores SIGINT, and went on after Ctrl-C."""
    (tmp_path / "test_it.py").write_text("import time\n\n\ndef test_it(comm):\n    open('begun', 'w')\n    time.sleep(120)\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "--ranks=2"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=clean_environment(), start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert eventually((tmp_path / "begun").exists)
    began = time.monotonic()
    if by_terminal:
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=longer(40))
    assert process.returncode not in (0, None), printed
    assert time.monotonic() - began < longer(30), printed


INNER = """
import os, subprocess, sys


def test_outer(world_size, tmp_path):
    (tmp_path / "test_inner.py").write_text("def test_inner(world_size):\\n    assert world_size == 1\\n")
    done = subprocess.run([sys.executable, "-m", "pytest"], cwd=tmp_path, capture_output=True, text=True, timeout=40)
    assert done.returncode == 0, done.stdout
    assert world_size == 2
"""


@launch
def test_a_pytest_that_a_rank_starts_is_no_rank(tmp_path: Path) -> None:
    """It inherits the variables of the launcher: without a mark it would join the job, and wait for ever."""
    status, printed = start(tmp_path, "--ranks=2", program=INNER)
    assert status == 0, printed


WORLD = """
import mpicoll
import torch


def test_sum(world):
    x = torch.ones(2)
    mpicoll.all_reduce(x)
    assert x[0] == world.size()


def test_leaves_a_message(world, rank):
    if rank == 1:
        mpicoll.irecv(torch.ones(1), 0)


def test_again(world):
    mpicoll.barrier()
"""


@launch
def test_a_world_is_made_for_each_test(tmp_path: Path) -> None:
    status, printed = start(tmp_path, "--ranks=2", program=WORLD)
    assert status == 1, printed
    assert "rank 1: irecv of 4 bytes has not ended" in printed
    assert re.search("3 passed, 1 error", printed), printed


RELEASED = """
import mpicoll
import pytest
import torch
import torch.distributed

OPERATIONS = {
    "all_reduce": lambda: mpicoll.all_reduce(torch.ones(2)),
    "large all_reduce": lambda: mpicoll.all_reduce(torch.ones(1 << 20)),
    "asynchronous all_reduce": lambda: mpicoll.all_reduce(torch.ones(2), async_op=True).wait(),
    "all_reduce of torch": lambda: torch.distributed.all_reduce(torch.ones(2)),
    "broadcast": lambda: mpicoll.broadcast(torch.ones(2), 1),
    "objects": lambda: torch.distributed.all_gather_object([None] * mpicoll.get_world_size(), "text"),
    "barrier": mpicoll.barrier,
    "recv": lambda: mpicoll.recv(torch.ones(2), 1),
    "large send": lambda: mpicoll.send(torch.ones(1 << 22), 1),
    "irecv": lambda: mpicoll.irecv(torch.ones(2), 1).wait(),
    "large isend": lambda: mpicoll.isend(torch.ones(1 << 22), 1).wait(),
}


@pytest.mark.parametrize("large_before", [False, True], ids=["first", "second"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_released(operation, large_before, world, rank):
    if large_before:  # barriers go by shared memory from now on
        mpicoll.all_reduce(torch.ones(1 << 20))
    if rank == 1:
        raise ValueError("first")
    OPERATIONS[operation]()


def test_after(world):
    x = torch.ones(1 << 20)
    mpicoll.all_reduce(x)
    mpicoll.barrier()
    assert x[0] == world.size()
"""


@launch
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_operations_of_mpicoll_end_when_another_rank_has_failed(ranks: int, tmp_path: Path) -> None:
    """The others raise GroupFailed, the report begins with what happened, and the run goes on in a new world."""
    options = (f"--ranks={ranks}", "--junitxml=x.xml", "--ranks-timeout=30")
    status, printed = start(tmp_path, *options, program=RELEASED, _MPICOLL_TIME_SCALE="0.03")
    results = {case.get("name"): case for case in ElementTree.parse(tmp_path / "x.xml").getroot().iter("testcase")}
    assert status == 1, printed
    assert len(results) == 23, printed
    assert not list(results.pop("test_after")), printed
    for test, case in results.items():
        (failure,) = case
        assert failure.tag == "failure", (test, printed)
        assert failure.get("message") == "rank 1: ValueError: first", (test, printed)
        assert "GroupFailed: " in str(failure.text), (test, printed)


@launch
def test_pytest_cov_adds_up(tmp_path: Path) -> None:
    pytest.importorskip("pytest_cov")
    lines = "\n".join(f"    if (rank, size) == {pair}:\n        return {pair}" for pair in ((0, 1), (0, 2), (1, 2)))
    (tmp_path / "measured.py").write_text(f"def branches(rank, size):\n{lines}\n")
    program = "from measured import branches\n\n\ndef test_it(rank, world_size):\n    assert branches(rank, world_size)\n"
    status, printed = start(tmp_path, "--ranks=1,2", "--cov=measured", "--cov-report=term", program=program)
    assert status == 0, printed
    assert re.findall(r"^measured.py .* (\d+)%", printed, re.MULTILINE) == ["43", "100"], printed

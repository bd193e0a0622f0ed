"""mpicoll.spawn in the place of torch.multiprocessing.spawn; the scripts are run as users run them."""

import os
import queue
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mpicoll._base import inherited, launcher
from mpicoll._base.cpus import longer
from mpicoll._launch.spawn import spawn
from mpicoll.errors import LaunchError
from tests.launch.jobs import runs
from tests.support import ROOT, eventually

# A script imports torch up to three times: 2 s each alone, 10 s each on a machine with 20 jobs.
pytestmark = pytest.mark.timeout(120)


def environment(folder: Path) -> dict[str, str]:
    return {**inherited.without_job(os.environ), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}


def python(folder: Path, text: str, timeout_s: float = 100, way: str = "script.py") -> subprocess.CompletedProcess[str]:
    """Runs ``text`` as a script under plain python. way: "-" and "-c" do without a file. On a busy machine timeout_s grows."""
    (folder / "script.py").write_text(text)
    command = [sys.executable, way, *([text] if way == "-c" else [])]
    given, limit_s = text if way == "-" else None, longer(timeout_s)
    environ = environment(folder)
    return subprocess.run(command, input=given, cwd=folder, env=environ, capture_output=True, text=True, timeout=limit_s)


@pytest.mark.launch
def test_a_function_of_the_script_runs_in_every_rank(tmp_path: Path) -> None:
    done = python(
        tmp_path,
        """
import multiprocessing, os
import torch
import mpicoll

class Thing:
    def __init__(self, value): self.value = value

def work(rank, tensor, thing, results):
    from mpi4py import MPI
    world = MPI.COMM_WORLD
    assert (world.rank, world.size) == (rank, 3) and os.environ["RANK"] == str(rank)
    results[rank] = (tensor.sum().item(), type(thing) is Thing and thing.value, __name__)
    return Thing(tensor * rank)

if __name__ == "__main__":
    with multiprocessing.Manager() as manager:
        results = manager.dict()
        returned = mpicoll.spawn(work, args=(torch.arange(4), Thing(7), results), nprocs=3)
        print([type(each) is Thing and each.value.tolist()[1] for each in returned], sorted(results.items()))
""",
    )
    assert done.returncode == 0, done.stderr
    of_each = "(6, 7, '__mp_main__')"
    assert done.stdout == f"[0, 1, 2] [(0, {of_each}), (1, {of_each}), (2, {of_each})]\n"


FAILING = """
import os, signal, sys, time
import mpicoll

def raises(rank):
    from mpi4py import MPI
    if rank == 1: raise KeyError("lost it")
    MPI.COMM_WORLD.Barrier()

def leaves(rank):
    if rank == 1: sys.exit(5)
    time.sleep(150)  # longer than this script may run

def is_killed(rank):
    if rank == 1: os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(150)

def crashes(rank):
    if rank == 1: os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(150)

def leaves_early(rank):
    if rank == 1: os._exit(0)

if __name__ == "__main__":
    from torch.multiprocessing import ProcessExitedException, ProcessRaisedException
    try:
        mpicoll.spawn(FUNCTION, nprocs=2)
    except mpicoll.MpicollError as error:
        as_torchs = isinstance(error, (ProcessRaisedException, ProcessExitedException))
        of_exit = getattr(error, "exit_code", None), getattr(error, "signal_name", None)
        print(type(error).__name__, as_torchs, error.error_index, *of_exit, error, sep="|")
"""


@pytest.mark.launch
@pytest.mark.parametrize(
    ("function", "says", "words"),
    [
        ("raises", "RankRaised|True|1|None|None|", ["rank 1 of 2 raised", "in raises", "KeyError: 'lost it'"]),
        ("leaves", "RankExited|True|1|5|None|rank 1 of 2 on ", ["exit status 5"]),
        ("leaves_early", "RankExited|True|1|0|None|rank 1 of 2: exit status 0 before the end of its program", []),
        ("is_killed", "RankExited|True|1|-9|SIGKILL|rank 1 of 2 on ", ["killed by SIGKILL"]),
        ("crashes", "RankExited|True|1|-11|SIGSEGV|rank 1 of 2 on ", ["killed by SIGSEGV"]),
    ],
)
def test_a_failing_rank_is_named(function: str, says: str, words: list[str], tmp_path: Path) -> None:
    done = python(tmp_path, FAILING.replace("FUNCTION", function))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(says), done.stdout
    for word in words:
        assert word in done.stdout
    assert ("Fatal Python error: Segmentation fault" in done.stderr) == ("in crashes" in done.stderr) == (function == "crashes")
    for noise in ("mpicoll", "prterun noticed", "prterun detected", "BAD TERMINATION", "Traceback"):
        assert noise not in done.stderr
    assert not list(tmp_path.glob("mpicoll-spawn-*"))


@pytest.mark.launch
def test_without_join_the_context_can_be_joined_and_stopped(tmp_path: Path) -> None:
    done = python(
        tmp_path,
        """
import os, sys, threading, time
import mpicoll

def waits(rank, seconds):
    assert "torch" not in sys.modules, "a rank imports torch only if the script does"
    time.sleep(seconds)
    return (None for _ in "") if rank else seconds

if __name__ == "__main__":
    contexts = []
    starter = threading.Thread(target=lambda: contexts.append(mpicoll.spawn(waits, (1.5,), nprocs=2, join=False)))
    starter.start()
    starter.join()  # the ranks go on without the thread that has started them
    context, = contexts
    print(context.join(0.01), end=" ")
    print(context.join(), context.results, end=" ")
    daemons = mpicoll.spawn(waits, (150,), nprocs=2, join=False, daemon=True)
    while len(daemons.pids()) < 2: time.sleep(0.05)
    print(daemons.nprocs, *daemons.pids(), flush=True)
""",
    )
    assert done.returncode == 0, done.stderr
    first, second, *results, count, one, other = done.stdout.splitlines()[0].split()
    pids = one, other
    assert (first, second, results, count) == ("False", "True", ["[1.5,", "None]"], "2")
    assert "what rank 1 returned cannot be sent here, so that its result is None: TypeError: " in done.stderr
    assert eventually(lambda: not any(map(runs, pids)))  # the end of the script ends its daemons


@pytest.mark.launch
@pytest.mark.parametrize(
    ("ended", "number"), [("caller", signal.SIGINT), ("caller", signal.SIGKILL), ("supervisor", signal.SIGKILL)]
)
def test_no_rank_outlives_the_caller_or_the_supervisor(ended: str, number: signal.Signals, tmp_path: Path) -> None:
    text = """
import os, sys, time
import mpicoll

def waits(rank):
    sys.stdout.write(f"{os.getpid()}\\n")
    time.sleep(150)

if __name__ == "__main__":
    context = mpicoll.spawn(waits, nprocs=2, join=False)
    print(os.getpid(), context.process.pid, flush=True)
    context.join()
"""
    (tmp_path / "script.py").write_text(text)
    script = subprocess.Popen(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment(tmp_path), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert script.stdout is not None
    caller, supervisor = map(int, script.stdout.readline().split())
    pids = [script.stdout.readline().strip() for _ in range(2)]
    assert all(map(runs, pids))
    if ended == "caller":
        os.killpg(caller, number)  # as terminals and notebooks do
    else:
        os.kill(supervisor, number)
    _, errors = script.communicate(timeout=longer(40))
    assert eventually(lambda: not any(map(runs, pids)))
    if ended == "supervisor":
        assert errors.endswith("RankExited: the supervisor of the ranks: exit status -9\n")
    else:
        assert script.returncode == -number
        assert "mpiexec" not in errors
        assert "mpicoll.run" not in errors


@pytest.mark.launch
def test_a_script_without_the_guard_is_told_so(tmp_path: Path) -> None:
    done = python(tmp_path, "import mpicoll\ndef f(rank): pass\nmpicoll.spawn(f, nprocs=1)\n")
    assert done.returncode != 0
    assert 'put the call under `if __name__ == "__main__":`' in done.stderr


def test_a_rank_cannot_spawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    with pytest.raises(LaunchError, match=r"already rank 1 of 4 \(started by openmpi\).*plain `python script.py`"):
        spawn(print, nprocs=2)


@pytest.mark.parametrize(
    ("function", "options", "error", "message"),
    [
        *[(print, {"nprocs": nprocs}, ValueError, "whole number of at least 1") for nprocs in (0, -1, 1.5, True, "2")],
        (print, {"start_method": "fork"}, ValueError, "start_method must be 'spawn', got 'fork'"),
        (
            print,
            {"args": (queue.Queue(),)},
            TypeError,
            "fn and args must be picklable, and they are not: .*A Queue cannot be sent",
        ),
        (lambda rank: None, {}, TypeError, "Put fn into a module, or `pip install cloudpickle`"),
    ],
)
def test_what_is_refused_before_anything_starts(
    function: Any, options: dict[str, Any], error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "detect", lambda environ=None: None)
    monkeypatch.setitem(sys.modules, "cloudpickle", None)  # importing it raises ImportError
    with pytest.raises(error, match=message):
        spawn(function, **{"nprocs": 2, **options})


IN_A_NOTEBOOK = """
import sys, torch, mpicoll as dist
class Thing:
    def __init__(self, value): self.value = value
offset = 5
def work(rank, thing):
    dist.init_process_group()
    total = torch.tensor([thing.value + offset])
    dist.all_reduce(total)
    sys.stdout.write(f"total {total.item()} {type(thing) is Thing}\\n")  # in one piece, without a buffer, too
    dist.destroy_process_group()
    return Thing(rank), total
print([(thing.value, total.item()) for thing, total in dist.spawn(work, args=(Thing(1),), nprocs=2)])
"""


@pytest.mark.launch
@pytest.mark.parametrize(("way", "cloudpickle"), [("-c", True), pytest.param("-", True, marks=pytest.mark.slow), ("-c", False)])
def test_functions_of_a_notebook(way: str, cloudpickle: bool, tmp_path: Path) -> None:
    """`python -c` stands for a notebook: no file has the program. As in a notebook, there is no `if __name__` guard."""
    without = "" if cloudpickle else "import sys; sys.modules['cloudpickle'] = None\n"
    done = python(tmp_path, without + IN_A_NOTEBOOK, way=way)
    if cloudpickle:
        assert (done.returncode, done.stdout) == (0, "total 12 True\n" * 2 + "[(0, 12), (1, 12)]\n"), done.stderr
    else:
        assert done.returncode != 0
        assert "the ranks cannot import what is defined in a notebook" in done.stderr
        assert "pip install cloudpickle" in done.stderr


@pytest.mark.launch
def test_an_inner_function(tmp_path: Path) -> None:
    """`mpicoll.spawn` is callable although a module has a similar name."""
    done = python(
        tmp_path,
        """
import sys
import mpicoll
from mpicoll._launch.spawn import RankRaised
import mpicoll._launch.spawn
def main(word):
    mpicoll.spawn(lambda rank, n: sys.stdout.write(f"{word} {rank} {n}\\n"), args=(7,), nprocs=2)
if __name__ == "__main__": main("lambda")
""",
    )
    assert sorted(done.stdout.splitlines()) == ["lambda 0 7", "lambda 1 7"], done.stderr

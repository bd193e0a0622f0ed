"""What a user reads after a mistake: the last line says which rank, and what is wrong, and there are at most 15 lines."""

import re
from pathlib import Path

import pytest

from tests.launch.jobs import run

pytestmark = pytest.mark.launch

MOST_LINES = 15
HEAD = """
import ctypes, os, signal, sys, threading, time
from datetime import timedelta
import torch, mpicoll as dist
from mpicoll import rpc
one = torch.ones(1)
dist.init_process_group()
dist.group.WORLD.set_timeout(timedelta(seconds=4))  # for the mistake; programs may start many seconds apart
rank = dist.get_rank()
dist.all_reduce(one)
"""
ON_1 = "if rank == 1: {}\ndist.all_reduce(one)"
EMPTY = "raise ValueError('batch 17 is empty')"
TIMEOUT = r"exceeded the group's timeout of 4 s: no end after \d\.\d s"
CALL = r"number 1, all_reduce\(SUM, float32, 1 element\)"
LAST = rf"its last collective on this group is {CALL}, which has ended; its process \d+ runs"
EXPIRED = r"has not come: OperationTimeout: {} on group '0' \(rank 0 of 2\): Timed out: .* Rank 1 has not come: " + LAST
ORDER = "All ranks must call the same collectives in the same order"
# Where MPICH itself ends the job, it does not know the calls.


def differ(operation: str, what: str, zero: str, one: str) -> str:
    zero, one = (re.escape(f"{operation}({words})") for words in (zero, one))
    return f".*the ranks' calls of {operation} differ in {what}. Rank 0: {zero}; rank 1: {one}. All ranks must agree on {what}"


# mistake: (the program after a good all_reduce, the rank of the last line, what that says after the rank)
MISTAKES = {
    "exception": (ON_1.format(EMPTY), "1", "ValueError: batch 17 is empty"),
    "exception on all ranks": (EMPTY, "[01]", "ValueError: batch 17 is empty"),
    "exception in a thread": (
        "if rank: threading.Thread(target=exec, args=(" + repr(EMPTY) + ",)).start()\ndist.recv(one, 1 - rank)",
        "1",
        r"ValueError: batch 17 is empty(; it was in recv .*)?",  # if the watchdog has looked meanwhile
    ),
    "sys.exit": (ON_1.format("sys.exit(3)"), "1", "exit status 3"),
    "one batch fewer": (
        "for _ in range(2 - rank): dist.all_reduce(one)",
        "1",
        "has not come to all_reduce: its program has ended, after 2 collectives .*. On rank 0 all_reduce can never end",
    ),
    "os._exit": (ON_1.format("os._exit(0)"), "1", "exit status 0 before the end of its program, .* without MPI_Finalize(; .*)?"),
    "killed": (ON_1.format("os.kill(os.getpid(), signal.SIGKILL)"), "1", "killed by SIGKILL.*"),
    "crash": (ON_1.format("ctypes.string_at(0)"), "1", "killed by SIGSEGV.*"),
    "sizes": (
        "dist.all_reduce(torch.ones(2 + rank))",
        "[01]",
        differ("all_reduce", "the number of elements", "SUM, float32, 2 elements", "SUM, float32, 3 elements"),
    ),
    "large sizes": (
        "dist.all_reduce(torch.ones((1 + rank) << 20))",
        "[01]",
        differ("all_reduce", "the number of elements", "SUM, float32, 1048576 elements", "SUM, float32, 2097152 elements"),
    ),
    "dtypes": (
        "dist.all_reduce(torch.ones(4, dtype=torch.float64 if rank else torch.float32))",
        "[01]",
        differ("all_reduce", "the dtype", "SUM, float32, 4 elements", "SUM, float64, 4 elements"),
    ),
    "collectives": (
        "dist.all_reduce(one) if rank else dist.barrier()\ntime.sleep(60)",
        "[01]",
        rf".*the ranks call different collectives. Rank 0: barrier\(\); rank 1: all_reduce\(.*\). {ORDER}",
    ),
    "roots": (
        "dist.broadcast(torch.ones(4), src=rank)\ntime.sleep(60)",
        "[01]",
        differ("broadcast", "the root", "float32, 4 elements, root 0", "float32, 4 elements, root 1"),
    ),
    "reductions": (
        "dist.all_reduce(one, op=dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)\ntime.sleep(60)",
        "[01]",
        differ("all_reduce", "the reduction", "SUM, float32, 1 element", "MAX, float32, 1 element"),
    ),
    "late": (ON_1.format("time.sleep(60)"), "1", f"has not come to all_reduce: {LAST}. On rank 0 all_reduce {TIMEOUT}"),
    "both receive": ("dist.recv(one, 1 - rank)", "[01]", f"is the other side of recv: {LAST}. On rank [01] recv {TIMEOUT}"),
    "no such rank": ("dist.send(one, dst=2)", "[01]", r"ValueError: send: dst: global rank 2 is not in the group, .* \[0, 1\]"),
    "no answer": (
        "dist.all_reduce(torch.ones(2, dtype=torch.bool), op=dist.ReduceOp.AVG)",
        "[01]",
        "UnsupportedReduction: all_reduce: AVG on torch.bool: it needs a number; cast it first, .*",
    ),
    "too long": (
        "dist.recv(torch.ones(4), src=0) if rank else dist.send(torch.ones(5), dst=1)\ntime.sleep(60)",
        "1",
        r"TruncationError: recv .* the message is longer than the tensor .* of 16 bytes \(shape \(4,\), .*",
    ),
    "refused": (
        "dist.all_gather([torch.ones(1)] * (2 - rank), one)",
        "1",
        "ValueError: all_gather: tensor_list has 1 tensors, the group has 2 ranks; it needs one for each",
    ),
    "group of some": (
        "if rank == 0: dist.new_group([0, 1], timeout=timedelta(seconds=3))\ntime.sleep(60)",
        "1",
        r"has not come: OperationTimeout: new_group .*: rank 1 did not come within the timeout of 3 s",
    ),
    "late to a barrier": (ON_1.format("time.sleep(60)").replace("all_reduce(one)", "barrier()"), "1", EXPIRED.format("barrier")),
    "late to a Work": (
        "time.sleep(60) if rank == 1 else dist.all_reduce(one, async_op=True).wait()",
        "1",
        EXPIRED.format("all_reduce"),
    ),
    "late to a Work in a thread": (
        "if rank == 0: threading.Thread(target=dist.all_reduce(one, async_op=True).wait).start()\ntime.sleep(60)",
        "1",
        EXPIRED.format("all_reduce"),
    ),
    "ends before a Work": (
        "if rank == 0: dist.all_reduce(one, async_op=True).wait()",
        "1",
        r"has not come: OperationTimeout: .* it can never end: Rank 1 has not come: its program has ended, .*",
    ),
    "sends nothing": (
        "time.sleep(60) if rank == 1 else dist.irecv(one).wait()",
        "1",
        rf"has not come: OperationTimeout: irecv .* It waits for any rank\. Rank 1 is another side: {LAST}",
    ),
    "late in a world of another order": (
        "from mpi4py import MPI\ndist.destroy_process_group()\n"
        "dist.init_process_group(comm=MPI.COMM_WORLD.Split(0, -rank), timeout=timedelta(seconds=4))\n"
        "time.sleep(60) if rank == 0 else dist.all_reduce(one, async_op=True).wait()",
        "0",
        r"has not come: OperationTimeout: all_reduce on group '0' \(rank 0 of 2\): .*Rank 1 has not come: .*",
    ),
    "no group": (
        "dist.destroy_process_group()\ndist.all_reduce(one)",
        "[01]",
        "ValueError: Default process group has not been initialized, please make sure to call init_process_group.",
    ),
    "RPC to nobody": (
        "rpc.init_rpc(f'worker{rank}')\nrpc.rpc_sync('worker7', torch.ones, (1,))",
        "[01]",
        "RuntimeError: .* unknown destination worker 'worker7'; the workers are 'worker0', 'worker1'",
    ),
    "NCCL": (
        "dist.destroy_process_group()\ndist.init_process_group('nccl')",
        "[01]",
        "RuntimeError: Distributed package doesn't have NCCL built in",
    ),
}
ALWAYS = ("exception on all ranks", "crash", "os._exit", "sizes", "collectives", "no group")  # the others: --runslow


@pytest.mark.parametrize("mistake", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in MISTAKES])
def test_the_last_line(mistake: str, tmp_path: Path) -> None:
    program, rank, what = MISTAKES[mistake]
    ended(tmp_path, rank, what, "-c", HEAD + program)


BACKWARD = """
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
loss = model(one).sum()
time.sleep(60) if rank == 1 else loss.backward()
"""


def test_the_last_line_of_a_backward(tmp_path: Path) -> None:
    """torch makes a RuntimeError of the OperationTimeout, and a long traceback of its own."""
    last = run(tmp_path, "--quiet", "-n", "2", "-c", HEAD + BACKWARD).stderr.splitlines()[-1]
    said = r"has not come: RuntimeError: .*OperationTimeout: all_reduce on group '0' .* Rank 1 has not come: .*"
    assert re.fullmatch(rf"mpicoll\.run: rank 1 of 2 on \S+: {said}", last), last


@pytest.mark.parametrize(
    ("what", "cause"),
    [
        ("time.sleep(60)", f"has not come to all_reduce: {LAST}. On rank 0 all_reduce {TIMEOUT}"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL.*"),
    ],
)
def test_of_many_ranks_that_wait_one_speaks(what: str, cause: str, tmp_path: Path) -> None:
    """Each of 47 ranks printed three lines, before mpiexec had noticed that one had been killed."""
    program = HEAD + f"if rank == 2: {what}\ndist.all_reduce(one)"
    said = run(tmp_path, "--quiet", "-n", "5", "-c", program, OMP_NUM_THREADS="1").stderr.splitlines()
    assert re.fullmatch(rf"mpicoll\.run: rank 2 of 5 on \S+: {cause}", said[-1]), "\n".join(said)
    assert len(said) <= 6, "\n".join(said)


OWN_RANKS = """
import torch.multiprocessing as mp, torch.distributed as dist
def work(rank):
    dist.init_process_group("mpi", rank=rank, world_size=2)
if __name__ == "__main__":
    """
PROCESSES = """context = mp.get_context('{}')
    processes = [context.Process(target=work, args=(rank,)) for rank in range(2)]
    for each in processes: each.start()
    for each in processes: each.join()"""
STARTS = {"mp.spawn": "mp.spawn(work, nprocs=2)", **{name: PROCESSES.format(name) for name in ("fork", "spawn", "forkserver")}}


@pytest.mark.parametrize("how", [name if name == "fork" else pytest.param(name, marks=pytest.mark.slow) for name in STARTS])
def test_a_program_that_starts_ranks_of_its_own(how: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_RANKS + STARTS[how])
    why = r"LaunchError: process \d+ (was started by a rank, not by mpiexec|has no connection to mpiexec).*"
    ended(tmp_path, "[01]", why, "own.py")


ONE_PROCESS = """
import ctypes, multiprocessing, torch, mpicoll as dist
context = multiprocessing.get_context("fork")
has_begun, is_refused = context.Event(), context.Event()
def communicates():
    dist.init_process_group()
    has_begun.set()
    is_refused.wait()
    dist.all_reduce(one := torch.ones(1))
    print(f"{one.item():.0f} ranks\\n", end="", flush=True)
    dist.destroy_process_group()
    from mpi4py import MPI
    MPI.Finalize()
    ctypes.CDLL(None).exit(0)  # with the functions of C's atexit, by which MPICH takes leave of Hydra: multiprocessing skips them
def catches():
    try: dist.init_process_group()
    except RuntimeError: is_refused.set()
processes = [context.Process(target=target) for target in (communicates, catches)]
processes[0].start()
has_begun.wait()
processes[1].start()
for each in processes: each.join()
"""


def test_one_process_of_a_rank_communicates_and_another_catches_its_refusal(tmp_path: Path) -> None:
    done = run(tmp_path, "-n", "2", "-c", ONE_PROCESS, OMP_NUM_THREADS="1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "2 ranks\n" * 2, "")


def ended(folder: Path, rank: str, what: str, *words: str) -> None:
    done = run(folder, "-n", "2", *words, OMP_NUM_THREADS="1")
    said = (done.stdout + done.stderr).splitlines()
    assert done.returncode != 0
    assert re.fullmatch(rf"mpicoll\.run: rank {rank} of 2 on \S+: {what}", said[-1]), "\n".join(said)
    assert len(said) <= MOST_LINES, "\n".join(said)

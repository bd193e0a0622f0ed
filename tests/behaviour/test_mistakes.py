"""What a user reads after a mistake: the last line says which rank, and what is wrong, and there are at most 15 lines.

Each mistake is a function of scripts/mistakes.py, run by `mpicoll run` with two ranks.
"""

import re
from pathlib import Path

import pytest

from tests.launch.jobs import run
from tests.support import ROOT, is_open_mpi

pytestmark = pytest.mark.launch

SCRIPT = str(ROOT / "tests" / "behaviour" / "scripts" / "mistakes.py")
MOST_LINES = 15
TIMEOUT = "exceeded the group's timeout of 4 s: no end after [45].. s"
LAST = (
    r"its last collective on this group is number 1, all_reduce\(SUM, float32, 1 element\), which has ended; its process \d+ runs"
)
ORDER = "All ranks must call the same collectives in the same order"
# Where MPICH itself ends the job, it does not know the calls.
TRUNCATED = "Fatal error in internal_Allreduce_c: Message truncated .*; with MPICOLL_CHECK=1 both are named|.* both are named.*"


def differ(operation: str, what: str, zero: str, one: str) -> str:
    zero, one = (re.escape(f"{operation}({words})") for words in (zero, one))
    return f"the ranks' calls of {operation} differ in {what}. Rank 0: {zero}; rank 1: {one}. All ranks must agree on {what}"


# mistake: (the rank of the last line, and what that says after the rank)
LAST_LINES = {
    "exception": ("1", "ValueError: batch 17 is empty"),
    "exception_on_all_ranks": ("[01]", "ValueError: no such data set"),
    "exception_in_a_thread": ("1", "ValueError: batch 17 is empty"),
    "exit_3": ("1", "exit status 3"),
    "one_batch_fewer": ("0", r"all_reduce can never end: waits for rank 1, whose program has ended \(after 2 collectives .*"),
    "os_exit_0": ("1", "exit status 0 before the end of its program, by os._exit"),
    "killed": ("1", "killed by SIGKILL.*"),
    "crash": ("1", "killed by SIGSEGV.*"),
    "sizes": (
        "[01]",
        ".*" + differ("all_reduce", "the number of elements", "SUM, float32, 2 elements", "SUM, float32, 3 elements"),
    ),
    "large_sizes": (
        "[01]",
        ".*" + differ("all_reduce", "the number of elements", "SUM, float32, 1048576 elements", "SUM, float32, 2097152 elements"),
    ),
    "dtypes": ("[01]", ".*" + differ("all_reduce", "the dtype", "SUM, float32, 4 elements", "SUM, float64, 4 elements")),
    "collectives": (
        "[01]",
        rf".*the ranks call different collectives. Rank 0: barrier\(\); rank 1: all_reduce\(.*\). {ORDER}",
    ),
    "roots": ("[01]", ".*" + differ("broadcast", "the root", "float32, 4 elements, root 0", "float32, 4 elements, root 1")),
    "reductions": ("[01]", ".*" + differ("all_reduce", "the reduction", "SUM, float32, 1 element", "MAX, float32, 1 element")),
    "late": ("0", f"all_reduce {TIMEOUT}. Rank 1 has not come: {LAST}"),
    "both_receive": ("[01]", f"recv {TIMEOUT}. Rank [01] is the other side: {LAST}"),
    "no_such_rank": ("[01]", r"ValueError: send: dst: global rank 2 is not in the group, which has ranks \[0, 1\]"),
    "no_answer": ("[01]", "UnsupportedReduction: all_reduce: AVG on torch.bool: it needs a number; cast it first, .*"),
    "too_long": ("1", r"TruncationError: recv .* the message is longer than the tensor .* of 16 bytes \(shape \(4,\), .*"),
    "refused": ("1", "ValueError: all_gather: tensor_list has 1 tensors, the group has 2 ranks; it needs one for each"),
    "group_of_some": ("0", "OperationTimeout: new_group .*: rank 1 did not come within the timeout of 3 s"),
    "no_init": (
        "[01]",
        "ValueError: Default process group has not been initialized, please make sure to call init_process_group.",
    ),
    "rpc_to_nobody": ("[01]", "RuntimeError: .* unknown destination worker 'worker7'; the workers are 'worker0', 'worker1'"),
    "nccl": ("[01]", "RuntimeError: Distributed package doesn't have NCCL built in"),
}


ALWAYS = ("exception_on_all_ranks", "crash", "os_exit_0", "sizes", "collectives", "no_init")  # the others: --runslow


@pytest.mark.parametrize(
    "mistake", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in LAST_LINES]
)
def test_the_last_line(mistake: str, tmp_path: Path) -> None:
    rank, what = LAST_LINES[mistake]
    if mistake in ("sizes", "dtypes") and not is_open_mpi():
        what = TRUNCATED
    done = run(tmp_path, "-n", "2", SCRIPT, mistake, OMP_NUM_THREADS="1")
    said = (done.stdout + done.stderr).splitlines()
    assert done.returncode != 0
    assert re.fullmatch(rf"mpicoll\.run: rank {rank} of 2 on \S+: {what}", said[-1]), "\n".join(said)
    assert len(said) <= MOST_LINES, "\n".join(said)


OWN_RANKS = """
import torch.multiprocessing
import torch.distributed as dist

def work(rank):
    dist.init_process_group("mpi", rank=rank, world_size=2)

if __name__ == "__main__":
    torch.multiprocessing.spawn(work, nprocs=2)
"""


@pytest.mark.slow
def test_a_program_that_starts_ranks_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_RANKS)
    said = run(tmp_path, "-n", "2", "own.py", OMP_NUM_THREADS="1").stderr.splitlines()
    why = r"process \d+ (was started by a rank, not by mpiexec|has no connection to mpiexec).*"
    assert re.fullmatch(rf"mpicoll\.run: rank [01] of 2 on \S+: LaunchError: {why}", said[-1]), "\n".join(said)
    assert len(said) <= MOST_LINES, "\n".join(said)

"""Standard error of mpiexec without its reports of a failure, in whatever parts it comes."""

import os
import signal
import threading
import time
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from mpicoll._launch import supervisor
from mpicoll._launch.banners import DASHES as RULE
from mpicoll._launch.banners import Output

ABORT = RULE + b"\nMPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD\n\nNOTE: ...\n" + RULE + b"\n"
ENDED = RULE + b"\nprterun has exited due to process rank 1 with PID 0 on node a calling\n" + RULE + b"\n"
OF_MPICH = b"Abort(1) on node 0 (rank 0 in comm 0): application called MPI_Abort(MPI_COMM_WORLD, 1) - process 0\n"
FATAL = (
    b"Abort(945368462) on node 1 (rank 1 in comm 480): Fatal error in internal_Allreduce_c: Message truncated, error stack:\n"
    b"internal_Allreduce_c(342).........: MPI_Allreduce_c(count=3) failed\nMPID_Allreduce(483)..: \n"
    b"MPIDIG_recv_type_init(74).........: Message from rank 0 truncated\n"
)
HYDRA = (
    b"\n" + b"=" * 83 + b"\n=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n=   EXIT CODE: 9\n" + b"=" * 83 + b"\n"
    b"YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)\n"
    b"This typically refers to a problem with your application.\nPlease see the FAQ page for debugging suggestions\n"
)
REPORTS = ABORT, ENDED, OF_MPICH, FATAL, HYDRA
OWN = (
    b"epoch 1\n", b"10 %\r20 %\r\n", b"-----\n", RULE + b"\nmy table\n" + RULE + b"\n1 2\n", b"Abort(1) of a transaction\n",
    b"a\n\nb\n", b"\n", b"\1\0\2\n\0\0\3\n", b"=" * 83 + b"\n", b"mpicoll: rank 1 of 2 (a): here\n", b"Please see below\n",
    RULE + b"-\nlonger\n", b"Aborting\n",
)  # fmt: skip


@given(st.lists(st.sampled_from([*REPORTS, *OWN]), max_size=6), st.booleans(), st.randoms(use_true_random=False))
def test_only_reports_are_kept_back(texts: list[bytes], explained: bool, random: object) -> None:
    whole = b"".join(text + b"\0" * (text in (ABORT, ENDED)) for text in texts)
    ends = sorted(random.randrange(len(whole) + 1) for _ in range(4))  # type: ignore[attr-defined]
    parts = [whole[a:b] for a, b in zip([0, *ends], [*ends, len(whole)], strict=True) if a < b]
    own, reports = (b"".join(text for text in texts if (text in REPORTS) is kind) for kind in (False, True))
    errors = Output(-1)
    said = b"".join(map(errors.sort, parts))
    assert said + errors.rest(explained) == own + (b"" if explained else reports)


@given(st.lists(st.sampled_from([HYDRA, ABORT, FATAL, *OWN]), max_size=4))
def test_of_standard_output_only_the_box_of_hydra(texts: list[bytes]) -> None:
    output = Output(-1, target=1)
    said = b"".join(map(output.sort, texts))
    assert said + output.rest(explained=True) == b"".join(text for text in texts if text != HYDRA)


def test_nobody_reads() -> None:
    (source, given_), (taken, target) = os.pipe(), os.pipe()
    os.close(taken)
    os.write(given_, b"a line\n")
    os.close(given_)
    Output(source, target).pass_on()
    os.close(target)


def test_a_reader_that_is_slow() -> None:
    """More than a pipe holds, into one that does not block."""
    (source, given_), (taken, target) = os.pipe(), os.pipe()
    os.set_blocking(target, False)
    whole = b"0123456789\n" * 30_000
    thread = threading.Thread(target=Output(source, target).pass_on)
    thread.start()
    with os.fdopen(given_, "wb") as file:
        writer = threading.Thread(target=file.write, args=(whole,))
        writer.start()
        time.sleep(0.2)
        said = b""
        while len(said) < len(whole) - 60_000:
            said += os.read(taken, 1 << 16)
        writer.join()
    while len(said) < len(whole):
        said += os.read(taken, 1 << 16)
    thread.join()
    assert said == whole
    for descriptor in (taken, target):
        os.close(descriptor)


def test_where_mpich_has_ended_the_job() -> None:
    """The first of them counts, with the last line of its stack."""
    errors = Output(-1)
    assert (
        errors.sort(FATAL + b"Abort(15) on node 0 (rank 0 in comm 480): Fatal error in internal_Recv: Other MPI error\n") == b""
    )
    text = "Fatal error in internal_Allreduce_c: Message truncated (Message from rank 0 truncated)"
    assert errors.fatal == (1, text, 142)


def test_the_beginning_of_a_line_does_not_wait() -> None:
    errors = Output(-1)
    for text in (b"10 %", b"\r20 %", b"...\n", b"Epoch\n", b"Abort the run? [y/n] ", b"\n", b"\r[rank0] train: 50 %", b"\n"):
        assert errors.sort(text) + errors.beginning() == text
    assert Output(-1).sort(b"\n") == b""
    errors = Output(-1)
    assert errors.sort(b"loading\n\n") == b"loading\n"
    assert errors.sort(b"Continue? ") == b""
    assert errors.beginning() == b"\nContinue? "
    errors = Output(-1)
    for text in (RULE + b"\n", b"MPI_ABORT was invoked on rank 1\n", b"the rest of"):  # a report
        assert errors.sort(text) + errors.beginning() == b""


def test_a_prompt_is_passed_on() -> None:
    (source, given_), (taken, target) = os.pipe(), os.pipe()
    thread = threading.Thread(target=Output(source, target).pass_on)
    thread.start()
    os.write(given_, b"Continue? ")
    assert os.read(taken, 100) == b"Continue? "
    os.close(given_)
    thread.join()
    for descriptor in (taken, target):
        os.close(descriptor)


def test_a_rule_before_a_report() -> None:
    errors = Output(-1)
    assert errors.sort(RULE + b"\n" + ABORT) == RULE + b"\n"
    assert errors.rest(explained=False) == ABORT


def test_the_stack_of_a_crash_shows_the_program_only() -> None:
    """In the parts in which faulthandler writes it. mpiexec may pass on each of them alone."""
    program = b"Fatal Python error: ", b"Segmentation fault", b"\n\n", b"  File ", b'"a.py"', b", line ", b"2", b" in f", b"\n"
    launcher = b"  File ", b'"/x/mpicoll/_launch/rank.py"', b", line ", b"5", b" in main", b"\n"
    errors = Output(-1)
    said = b"".join(map(errors.sort, (*program, *launcher, b"\nExtension modules: ", b"numpy", b" (total: 1)\n")))
    assert said + errors.rest(explained=True) == b"".join(program) + b"\n"


def traceback_of(rank: int, text: str) -> bytes:
    lines = ["Traceback (most recent call last):\n", '  File "a.py", line 1\n', "    f()\n", f"ValueError: {text}\n"]
    return b"".join(f"[rank{rank}]: {line}".encode() for line in lines)


@given(st.randoms(use_true_random=False))
def test_a_traceback_is_printed_once(random: object) -> None:
    """Ranks 0, 1 and 3 say the same, up to their numbers; the lines of all ranks come mixed."""
    texts = {0: "f (rank 0 of 4)", 1: "f (rank 1 of 4)", 2: "g (rank 2 of 4)", 3: "f (rank 3 of 4)"}
    lines = {rank: traceback_of(rank, text).splitlines(keepends=True) for rank, text in texts.items()}
    errors, said = Output(-1), b"".join([])
    while any(lines.values()):
        said += errors.sort(lines[random.choice([rank for rank in lines if lines[rank]])].pop(0))  # type: ignore[attr-defined]
    said += errors.rest(explained=True)
    assert said.count(b"ValueError: f") in (1, 3)  # 3: rank 2 was the first
    assert said.count(b"ValueError: g (rank 2 of 4)") == 1
    if said.count(b"ValueError: f") == 1:
        assert said.endswith(b": the same\n")
        assert said.count(b"\n") == 9


def test_errors_of_several_lines() -> None:
    errors, first = Output(-1), traceback_of(0, "the disk of this rank:") + b"[rank0]: full\n"
    assert errors.sort(first) == first
    assert errors.sort(traceback_of(1, "the disk of this rank:")) == b""
    assert errors.sort(traceback_of(2, "the disk of this rank:") + b"[rank2]: full\n") == b""
    assert errors.sort(b"[rank1]: no such file\n") == traceback_of(1, "the disk of this rank:") + b"[rank1]: no such file\n"
    assert errors.rest(explained=True) == b"[rank2]: the same\n"


def test_the_empty_lines_of_a_traceback() -> None:
    """A chain has them in the middle, and the error of a DataLoader's worker at the end. Of a rank that says the same: none."""
    errors, cause = Output(-1), b"[rank%d]: KeyError: 1\n\n[rank%d]: During handling of the above exception, ...\n\n"
    chain = [traceback_of(rank, "a") + cause % (rank, rank) + traceback_of(rank, "b") + b"\n" for rank in (0, 1)]
    assert errors.sort(chain[0]) == chain[0][:-1]
    assert errors.sort(chain[1] + ABORT) == b""
    assert errors.rest(explained=True) == b"[rank1]: the same\n"


def test_a_program_that_goes_on_after_a_traceback_says_all() -> None:
    errors, texts = Output(-1), [traceback_of(rank, text) for text in ("a", "b") for rank in (0, 1)]
    assert errors.sort(b"".join(texts)) == texts[0] + b"[rank1]: the same\n" + b"".join(texts[2:])


def test_what_a_program_says_of_its_ranks_is_printed() -> None:
    errors = Output(-1)
    for rank in range(3):
        line = b"[rank%d]: epoch 1\n" % rank
        assert errors.sort(line) == line


def test_a_signal_ends_the_wait_for_a_slow_reader_and_is_not_lost() -> None:
    """`mpicoll run --max-restarts` would start the job again otherwise."""
    stop = threading.Event()
    (thread := threading.Thread(target=stop.wait)).start()
    signals = SimpleNamespace(read=lambda: [SimpleNamespace(si_signo=signal.SIGINT)])
    job = SimpleNamespace(outputs={2: SimpleNamespace(writing=True)}, signals=signals, told_by=0, told_at=0)
    supervisor._Job._wait_for_output(job, [thread])  # type: ignore[arg-type]
    stop.set()
    assert job.told_by == signal.SIGINT
    assert job.told_at

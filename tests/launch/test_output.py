"""Standard error of mpiexec without its reports of a failure, in whatever parts it comes."""

import os
import signal
import threading
import time
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from mpicoll._launch import supervisor
from mpicoll._launch.output import DASHES as RULE
from mpicoll._launch.output import Output, fatal

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


@given(st.lists(st.sampled_from([*REPORTS, *OWN]), max_size=6), st.randoms(use_true_random=False))
def test_only_reports_are_kept_back(texts: list[bytes], random: object) -> None:
    whole = b"".join(text + b"\0" * (text in (ABORT, ENDED)) for text in texts)
    ends = sorted(random.randrange(len(whole) + 1) for _ in range(4))  # type: ignore[attr-defined]
    parts = [whole[a:b] for a, b in zip([0, *ends], [*ends, len(whole)], strict=True) if a < b]
    own, reports = (b"".join(text for text in texts if (text in REPORTS) is kind) for kind in (False, True))
    errors = Output(2)
    assert b"".join(map(errors.sort, parts)) + errors.rest() == own
    assert errors.kept.replace(b"\0", b"") == reports


@given(st.lists(st.sampled_from([HYDRA, ABORT, FATAL, *OWN]), max_size=4))
def test_of_standard_output_only_the_box_of_hydra(texts: list[bytes]) -> None:
    output = Output(1)
    assert b"".join(map(output.sort, texts)) + output.rest() == b"".join(text for text in texts if text != HYDRA)


def start(target: int) -> tuple[Output, int]:
    """An Output for this file descriptor, and the end of its pipe that is written."""
    output = Output(2)
    output._target, given_ = target, os.dup(output.pipe)
    output.start()
    return output, given_


def test_nobody_reads() -> None:
    taken, target = os.pipe()
    os.close(taken)
    output, given_ = start(target)
    os.write(given_, b"a line\n")
    os.close(given_)
    output.thread.join()
    os.close(target)


def test_a_reader_that_is_slow() -> None:
    """More than a pipe holds, into one that does not block."""
    taken, target = os.pipe()
    os.set_blocking(target, False)
    whole = b"0123456789\n" * 30_000
    output, given_ = start(target)
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
    output.thread.join()
    assert said == whole
    for descriptor in (taken, target):
        os.close(descriptor)


def test_where_mpich_has_ended_the_job() -> None:
    """The first of them counts, with the last line of its stack."""
    errors = Output(2)
    other = b"Abort(15) on node 0 (rank 0 in comm 480): Fatal error in internal_Recv: Other MPI error\n"
    assert errors.sort(OF_MPICH + FATAL + other) + errors.rest() == b""
    text = "Fatal error in internal_Allreduce_c: Message truncated (Message from rank 0 truncated)"
    assert fatal(errors.kept) == (1, text, 142)
    assert fatal(OF_MPICH + other) == (0, "Fatal error in internal_Recv: Other MPI error", 15)
    assert fatal(OF_MPICH) is None


def test_the_beginning_of_a_line_does_not_wait() -> None:
    errors = Output(2)
    for text in (b"10 %", b"\r20 %", b"...\n", b"Epoch\n", b"Abort the run? [y/n] ", b"\n", b"\r[rank0] train: 50 %", b"\n"):
        assert errors.sort(text) + errors.rest() == text
    assert Output(2).sort(b"\n") == b""
    errors = Output(2)
    assert errors.sort(b"loading\n\n") == b"loading\n"
    assert errors.sort(b"Continue? ") == b""
    assert errors.rest() == b"\nContinue? "


def test_a_prompt_is_passed_on() -> None:
    taken, target = os.pipe()
    output, given_ = start(target)
    os.write(given_, b"Continue? ")
    assert os.read(taken, 100) == b"Continue? "
    os.close(given_)
    output.thread.join()
    for descriptor in (taken, target):
        os.close(descriptor)


def test_a_rule_before_a_report() -> None:
    errors = Output(2)
    assert errors.sort(RULE + b"\n" + ABORT) == RULE + b"\n"
    assert errors.rest() == b""
    assert errors.kept == ABORT


def test_the_stack_of_a_crash_shows_the_program_only() -> None:
    """In the parts in which faulthandler writes it. mpiexec may pass on each of them alone."""
    program = b"Fatal Python error: ", b"Segmentation fault", b"\n\n", b"  File ", b'"a.py"', b", line ", b"2", b" in f", b"\n"
    launcher = b"  File ", b'"/x/mpicoll/_launch/rank.py"', b", line ", b"5", b" in main", b"\n"
    errors = Output(2)
    said = b"".join(map(errors.sort, (*program, *launcher, b"\nExtension modules: ", b"numpy", b" (total: 1)\n")))
    assert said + errors.rest() == b"".join(program) + b"\n"


def test_a_signal_ends_the_wait_for_a_slow_reader_and_is_not_lost() -> None:
    """`mpicoll run --max-restarts` would start the job again otherwise."""
    stop = threading.Event()
    (thread := threading.Thread(target=stop.wait)).start()
    signals = SimpleNamespace(read=lambda: [SimpleNamespace(si_signo=signal.SIGINT)])
    job = SimpleNamespace(outputs=[SimpleNamespace(writing=True, thread=thread)], signals=signals, told_by=0, told_at=0)
    supervisor._Job._wait_for_output(job)  # type: ignore[arg-type]
    stop.set()
    assert job.told_by == signal.SIGINT
    assert job.told_at

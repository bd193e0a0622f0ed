"""Standard error of mpiexec without its reports of a failure, in whatever parts it comes."""

import os
import threading
import time

from hypothesis import given
from hypothesis import strategies as st

from mpicoll._launch.banners import RULE, StandardError

ABORT = RULE + b"\nMPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD\n\nNOTE: ...\n" + RULE + b"\n"
ENDED = RULE + b"\nprterun has exited due to process rank 1 with PID 0 on node a calling\n" + RULE + b"\n"
OF_MPICH = b"Abort(1) on node 0 (rank 0 in comm 0): application called MPI_Abort(MPI_COMM_WORLD, 1) - process 0\n"
REPORTS = ABORT, ENDED, OF_MPICH
OWN = (
    b"epoch 1\n", b"10 %\r20 %\r\n", b"-----\n", RULE + b"\nmy table\n" + RULE + b"\n1 2\n", b"Abort(1) of a transaction\n",
    b"a\n\nb\n", RULE + b"-\nlonger\n", b"Aborting\n",
)  # fmt: skip


@given(st.lists(st.sampled_from([*REPORTS, *OWN]), max_size=6), st.booleans(), st.randoms(use_true_random=False))
def test_only_reports_are_kept_back(texts: list[bytes], explained: bool, random: object) -> None:
    whole = b"".join(texts) + b"\0"
    ends = sorted(random.randrange(len(whole) + 1) for _ in range(4))  # type: ignore[attr-defined]
    parts = [whole[a:b] for a, b in zip([0, *ends], [*ends, len(whole)], strict=True) if a < b]
    own, reports = (b"".join(text for text in texts if (text in REPORTS) is kind) for kind in (False, True))
    errors = StandardError(-1)
    said = b"".join(map(errors.sort, parts))
    assert said + errors.rest(explained) == own + (b"" if explained else reports)


def test_nobody_reads() -> None:
    (source, given_), (taken, target) = os.pipe(), os.pipe()
    os.close(taken)
    os.write(given_, b"a line\n")
    os.close(given_)
    StandardError(source, target).pass_on()
    os.close(source)
    os.close(target)


def test_a_reader_that_is_slow() -> None:
    """More than a pipe holds, into one that does not block."""
    (source, given_), (taken, target) = os.pipe(), os.pipe()
    os.set_blocking(target, False)
    whole = b"0123456789\n" * 30_000
    thread = threading.Thread(target=StandardError(source, target).pass_on)
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
    for descriptor in (source, taken, target):
        os.close(descriptor)


def test_where_mpich_has_ended_the_job() -> None:
    """The first of them counts, and the lines pass."""
    errors = StandardError(-1)
    for rank, where in ((1, b"internal_Allreduce_c: Message truncated, error stack:"), (0, b"internal_Recv: Other MPI error")):
        line = b"Abort(878259598) on node %d (rank 0 in comm 480): Fatal error in %s\n" % (rank, where)
        assert errors.sort(line) == line
    assert errors.fatal == (1, "Fatal error in internal_Allreduce_c: Message truncated")


def test_the_beginning_of_a_line_does_not_wait() -> None:
    errors = StandardError(-1)
    for text in (b"10 %", b"\r20 %", b"...\n", b"Epoch"):
        assert errors.sort(text) == text


def test_a_rule_before_a_report() -> None:
    errors = StandardError(-1)
    assert errors.sort(RULE + b"\n" + ABORT) == RULE + b"\n"
    assert errors.rest(explained=False) == ABORT

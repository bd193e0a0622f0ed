"""Standard error of mpiexec without its reports of a failure, in whatever parts it comes."""

import os
import threading

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


def passed_on(parts: list[bytes], explained: bool) -> bytes:
    (source, given_), (taken, target) = os.pipe(), os.pipe()
    errors = StandardError(source, target)
    for part in parts:
        os.write(given_, part)
        errors.read()
    os.close(given_)
    assert not errors.read()
    errors.end(explained)
    os.close(target)
    with os.fdopen(taken, "rb") as file:
        said = file.read()
    os.close(source)
    return said


@given(st.lists(st.sampled_from([*REPORTS, *OWN]), max_size=6), st.booleans(), st.randoms(use_true_random=False))
def test_only_reports_are_kept_back(texts: list[bytes], explained: bool, random: object) -> None:
    whole = b"".join(texts) + b"\0"
    ends = sorted(random.randrange(len(whole) + 1) for _ in range(4))  # type: ignore[attr-defined]
    parts = [whole[a:b] for a, b in zip([0, *ends], [*ends, len(whole)], strict=True) if a < b]
    own, reports = (b"".join(text for text in texts if (text in REPORTS) is kind) for kind in (False, True))
    assert passed_on(parts, explained) == own + (b"" if explained else reports)


def test_nobody_reads() -> None:
    (source, given_), (taken, target) = os.pipe(), os.pipe()
    os.close(taken)
    os.write(given_, b"a line\n")
    assert StandardError(source, target).read()
    for descriptor in (source, given_, target):
        os.close(descriptor)


def test_a_reader_that_is_slow() -> None:
    (source, given_), (taken, target) = os.pipe(), os.pipe()
    os.set_blocking(target, False)
    whole, errors = b"0123456789\n" * 30_000, StandardError(source, target)
    with os.fdopen(taken, "rb") as file:
        said: list[bytes] = []
        reader = threading.Thread(target=lambda: said.append(file.read()))
        reader.start()
        for begin in range(0, len(whole), 60_000):
            os.write(given_, whole[begin : begin + 60_000])
            errors.read()
        errors.end(explained=True)
        os.close(target)
        reader.join()
    assert said == [whole]
    os.close(source)
    os.close(given_)


def test_where_mpich_has_ended_the_job() -> None:
    """The first of them counts, and the lines pass."""
    errors = StandardError(os.open(os.devnull, os.O_RDONLY), os.open(os.devnull, os.O_WRONLY))
    for rank, where in ((1, b"internal_Allreduce_c: Message truncated, error stack:"), (0, b"internal_Recv: Other MPI error")):
        line = b"Abort(878259598) on node %d (rank 0 in comm 480): Fatal error in %s\n" % (rank, where)
        assert errors._line(line) == line
    assert errors.fatal == (1, "Fatal error in internal_Allreduce_c: Message truncated")


def test_the_beginning_of_a_line_does_not_wait() -> None:
    (source, given_), (taken, target) = os.pipe(), os.pipe()
    errors = StandardError(source, target)
    for text in (b"10 %", b"\r20 %", b"...\n", b"Epoch"):
        os.write(given_, text)
        errors.read()
        assert os.read(taken, 100) == text
    for descriptor in (source, given_, taken, target):
        os.close(descriptor)

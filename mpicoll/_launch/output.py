"""Passes on what mpiexec and the ranks print. What MPI and mpiexec say of a failed job is kept, in case no rank says why.

    ------------------------------------------------------------------     Open MPI: a box between two lines of 74 dashes,
    MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD             and a zero byte behind the last one
    ------------------------------------------------------------------
    Abort(1) on node 1 (rank 1 in comm 0): application called MPI_Abort    MPICH: a line, a stack of C, a box behind an empty line
    =   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES

Of the stack of a crash, the launcher's own calls are kept, too. Complete lines pass at once. What may be the beginning of a
report, and a line without an end, wait until nothing more has come for REST_S; a report is written faster.
"""

from __future__ import annotations

import os
import re
import select
import threading
from typing import NamedTuple

REST_S = 0.05  # for the rest of a line: faulthandler writes lines in parts. A prompt or a progress bar has none
LINE = rb"(?:^|(?<=\0))"  # the beginning of a line
DASHES, EQUALS = b"-" * 74, b"=" * 83
STACK = rb"(?:\w+\(\d+\)\.*: .*\n)*"
# The first words of each report, and the rest of it. Hydra prints its own on standard output, too
HYDRA = (
    (rb"\n?" + EQUALS + rb"\n=   BAD TERMINATION OF ", rb"(?s:.*?)\n" + EQUALS + rb"\n"),
    (rb"YOUR APPLICATION TERMINATED WITH THE EXIT STRING: |This typically refers to a problem with your application\.", rb".*\n"),
    (rb"Please see the FAQ page for debugging suggestions", rb".*\n"),
)
OTHERS = (
    (
        DASHES + rb"\n(?:MPI_ABORT was invoked|Primary job  terminated|"
        rb"(?:prterun|mpirun|mpiexec|orterun) (?:has exited due|detected that|noticed)) ",
        rb"(?s:.*?)\n" + DASHES + rb"\n\0?",
    ),
    (
        rb"Abort\(\d+\) on node \d+ \(rank \d+ in comm \d+\): (?:application called MPI_Abort\(|Fatal error in )",
        rb".*\n" + STACK,
    ),
    (rb"Abort is in progress\.\.\.hit ctrl-c again", rb".*\n"),
    (rb'  File "(?:<frozen runpy>|[^"\n]*/mpicoll/_launch/(?:spawn_)?rank\.py)", line \d+ in ', rb".*\n"),  # of faulthandler
    (rb"Extension modules: ", rb".*\(total: \d+\)\n"),
)
REPORTS = {1: HYDRA, 2: HYDRA + OTHERS}  # by file descriptor
# A line that is not complete, also behind an empty line and a rule, may begin a report
UNFINISHED = rb"\n?(?:(?:" + DASHES + rb"|" + EQUALS + rb")\n)?[^\n\r]*\Z"
FATAL = re.compile(
    rb"^Abort\((\d+)\) on node (\d+) \(rank \d+ in comm \d+\): (Fatal error in .*?),? *(?:error stack:)?\n(" + STACK + rb")",
    re.MULTILINE,
)


class Fatal(NamedTuple):
    """Where MPICH itself has ended the job, why, and with which exit status."""

    rank: int
    text: str
    status: int


def fatal(kept: bytes) -> Fatal | None:
    """The first of these reports in which MPICH itself has ended the job, with the last reason of its stack."""
    if (found := FATAL.search(kept)) is None:
        return None
    reasons = re.findall(rb": (\S.*)\n", found[4])
    text = found[3] + b"".join(b" (%b)" % reason for reason in reasons[-1:])
    return Fatal(int(found[2]), text.decode(errors="replace"), int(found[1]) & 0xFF)


class Output:
    """Passes on what is written into ``pipe``: by mpiexec and the ranks, to standard error, or to standard output.

    In a thread of its own: whoever reads our output may stop reading.

    Attributes:
        pipe: The end for mpiexec.
        kept: Reports of a failure.
        writing: Whether it waits for whoever reads our output.
    """

    def __init__(self, target: int, keeps: bool = True) -> None:
        self._source, self.pipe = os.pipe()
        self.kept, self.writing = b"", False
        self._target, self._keeps = target, keeps
        begins = [begin for begin, _ in REPORTS[target]]
        self._begin = re.compile(LINE + rb"(?:" + b"|".join([*begins, UNFINISHED]) + rb")", re.MULTILINE)
        self._report = re.compile(
            LINE + rb"(?:" + b"|".join(rb"(?:" + begin + rb")" + rest for begin, rest in REPORTS[target]) + rb")", re.MULTILINE
        )
        self._rest = b""  # what may be the beginning of a report
        self._unread = False
        self.thread = threading.Thread(target=self._pass_on, name="mpicoll output", daemon=True)

    def start(self) -> None:
        os.close(self.pipe)
        self.thread.start()

    def _pass_on(self) -> None:
        """If nobody reads our standard output any more, closes the pipe: mpiexec notices that as it would without the pipe."""
        while not (self._unread and self._target == 1):
            if self._rest and not select.select([self._source], [], [], REST_S)[0]:
                self.write(self.rest())
            if not (data := os.read(self._source, 1 << 16)):
                break
            self.write(self.sort(data) if self._keeps else data)
        self.write(self.rest())
        os.close(self._source)

    def sort(self, data: bytes) -> bytes:
        """What of these bytes may be passed on, and of those before them."""
        text = self._rest + data
        begin = self._begin.search(text)
        end = len(text) if begin is None else begin.start()
        self._rest = text[end:]
        return text[:end]

    def rest(self) -> bytes:
        """What has waited, without the reports in it."""
        text, self._rest = self._rest, b""
        return self._report.sub(self._keep, text)

    def _keep(self, report: re.Match[bytes]) -> bytes:
        self.kept += report[0]
        return b""

    def write(self, data: bytes) -> None:
        self.writing = bool(data)
        while data:
            try:
                data = data[os.write(self._target, data) :]
            except BlockingIOError:  # a terminal that another program has changed
                select.select([], [self._target], [])
            except OSError:  # nobody reads it any more; the job goes on
                self._unread = True
                break
        self.writing = False

"""What MPI and mpiexec print on standard error about a failed job: kept back, and printed only if nothing better is known.

    ------------------------------------------------------------------     Open MPI: a box between two lines of 74 dashes,
    MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD             and a zero byte behind the last one
    ------------------------------------------------------------------
    Abort(1) on node 1 (rank 1 in comm 0): application called MPI_Abort    MPICH: a line

All else passes at once, the beginning of a line too unless a report may begin so. A line of 74 dashes waits for the next line.
"""

from __future__ import annotations

import os
import re
import select
import threading

RULE = b"-" * 74
FIRST = re.compile(
    rb"MPI_ABORT was invoked |(prterun|mpirun|mpiexec|orterun) (has exited due|detected that|noticed) |Primary job  terminated "
)
LINES = re.compile(rb"[^\n]*\n|[^\n]+")
LINE = re.compile(rb"Abort\(\d+\) on node \d+ \(rank \d+ in comm \d+\): application called MPI_Abort\(")
FATAL = re.compile(rb"Abort\(\d+\) on node (\d+) \(rank \d+ in comm \d+\): (Fatal error in [^\r\n]*?),? *(error stack:)?\r?\n")


class StandardError:
    """Passes on what comes from a pipe.

    Attributes:
        kept: Reports of a failure, which are kept back.
        fatal: The rank in which MPICH itself has ended the job first, and why.
    """

    def __init__(self, source: int, target: int = 2, keeps: bool = True) -> None:
        self.kept = b""
        self.fatal: tuple[int, str] | None = None
        self._source, self._target, self._keeps = source, target, keeps
        self._guard = threading.Lock()  # guards `kept`, `fatal` and what follows
        self._box: list[bytes] = []  # lines of a box that may still turn out to be none
        self._part = b""  # the beginning of a line that may have to be kept back
        self._within = False  # the beginning of the current line has been passed on

    def pass_on(self) -> None:
        """Passes on until the pipe ends. In a thread of its own: whoever reads our standard error may stop reading."""
        while data := os.read(self._source, 1 << 16):
            self._write(self.sort(data) if self._keeps else data)

    def end(self, explained: bool) -> None:
        """Passes on what has turned out to be no report, and the reports unless the failure is explained."""
        self._write(self.rest(explained))

    def sort(self, data: bytes) -> bytes:
        """What of these bytes may be passed on, and of those before them."""
        with self._guard:
            return b"".join(map(self._line, LINES.findall(self._part + data)))

    def rest(self, explained: bool) -> bytes:
        with self._guard:
            rest = (b"" if explained else self.kept) + b"".join(self._box) + self._part.lstrip(b"\0")
            self.kept, self._box, self._part = b"", [], b""
        return rest

    def _line(self, line: bytes) -> bytes:
        """What may be passed on once this line, or the part of one that has come last, is known."""
        self._part, complete = b"", line.endswith(b"\n")
        if self._within:
            self._within = not complete
            return line
        text = line.strip(b"\0\r\n ")
        if not complete and (self._box or RULE.startswith(text) or b"Abort(".startswith(text[:6])):
            self._part = line
            return b""
        if self._box:
            if len(self._box) == 1 and text == RULE:
                passed, self._box = self._box[0], [line]
                return passed
            self._box.append(line)
            if len(self._box) == 2 and not FIRST.match(text):
                passed, self._box = b"".join(self._box), []
                return passed
            if text == RULE:
                self.kept, self._box = self.kept + b"".join(self._box), []
            return b""
        if text == RULE:
            self._box = [line.lstrip(b"\0")]
            return b""
        if LINE.match(text):
            self.kept += line
            return b""
        if self.fatal is None and (found := FATAL.match(line)):
            self.fatal = int(found[1]), found[2].decode(errors="replace")
        self._within = not complete
        return line.lstrip(b"\0")

    def _write(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self._target, data) :]
            except BlockingIOError:  # a terminal that another program has changed
                select.select([], [self._target], [])
            except OSError:  # nobody reads it any more; the job goes on
                return

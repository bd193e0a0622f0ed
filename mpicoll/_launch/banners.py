"""What MPI and mpiexec print about a failed job: kept back, and printed only if nothing better is known.

    ------------------------------------------------------------------     Open MPI: a box between two lines of 74 dashes,
    MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD             and a zero byte behind the last one
    ------------------------------------------------------------------
    Abort(1) on node 1 (rank 1 in comm 0): application called MPI_Abort    MPICH: a line, a stack of C, a box behind an empty line
    =   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES

The traceback of an uncaught error, lines that begin with "[rank1]: ", is printed for one rank; of others, only what differs.
All else passes at once, the beginning of a line too unless a report may begin so. Empty lines and rules wait for the next line.
"""

from __future__ import annotations

import os
import re
import select
import threading
from typing import NamedTuple

RULES = b"-" * 74, b"=" * 83
FIRST = re.compile(
    rb"MPI_ABORT was invoked |(prterun|mpirun|mpiexec|orterun) (has exited due|detected that|noticed) |Primary job  terminated |"
    rb"=   BAD TERMINATION OF "
)
LINES = re.compile(rb"[^\n]*\n|[^\n]+")
LINE = re.compile(
    rb"Abort\(\d+\) on node \d+ \(rank \d+ in comm \d+\): (application called MPI_Abort\(|Fatal error in )|"
    rb"Abort is in progress\.\.\.hit ctrl-c again|YOUR APPLICATION TERMINATED WITH THE EXIT STRING: |"
    rb"This typically refers to a problem with your application\.$|Please see the FAQ page for debugging suggestions$|"
    rb"mpicoll: rank \d+ of \d+ \([^)]*\): uncaught .*; aborting the job$|"
    rb'File "(<frozen runpy>|[^"]*/mpicoll/_launch/rank\.py)", line \d+ in |'  # of faulthandler, like the next one
    rb"Extension modules: .*\(total: \d+\)$"
)
BEGINNINGS = b"Abort", b"YOUR APPLICATION", b"This typically", b"Please see", b"mpicoll: rank ", b"File ", b"Extension ", *RULES
FATAL = re.compile(rb"Abort\((\d+)\) on node (\d+) \(rank \d+ in comm \d+\): (Fatal error in [^\r\n]*?),? *(error stack:)?$")
STACK = re.compile(rb"\w+\(\d+\)\.*: *(.*)$")
RANK = re.compile(rb"\[rank(\d+)\]: ")
TRACEBACK = b"Traceback (most recent call last):", b"The above exception was the ", b"During handling of the above "
OWN_NUMBER = re.compile(rb"\(rank \d+ of ")


class Fatal(NamedTuple):
    """Where MPICH itself has ended the job, why, and with which exit status."""

    rank: int
    text: str
    status: int


class Tracebacks:
    """The tracebacks of several ranks: of a second one that says the same, nothing is printed."""

    def __init__(self) -> None:
        self._first: int | None = None  # the rank whose traceback is printed
        self._said: dict[int, list[bytes]] = {}  # the lines of a rank, without its number
        self._held: dict[int, list[bytes]] = {}  # the same lines as they have come, where they are not printed
        self._differ: set[int] = set()  # ranks that say something else
        self._open: set[int] = set()  # ranks whose traceback has not come to its last line

    def line(self, rank: int, line: bytes) -> bytes:
        """What may be printed once this line of a rank is known."""
        text = OWN_NUMBER.sub(b"(rank of ", RANK.sub(b"", line))
        if rank not in self._open and not text.startswith(TRACEBACK):
            return line
        self._open.add(rank)
        if not text.startswith((b" ", *TRACEBACK)):  # the error
            self._open.discard(rank)
        said = self._said.setdefault(rank, [])
        said.append(text)
        if self._first is None:
            self._first = rank
        if rank in self._differ or rank == self._first:
            return line
        self._held.setdefault(rank, []).append(line)
        first = self._said[self._first]
        if said == first[: len(said)] or first == said[: len(first)]:
            return b""
        self._differ.add(rank)
        return b"".join(self._held.pop(rank))

    def rest(self) -> bytes:
        """What was not printed although it differs, and which ranks have said the same."""
        first = [] if self._first is None else self._said[self._first]
        same = [rank for rank in sorted(self._held) if self._said[rank] == first[: len(self._said[rank])]]
        rest = b"".join(line for rank, lines in self._held.items() if rank not in same for line in lines)
        self._held.clear()
        return rest + (f"[rank{', '.join(map(str, same))}]: the same\n".encode() if same else b"")


class Output:
    """Passes on what comes from a pipe: standard error of mpiexec, or standard output, on which Hydra prints its box.

    Attributes:
        kept: Reports of a failure, which are kept back.
        fatal: Where MPICH itself has ended the job first.
    """

    def __init__(self, source: int, target: int = 2, keeps: bool = True) -> None:
        self.kept = b""
        self.fatal: Fatal | None = None
        self._source, self._target, self._keeps = source, target, keeps
        self._guard = threading.Lock()  # guards `kept`, `fatal` and what follows
        self._tracebacks = Tracebacks()
        self._box: list[bytes] = []  # lines of a box that may still turn out to be none
        self._part = b""  # the beginning of a line that may have to be kept back
        self._within = False  # the beginning of the current line has been passed on
        self._unread = False
        self._stack = False  # the last line was one of MPICH's stack of C

    def pass_on(self) -> None:
        """Passes on until the pipe ends, and closes it. In a thread of its own: whoever reads our output may stop reading.

        Nobody reads our standard output any more: the pipe is closed, and mpiexec notices that as it would without the pipe.
        """
        while (data := os.read(self._source, 1 << 16)) and not (self._unread and self._target == 1):
            self._write(self.sort(data) if self._keeps else data)
        os.close(self._source)

    def end(self, explained: bool) -> None:
        """Passes on what has turned out to be no report, and the reports unless the failure is explained."""
        self._write(self.rest(explained))

    def sort(self, data: bytes) -> bytes:
        """What of these bytes may be passed on, and of those before them."""
        with self._guard:
            return b"".join(map(self._line, LINES.findall(self._part + data)))

    def rest(self, explained: bool) -> bytes:
        with self._guard:
            rest = b"".join(self._box) + (b"" if explained else self.kept) + self._part.lstrip(b"\0")
            self.kept, self._box, self._part = b"", [], b""
            return self._tracebacks.rest() + rest

    def _line(self, line: bytes) -> bytes:
        """What may be passed on once this line, or the part of one that has come last, is known."""
        self._part, complete = b"", line.endswith(b"\n")
        if self._within:
            self._within = not complete
            return line
        text = line.strip(b"\0\r\n ")
        if not complete and (self._box or self._stack or _may_be_report(text)):
            self._part = line
            return b""
        before, self._box = self._box, []
        if not before or before == [b"\n"]:
            if text == RULES[1]:
                self._box = [*before, line]  # with the empty line
                return b""
            if text == RULES[0] or line == b"\n":
                self._box = [line.lstrip(b"\0")]
                return b"".join(before)
            return b"".join(before) + self._outside(line, text, complete)
        begun = before[-1].strip(b"\0\r\n ") in RULES  # the rule is the last line
        if begun and text in RULES:
            self._box = [line]
            return b"".join(before)
        if begun and not FIRST.match(text):
            return b"".join(before) + self._outside(line, text, complete)
        self._box = [*before, line]
        if text in RULES:
            self.kept, self._box = self.kept + b"".join(self._box), []
        return b""

    def _outside(self, line: bytes, text: bytes, complete: bool) -> bytes:
        """The same for a line outside of a box."""
        if self._stack and (found := STACK.match(text)):
            self.kept += line
            if self.fatal is not None and found[1]:
                text_before, detail = self.fatal.text.partition(" (")[0], found[1].decode(errors="replace")
                self.fatal = self.fatal._replace(text=f"{text_before} ({detail})")
            return b""
        self._stack = False
        if LINE.match(text):
            self.kept += line
            if found := FATAL.match(text):
                self._stack = bool(found[4])
                if self.fatal is None:
                    self.fatal = Fatal(int(found[2]), found[3].decode(errors="replace"), int(found[1]) & 0xFF)
            return b""
        if complete and (found := RANK.match(text)):
            return self._tracebacks.line(int(found[1]), line)
        self._within = not complete
        return line.lstrip(b"\0")

    def _write(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self._target, data) :]
            except BlockingIOError:  # a terminal that another program has changed
                select.select([], [self._target], [])
            except OSError:  # nobody reads it any more; the job goes on
                self._unread = True
                return


def _may_be_report(text: bytes) -> bool:
    return text.startswith(b"[rank") or any(each.startswith(text[: len(each)]) for each in (*BEGINNINGS, b"[rank"))

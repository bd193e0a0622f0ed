"""What MPI and mpiexec print about a failed job: kept back, and printed only if nothing better is known.

    ------------------------------------------------------------------     Open MPI: a box between two lines of 74 dashes,
    MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD             and a zero byte behind the last one
    ------------------------------------------------------------------
    Abort(1) on node 1 (rank 1 in comm 0): application called MPI_Abort    MPICH: a line, a stack of C, a box behind an empty line
    =   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES

The traceback of an uncaught error, lines that begin with "[rank1]: ", is printed for one rank; of others, only what differs.
All else passes at once, the beginning of a line after REST_S. Empty lines and rules wait for what follows.
"""

from __future__ import annotations

import os
import re
import select
import threading
from typing import NamedTuple

DASHES, EQUALS = b"-" * 74, b"=" * 83
BOXES = (  # how they go on behind their first line
    b"MPI_ABORT was invoked ", b"Primary job  terminated ", b"=   BAD TERMINATION OF ",
    *(name + what for name in (b"prterun", b"mpirun", b"mpiexec", b"orterun")
      for what in (b" has exited due", b" detected that", b" noticed ")),
)  # fmt: skip
HYDRA = (
    b"YOUR APPLICATION TERMINATED WITH THE EXIT STRING: ", b"This typically refers to a problem with your application.",
    b"Please see the FAQ page for debugging suggestions",
)  # fmt: skip
CRASH = b"Fatal Python error: "  # of faulthandler
REST_S = 0.05  # for the rest of a line: faulthandler writes lines in parts. A prompt or a progress bar has none
LINES = re.compile(rb"[^\n]*\n|[^\n]+")
LINE = re.compile(
    rb"Abort\(\d+\) on node \d+ \(rank \d+ in comm \d+\): (application called MPI_Abort\(|Fatal error in )|"
    rb"Abort is in progress\.\.\.hit ctrl-c again"
)
CRASH_LINE = re.compile(
    rb'File "(<frozen runpy>|[^"]*/mpicoll/_launch/(spawn_)?rank\.py)", line \d+ in |Extension modules: .*\(total: \d+\)$'
)
FATAL = re.compile(rb"Abort\((\d+)\) on node (\d+) \(rank \d+ in comm \d+\): (Fatal error in [^\r\n]*?),? *(error stack:)?$")
STACK = re.compile(rb"\w+\(\d+\)\.*: *(.*)$")
RANK = re.compile(rb"\[rank(\d+)\]: ")
TRACEBACK = b"Traceback (most recent call last):"
INNER = b"The above exception was the ", b"During handling of the above "
OWN_NUMBER = re.compile(rb"\(rank \d+ of ")


class Fatal(NamedTuple):
    """Where MPICH itself has ended the job, why, and with which exit status."""

    rank: int
    text: str
    status: int


class Tracebacks:
    """The tracebacks of several ranks: of a second one that says the same, nothing is printed. For one traceback of each rank."""

    def __init__(self) -> None:
        self._first: int | None = None  # the rank whose traceback is printed
        self._said: dict[int, list[bytes]] = {}  # all lines of a rank from its traceback on, without its number
        self._held: dict[int, list[bytes]] = {}  # the same lines as they have come, where they are not printed
        self._off = False

    def line(self, rank: int, line: bytes) -> bytes:
        """What may be printed once this line of a rank is known."""
        text = OWN_NUMBER.sub(b"(rank of ", RANK.sub(b"", line))
        begins, said = text.startswith(TRACEBACK), self._said.get(rank)
        if self._off or (said is None and not begins):
            return line
        if said and begins and not said[-1].startswith(INNER):  # a second one: the program goes on after them
            self._off = True
            return self.rest() + line
        said = self._said.setdefault(rank, [])
        said.append(text)
        if self._first is None:
            self._first = rank
        if rank == self._first or (rank not in self._held and len(said) > 1):
            return line
        self._held.setdefault(rank, []).append(line)
        first = self._said[self._first]
        if said == first[: len(said)] or first == said[: len(first)]:
            return b""
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
        writing: Whether it waits for whoever reads our output.
    """

    def __init__(self, source: int, target: int = 2, keeps: bool = True) -> None:
        self.kept = b""
        self.fatal: Fatal | None = None
        self.writing = False
        self._source, self._target, self._keeps = source, target, keeps
        self._rules = (EQUALS,) if target == 1 else (DASHES, EQUALS)
        self._guard = threading.Lock()  # guards `kept`, `fatal` and what follows
        self._tracebacks = Tracebacks()
        self._box: list[bytes] = []  # lines of a box that may still turn out to be none
        self._part = b""  # the beginning of a line
        self._within = False  # the beginning of the current line has been passed on
        self._stack = False  # the last line was one of MPICH's stack of C
        self._of_fatal, self._reason = False, ""  # whether that stack belongs to `fatal`, and its reason alone
        self._crashed = False  # faulthandler has printed its first line
        self._of_rank = False  # the last line began with the number of a rank: empty lines behind it wait, and become one
        self._zero = False  # the last line was the end of a box of Open MPI
        self._unread = False

    def pass_on(self) -> None:
        """Passes on until the pipe ends, and closes it. In a thread of its own: whoever reads our output may stop reading.

        Nobody reads our standard output any more: the pipe is closed, and mpiexec notices that as it would without the pipe.
        """
        while not (self._unread and self._target == 1):
            if self._part and not select.select([self._source], [], [], REST_S)[0]:
                self._write(self.beginning())
            if not (data := os.read(self._source, 1 << 16)):
                break
            self._write(self.sort(data) if self._keeps else data)
        os.close(self._source)

    def end(self, explained: bool) -> None:
        """Passes on what has turned out to be no report, and the reports unless the failure is explained."""
        if not self.writing:  # otherwise nobody reads
            self._write(self.rest(explained))

    def sort(self, data: bytes) -> bytes:
        """What of these bytes may be passed on, and of those before them."""
        with self._guard:
            return b"".join(map(self._line, LINES.findall(self._part + data)))

    def beginning(self) -> bytes:
        """The beginning of a line whose rest has not come, unless it belongs to a report."""
        with self._guard:
            if not self._part or self._stack or (self._box not in ([], [b"\n"]) and not self._begun()):
                return b""
            passed, self._box, self._part = b"".join([*self._box, self._part]), [], b""
            self._within = bool(passed)
            return passed

    def rest(self, explained: bool) -> bytes:
        with self._guard:
            box = [] if self._of_rank and self._box == [b"\n"] else self._box
            rest = b"".join(box) + (b"" if explained else self.kept) + self._part
            self.kept, self._box, self._part = b"", [], b""
            return self._tracebacks.rest() + rest

    def _line(self, line: bytes) -> bytes:
        """What may be passed on once this line, or the part of one that has come last, is known."""
        self._part, complete = b"", line.endswith(b"\n")
        if self._within:
            self._within = not complete
            return line
        if self._zero and not (line := line.lstrip(b"\0")):
            return b""
        self._zero = False
        text = line.strip(b"\r\n ")
        begun = self._begun()
        if not complete and b"\r" not in text:
            self._part = line
            return b""
        before, self._box = self._box, []
        if before and before != [b"\n"] and not begun:  # within a report
            self._box = [*before, line]
            if text in self._rules:
                self.kept, self._box, self._zero = self.kept + b"".join(self._box), [], text == DASHES
            return b""
        if begun and text.startswith(BOXES):
            self._box = [*before, line]
            return b""
        if text in self._rules:
            empty = before if before == [b"\n"] and (text == EQUALS or self._of_rank) else []  # Hydra: an empty line is before it
            self._box = [*empty, line]
            return b"" if empty else b"".join(before)
        if line == b"\n" and not begun:
            self._box = [line]
            return b"" if self._of_rank else b"".join(before)
        if not (said := self._outside(line, text, complete)) and self._of_rank:
            self._box = before
            return b""
        return b"".join(before) + said

    def _begun(self) -> bool:
        """Whether the last line is a rule, which may begin a box."""
        return bool(self._box) and self._box[-1].strip(b"\r\n ") in self._rules

    def _outside(self, line: bytes, text: bytes, complete: bool) -> bytes:
        """The same for a line outside of a box."""
        if text.startswith(HYDRA):
            self.kept += line
            return b""
        if self._target == 2:
            if self._stack and (found := STACK.match(text)):
                self.kept += line
                if self.fatal is not None and self._of_fatal and found[1]:
                    self.fatal = self.fatal._replace(text=f"{self._reason} ({found[1].decode(errors='replace')})")
                return b""
            self._stack = False
            if LINE.match(text) or (self._crashed and CRASH_LINE.match(text)):
                self.kept += line
                if found := FATAL.match(text):
                    self._take_fatal(found)
                return b""
            self._crashed |= text.startswith(CRASH)
            self._of_rank = complete and RANK.match(text) is not None
            if complete and (found := RANK.match(text)):
                return self._tracebacks.line(int(found[1]), line)
        self._within = not complete
        return line

    def _take_fatal(self, found: re.Match[bytes]) -> None:
        self._stack, self._of_fatal = bool(found[4]), self.fatal is None
        if self.fatal is None:
            self._reason = found[3].decode(errors="replace")
            self.fatal = Fatal(int(found[2]), self._reason, int(found[1]) & 0xFF)

    def _write(self, data: bytes) -> None:
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

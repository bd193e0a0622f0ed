"""The code blocks of a documentation page, as a reader uses them.

    python, first line "# NAME.py"              the file NAME.py; "# NAME.py, continued" adds to it
    text, first line "# NAME.txt"               the file NAME.txt
    console, first line "$ mpicoll run ...",    a command that is run with the files above it, and what it prints; further
    "$ python -m mpicoll.run ..." or            commands of the block begin with "$ ", too, and find the files that those before
    "$ mpicoll doctor ..." or "$ python NAME.py" them have left. Variables may stand before a command. A file examples/... is
                                                that of the repository
    python with ">>> "                          a session in one process without a launcher, over all such blocks of the page

What a command shows: each line that it prints to stdout, in any order, since ranks print in any order; "..." stands for any
text of a line. Lines of stderr may be shown, too; a line "..." alone stands for those of both that are left out. After the
comment <!-- numbers vary --> numbers are not compared, after <!-- times vary --> those with a unit of time or speed are not.
A comment <!-- needs Open MPI 5 --> or <!-- needs companions --> stands before commands that not every environment can run
(tests/companions/requirements.txt).
"""

import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support import ROOT

FENCE = re.compile(r"^((?:<!-- [^\n]* -->\n)*)```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NEEDS = re.compile(r"<!-- needs (.+) -->")
VARY = re.compile(r"<!-- (numbers|times) vary -->")
NAMED = {language: re.compile(rf"# (\w+\.{suffix})(, continued)?\n") for language, suffix in (("python", "py"), ("text", "txt"))}
COMMAND = re.compile(r"\$ ((?:\w+=\S+ )*)(mpicoll run|python -m mpicoll\.run|mpicoll doctor|python(?= [\w/]+\.py)) (.*)")
EXAMPLES = "examples/"
MODULES = {"mpicoll doctor": ["-m", "mpicoll.doctor"], "python": []}
OMISSION = "..."
# In a line after re.escape. A number that varies may also have other digits before and after its point.
NUMBER = r"(?:\\ )*\d+(?:,\d{3})*(?:\\\.\d+)?(?:e\\[+-]\d+)?"
VARYING = {
    "numbers": re.compile(NUMBER),
    "times": re.compile(NUMBER + r"(?=\\ (?:us|ms|s|tokens/s|images/s)\b|%\\ during\\ )"),
}
ANY_NUMBER = r" *\\d+(?:,\\d{3})*(?:\\.\\d+)?(?:e[+-]\\d+)?"
# What begins the line that names the rank that failed first, the error without a launcher, and the doctor's last line.
FAILURES = ("mpicoll.run: rank ", "mpicoll.errors.", "1 thing wrong")


@dataclass
class Job:
    """One command of a page."""

    page: Path
    files: dict[str, str]
    command: str
    shown: list[str]
    vary: str | None = None  # one of VARYING
    needs: str | None = None  # "Open MPI 5", "companions"

    @property
    def words(self) -> str:
        """What stands behind ``mpicoll run``, or behind ``python``."""
        return self._parts()[2]

    @property
    def argv(self) -> list[str]:
        """The command, with this Python."""
        words = [str(ROOT / word) if word.startswith(EXAMPLES) else word for word in shlex.split(self.words)]
        return [sys.executable, *MODULES.get(self._parts()[1], ["-m", "mpicoll.run"]), *words]

    @property
    def environment(self) -> dict[str, str]:
        return dict(setting.split("=", 1) for setting in self._parts()[0].split())

    def write_files(self, folder: Path) -> None:
        for name, text in self.files.items():
            (folder / name).write_text(text)

    def _parts(self) -> tuple[str, str, str]:
        match = COMMAND.fullmatch(self.command)
        assert match is not None, f"{self.page}: {self.command!r} is no command of mpicoll run"
        return match[1], match[2], match[3]

    @property
    def needs_hosts(self) -> bool:
        """Whether the command names hosts, which a single machine does not have."""
        return "--hostfile" in self.words.split()

    @property
    def fails(self) -> bool:
        return any(line.startswith(FAILURES) for line in self.shown)


def consoles(page: Path) -> list[list[Job]]:
    """The commands of each block of a page, with the files that the page has defined before it."""
    files: dict[str, str] = {}
    found = []
    for comments, language, text in FENCE.findall(page.read_text()):
        name = NAMED[language].match(text) if language in NAMED else None
        if name is not None:
            files[name[1]] = files[name[1]] + "\n" + text if name[2] else text
        elif language == "console" and COMMAND.match(text):
            rest = [said[1] if (said := comment.search(comments)) else None for comment in (VARY, NEEDS)]
            found.append([Job(page, dict(files), command, shown, *rest) for command, shown in _commands(text)])
    return found


def jobs(page: Path) -> list[Job]:
    """The commands of all blocks."""
    return [job for console in consoles(page) for job in console]


def _commands(text: str) -> Iterator[tuple[str, list[str]]]:
    for part in re.split(r"^(?=\$ )", text, flags=re.MULTILINE)[1:]:
        command, *shown = part.splitlines()
        yield command, shown


def session(page: Path) -> str:
    """The blocks with ">>> " at their lines, and empty lines for everything else."""
    text = page.read_text()
    lines = [""] * text.count("\n")
    for match in FENCE.finditer(text):
        if match[2] == "python" and ">>> " in match[3]:
            begin = text.count("\n", 0, match.start(3))
            block = match[3].splitlines()
            lines[begin : begin + len(block)] = block
    return "\n".join(lines)


def differences(job: Job, stdout: str, stderr: str) -> str:
    """What is shown and was not printed, and what was printed to stdout and is not shown; empty if all is right."""
    printed = [line.rstrip() for line in stdout.splitlines()]
    beside = [line.strip("\0 ") for line in stderr.splitlines()]  # mpiexec ends its text by them
    missing = []
    for line in job.shown:
        if line == OMISSION:
            continue
        pattern = _pattern(line, job.vary)
        source = next((lines for lines in (printed, beside) if any(map(pattern.fullmatch, lines))), None)
        if source is None:
            missing.append(line)
        else:
            source.remove(next(filter(pattern.fullmatch, source)))
    if OMISSION in job.shown:
        printed = []
    return "\n".join([f"shown, not printed: {line}" for line in missing] + [f"printed, not shown: {line}" for line in printed])


def _pattern(line: str, vary: str | None) -> re.Pattern[str]:
    """Matches a printed line."""
    pattern = ".*".join(re.escape(part) for part in line.split(OMISSION))
    return re.compile(VARYING[vary].sub(ANY_NUMBER, pattern) if vary else pattern)

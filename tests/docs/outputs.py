"""``python -m tests.docs.outputs`` runs all commands of docs/examples, and writes what they print now into the pages.

With words: only commands that have one of them, as in ``python -m tests.docs.outputs ping_pong hello``. An output that agrees
with its page stays as it is, with its numbers that vary. Where "..." stood, it is to be put in again.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.docs import blocks, programs
from tests.docs.blocks import Job
from tests.support import run

TIME_LIMIT_S = 120  # seconds for one command


def renewed(text: str, job: Job, stdout: str) -> str:
    """The text of a page, with ``stdout`` as the output of a command."""
    old, new = ("".join(f"{line.rstrip()}\n" for line in [job.command, *lines]) for lines in (job.shown, stdout.splitlines()))
    assert text.count(old) == 1, f"{job.page}: {job.command!r} stands there {text.count(old)} times"
    return text.replace(old, new)


def renew(console: list[Job]) -> None:
    """Runs the commands of a block one after the other, and writes what differs into its page."""
    with tempfile.TemporaryDirectory() as folder:
        for job in console:
            done = run(job.argv, TIME_LIMIT_S, cwd=Path(folder))
            assert done.returncode == 0, f"{job.command}\n{done.stderr}"
            if blocks.differences(job, done.stdout, done.stderr):
                print(job.page.name, job.command, done.stdout, sep="\n")
                job.page.write_text(renewed(job.page.read_text(), job, done.stdout))


if __name__ == "__main__":
    for console in programs.CONSOLES:
        if len(sys.argv) == 1 or any(word in job.command for job in console for word in sys.argv[1:]):
            renew(console)

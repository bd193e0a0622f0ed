"""The README is short, and its commands are taken as they stand. tests/docs runs its demo."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.support import ROOT, run

TEXT = (ROOT / "README.md").read_text()
LONGEST = 130  # lines


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def test_it_is_short_and_has_the_text_that_people_search_for() -> None:
    assert TEXT.count("\n") <= LONGEST
    assert "Distributed package doesn't have MPI built in" in TEXT


@pytest.mark.launch
def test_commands_of_mpicoll_run_are_taken(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "nodes").write_text("node1\nnode1\nnode2\nnode2\n")
    commands = [line.partition(" #")[0] for block in blocks("sh") for line in block.splitlines() if line.startswith("python -m")]
    assert len(commands) == 2
    for command in commands:
        words = shlex.split(command.replace("$PBS_NODEFILE", "nodes"))
        done = run([sys.executable, "-m", "mpicoll.run", "--dry-run", *words[3:]], cwd=tmp_path)
        assert done.returncode == 0, (command, done.stderr)
        assert "train.py" in done.stdout + done.stderr

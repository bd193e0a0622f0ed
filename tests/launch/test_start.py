"""Open MPI's mpiexec fails before it starts a rank: it is started once more, unless an option of the user may be the cause."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import clean_environment

pytestmark = pytest.mark.launch

# Runs `mpicoll.run ARGUMENTS...` with a shell script as the mpiexec of the family FAMILY.
RUN = """
import sys
from dataclasses import replace
from mpicoll._launch import run
folder, family, *arguments = sys.argv[1:]
made = run.make_plan
run.make_plan = lambda *given: replace(made(*given), command=(f"{folder}/mpiexec",), family=family)
sys.exit(run.main(["--quiet", *arguments, "-n", "2", "--no-python", "true"]))
"""
AGAIN = "mpicoll.run: mpiexec: exit status 213; no rank began; it is started once more\n"
FAILED = "mpicoll.run: mpiexec: exit status {}; no rank began\n"


@pytest.mark.parametrize(
    ("family", "statuses", "options", "status", "said"),
    [
        ("openmpi", (213, 0), (), 0, AGAIN),
        ("openmpi", (213, 213, 0), (), 213, AGAIN + FAILED.format(213)),
        ("openmpi", (66, 0), (), 66, FAILED.format(66)),
        ("openmpi", (213, 0), ("--mpiexec-args=--unknown",), 213, FAILED.format(213)),
        ("mpich", (213, 0), (), 213, FAILED.format(213)),
    ],
)
def test_mpiexec_fails_before_a_rank_begins(
    family: str, statuses: tuple[int, ...], options: tuple[str, ...], status: int, said: str, tmp_path: Path
) -> None:
    """The n-th start ends with ``statuses[n]``."""
    for number, each in enumerate(statuses):
        (tmp_path / f"status-{number}").write_text(str(each))
    mpiexec = tmp_path / "mpiexec"
    mpiexec.write_text(f"#!/bin/sh\ncd {tmp_path}\necho >> starts\nexit $(cat status-$(($(wc -l < starts) - 1)))\n")
    mpiexec.chmod(0o755)
    command = [sys.executable, "-c", RUN, str(tmp_path), family, *options]
    done = subprocess.run(command, env=clean_environment(), cwd=tmp_path, capture_output=True, text=True, timeout=50)
    assert (done.returncode, done.stderr) == (status, said)

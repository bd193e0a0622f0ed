"""Runs several programs in one job of mpicoll.run, one after the other: a job of its own costs each some seconds of a core."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support import run

MANY = Path(__file__).parent / "scripts" / "many.py"
Done = subprocess.CompletedProcess[str]


@dataclass(frozen=True)
class Program:
    """A script with its arguments, the folder in which it runs, and what fails if it has not printed the right lines."""

    words: list[str]
    folder: Path
    check: Callable[[Done], object]


def run_together(ranks: int, programs: Sequence[Program], temporary: Path, timeout_s: float) -> None:
    """Runs and checks all programs, and fails with the list of those that were wrong.

    A program that fails ends the job: another job runs those after it.
    """
    wrong = []
    left = list(programs)
    while left:
        some = run_until_one_fails(ranks, left, Path(tempfile.mkdtemp(dir=temporary)), timeout_s)
        for program, done in zip(left, some, strict=False):
            try:
                program.check(done)
            except (AssertionError, pytest.fail.Exception) as error:
                wrong.append(f"{' '.join(program.words)}: {error}")
        left = left[len(some) :]
    assert not wrong, f"wrong in {len(wrong)} of {len(programs)} programs\n\n" + "\n\n".join(wrong)


def run_until_one_fails(ranks: int, programs: Sequence[Program], temporary: Path, timeout_s: float) -> list[Done]:
    """What each program has printed, up to the first that did not come to its end on all ranks."""
    folders = [temporary / str(number) for number in range(len(programs))]
    for folder in folders:
        folder.mkdir()
        (folder / "stdout").touch()
        (folder / "stderr").touch()
    plan = temporary / "plan"
    plan.write_text(json.dumps([(str(p.folder), str(f), p.words) for p, f in zip(programs, folders, strict=True)]))
    launch = [sys.executable, "-m", "mpicoll.run", "-n", str(ranks)]
    job = run([*launch, str(MANY), str(plan)], timeout_s)
    ended = [len(list(folder.glob("ended-*"))) == ranks for folder in folders]
    count = min([*ended, False].index(False) + 1, len(programs))
    texts = [[(folder / name).read_text() for name in ("stdout", "stderr")] for folder in folders[:count]]
    found = [Done([*launch, *p.words], 0, *said) for p, said in zip(programs, texts, strict=False)]
    # Status 0 of the job alone is no proof that its last program ended well: an mpirun that lost a rank may still end with 0.
    found[-1].returncode = job.returncode or int(not all(ended))
    found[-1].stderr += job.stderr if found[-1].returncode else ""
    return found

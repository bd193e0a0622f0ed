"""The short examples of examples/basics print what docs/examples/basics.md shows."""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

from tests.docs.blocks import Job
from tests.docs.programs import first_line, printed_as_shown, shown
from tests.support import ROOT, run

BASICS = sorted((ROOT / "examples" / "basics").glob("*.py"))
NAMES = {"cuda_all_reduce", "ddp_minimal", "groups", "hello", "send_recv", "six_collectives", "spawn", "uneven_gather"}
LONGEST = 40  # lines
IN_ORDER = {"six_collectives", "uneven_gather"}  # rank 0 prints
TIME_LIMIT_S = 60  # seconds for one example; each takes two, the rest is for a busy machine

names = pytest.mark.parametrize("path", BASICS, ids=lambda path: path.stem)


def command_of(path: Path) -> list[str]:
    """The command on line 1 of the example, with this Python."""
    first = first_line(path)
    assert re.fullmatch(rf"python (-m mpicoll\.run -n [24] )?examples/basics/{path.name}", first), first
    return [sys.executable, *shlex.split(first)[1:]]


def expected_of(path: Path) -> Job:
    """What the page shows, on GPUs where there are any."""
    job = shown(path)
    if not torch.cuda.is_available():
        return job
    count = torch.cuda.device_count()
    lines = [
        re.sub(r"^rank (\d)(.*) on cpu$", lambda m: f"rank {m[1]}{m[2]} on cuda:{int(m[1]) % count}", line) for line in job.shown
    ]
    return dataclasses.replace(job, shown=lines)


def test_each_is_short() -> None:
    assert {path.stem for path in BASICS} == NAMES
    for path in BASICS:
        lines = path.read_text().splitlines()
        assert len(lines) <= LONGEST, f"{path.name}: {len(lines)} lines"


@pytest.mark.launch
@pytest.mark.timeout(TIME_LIMIT_S + 30)
@names
def test_prints_what_its_page_shows(path: Path) -> None:
    expected = expected_of(path)
    done = run(command_of(path), TIME_LIMIT_S)
    printed_as_shown(expected, done, in_order=path.stem in IN_ORDER)
    assert "Traceback" not in done.stderr, done.stderr

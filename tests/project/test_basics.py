"""The short examples of examples/basics print what their docstrings say."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

from tests.project.programs import output_of
from tests.support import ROOT, run

BASICS = sorted((ROOT / "examples" / "basics").glob("*.py"))
NAMES = {"cuda_all_reduce", "ddp_minimal", "groups", "hello", "send_recv", "six_collectives", "spawn", "uneven_gather"}
LINES = range(15, 41)
TIME_LIMIT_S = 60  # seconds for one example; each takes two, the rest is for a busy machine

names = pytest.mark.parametrize("path", BASICS, ids=lambda path: path.stem)


def command_of(path: Path) -> list[str]:
    """The command on line 1 of the example, with this Python."""
    first = path.read_text().splitlines()[0]
    assert re.fullmatch(rf"# python (-m mpicoll\.run -n [24] )?examples/basics/{path.name}", first), first
    return [sys.executable, *shlex.split(first)[2:]]


def expected_of(path: Path) -> list[str]:
    """The lines of the docstring, on GPUs where there are any."""
    lines = output_of(path)
    assert lines, f"{path.name}: no output in the docstring"
    if not torch.cuda.is_available():
        return lines
    count = torch.cuda.device_count()
    return [re.sub(r"^rank (\d)(.*) on cpu$", lambda m: f"rank {m[1]}{m[2]} on cuda:{int(m[1]) % count}", line) for line in lines]


def test_each_is_short_and_listed() -> None:
    assert {path.stem for path in BASICS} == NAMES
    page = (ROOT / "docs" / "examples.md").read_text()
    for path in BASICS:
        lines = path.read_text().splitlines()
        assert len(lines) in LINES, f"{path.name}: {len(lines)} lines"
        assert f"`basics/{path.name}`" in page, f"{path.name} is not in docs/examples.md"


@pytest.mark.launch
@pytest.mark.timeout(TIME_LIMIT_S + 30)
@names
def test_prints_what_its_docstring_says(path: Path) -> None:
    expected = expected_of(path)
    done = run(command_of(path), TIME_LIMIT_S)
    said = f"{shlex.join(done.args)}\nstdout:\n{done.stdout}\nstderr:\n{done.stderr}"
    assert done.returncode == 0, said
    assert "Traceback" not in done.stderr, said
    in_any_order = "in any order" in path.read_text()
    printed = done.stdout.splitlines()
    assert (sorted(printed) == sorted(expected)) if in_any_order else (printed == expected), said

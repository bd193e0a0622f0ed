"""The suite's own machinery: a failure on one rank is a failure on all, and a hang ends the job and is named."""

from __future__ import annotations

import re
import shutil
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import runs_here
from tests.support import ROOT, launch

SUITE = """
    import pytest
    from mpi4py import MPI
    from tests.support import agree

    def test_fails_on_one(rank):
        assert rank != 1, "only here"

    def test_agree(rank):
        agree(rank == 0, f"got {rank}")

    def test_still_in_step(rank, size):
        agree(MPI.COMM_WORLD.allgather(rank) == list(range(size)))

    @pytest.mark.timeout(8)
    def test_stuck(rank):
        if rank == 1:
            raise ValueError("the reason")
        print("held by", rank)
        MPI.COMM_WORLD.Barrier()
"""


@pytest.mark.launch
@pytest.mark.timeout(120)
def test_one_rank_fails_for_all_and_a_hang_ends_with_the_stacks_of_the_ranks(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "tests" / "support", tmp_path / "tests" / "support")
    for name in ("tests/__init__.py", "tests/conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "tests" / "test_inner.py").write_text(textwrap.dedent(SUITE))
    done = launch(3, "-m", "pytest", cwd=tmp_path, timeout_s=100)
    said = f"{done.stdout}\n{done.stderr}"
    assert done.returncode != 0, said
    for expected in (
        "[rank 1]\n",
        "AssertionError: only here",
        "wrong on 2 of 3 ranks\n",
        "  rank 2: got 2",
        "2 failed, 1 passed",
        "rank 0 of 3: tests/test_inner.py::test_stuck: no end after ",
        "rank 2 of 3: tests/test_inner.py::test_stuck: no end after ",
        "rank 1 of 3: tests/test_inner.py::test_stuck: waits for the other ranks after ",
        "ValueError: the reason",
        "[rank 2] held by 2",
    ):
        assert expected in said, f"{expected}\n{said}"
    assert re.search(r"\[rank 2\]   File .*test_inner.py.*in test_stuck", said), said
    assert "rank 1 of 3: tests/test_inner.py::test_stuck: no end" not in said, said


@pytest.mark.parametrize(
    ("folder", "marks", "runs"),
    [
        ("api", [], "1 2 3"),
        ("api", [pytest.mark.launch], "1"),
        ("api", [pytest.mark.min_ranks(2)], "2 3"),
        ("api", [pytest.mark.min_ranks(2), pytest.mark.ranks(1, 2)], "2"),
        ("api", [pytest.mark.slow], ""),
        ("launch", [], "1"),
        ("launch", [pytest.mark.min_ranks(2)], "2 3"),
    ],
)
def test_marks_and_folders_choose_the_numbers_of_ranks(folder: str, marks: list[pytest.MarkDecorator], runs: str) -> None:
    item: Any = SimpleNamespace(
        path=ROOT / "tests" / folder / "test_it.py",
        iter_markers=lambda name: [mark for mark in marks if mark.name == name],
        get_closest_marker=lambda name: next((mark for mark in marks if mark.name == name), None),
    )
    assert " ".join(str(size) for size in (1, 2, 3) if runs_here(item, size, [])) == runs

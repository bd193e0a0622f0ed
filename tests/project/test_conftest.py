"""The suite's own machinery: a failure on one rank is a failure on all, and a hang ends the job and is named."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import mpicoll
from mpicoll import _cpus
from tests.conftest import claim
from tests.support import ROOT, agree, busy, everyone, launch

MACHINERY = ("__init__.py", "conftest.py", "support/__init__.py", "support/busy.py", "support/spmd.py", "support/warm.py")


def test_everyone_is_by_rank(rank: int, size: int) -> None:
    agree(everyone(10 * rank) == [10 * r for r in range(size)])


def test_agree_fails_on_all_ranks_and_lists_the_wrong_ones(rank: int, size: int) -> None:
    with pytest.raises(pytest.fail.Exception) as caught:
        agree(rank != size - 1, f"got {rank}")
    agree(str(caught.value) == f"wrong on 1 of {size} ranks\n  rank {size - 1}: got {size - 1}", str(caught.value))


@pytest.mark.min_ranks(2)
def test_two_different_agreements_are_out_of_step(rank: int) -> None:
    test = "tests/project/test_conftest.py::test_two_different_agreements_are_out_of_step"
    if rank == 0:
        with pytest.raises(pytest.fail.Exception, match=rf"rank 1: at second of {test}"):
            everyone("first")
    else:
        from tests.support import spmd

        places = [record.place for record in spmd.side().exchange(f"second of {test}", None)]
        spmd.side().agreed += 1
        assert places[0] == f"agree #1 of {test}"
    agree(True)


def test_seed_is_equal_on_all_ranks(seed: int) -> None:
    drawn = (seed, random.random(), float(np.random.rand()), float(torch.rand(())))  # noqa: NPY002
    agree(len(set(everyone(drawn))) == 1, f"drew {drawn}")


def test_shared_path_is_one_directory(shared_path: Path, rank: int, size: int) -> None:
    (shared_path / f"rank{rank}").touch()
    everyone(None)
    agree(len(list(shared_path.iterdir())) == size, f"sees {sorted(shared_path.iterdir())}")


@pytest.mark.mpi
def test_marks_of_pytest_mpi_do_not_skip() -> None:
    agree(True)


def test_world_is_initialised(world: object, rank: int, size: int) -> None:
    agree((mpicoll.get_rank(world), mpicoll.get_world_size(world)) == (rank, size))
    mpicoll.destroy_process_group()


def test_world_comes_back_after_a_test_that_destroyed_it(world: object, rank: int, size: int) -> None:
    agree((mpicoll.get_rank(world), mpicoll.get_world_size(world)) == (rank, size))


# The rest runs small suites of its own, with a copy of the machinery.


def run_suite(path: Path, ranks: int, source: str, *options: str) -> subprocess.CompletedProcess[str]:
    """``mpiexec -n ranks python -m pytest`` on one test file with that source."""
    (path / "tests" / "support").mkdir(parents=True)
    for name in MACHINERY:
        shutil.copy(ROOT / "tests" / name, path / "tests" / name)
    shutil.copy(ROOT / "pyproject.toml", path)
    imports = "import ctypes, os, time\nimport pytest\nfrom mpi4py import MPI\nfrom tests.support import agree\n"
    (path / "tests" / "test_inner.py").write_text(imports + textwrap.dedent(source))
    return launch(ranks, "-m", "pytest", *options, cwd=path, timeout_s=100)


FAILURES = """
    def test_passes(rank, size):
        agree(rank < size)

    def test_fails_on_one(rank):
        print("spoken by", rank)
        assert rank != 1, "only here"

    def test_agree(rank):
        agree(rank == 0, f"got {rank}")

    def test_raises_before_agree(rank):
        if rank == 2:
            raise ValueError("before agree")
        agree(True)

    def test_skips_on_one(rank):
        if rank == 1:
            pytest.skip("why")

    @pytest.fixture
    def broken_setup(rank):
        assert rank != 1, "setup"

    def test_setup(broken_setup):
        MPI.COMM_WORLD.Barrier()

    @pytest.fixture
    def broken_teardown(rank):
        yield
        assert rank != 1, "teardown"

    def test_teardown(broken_teardown):
        MPI.COMM_WORLD.Barrier()

    def test_still_in_step(rank, size):
        agree(MPI.COMM_WORLD.allgather(rank) == list(range(size)))

    @pytest.mark.slow
    def test_slow(): raise AssertionError
    @pytest.mark.launch
    def test_launch(): raise AssertionError
    @pytest.mark.ranks(2, 4)
    def test_ranks(): raise AssertionError
    @pytest.mark.min_ranks(4)
    def test_min_ranks(): raise AssertionError
    @pytest.mark.ranks(1, 3)
    @pytest.mark.min_ranks(3)
    def test_runs_here(size): assert size == 3
"""


@pytest.mark.launch
@pytest.mark.timeout(120)
def test_a_failure_on_one_rank_fails_on_all_and_reads_like_one_run(tmp_path: Path) -> None:
    done = run_suite(tmp_path, 3, FAILURES)
    assert done.returncode == 1, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert sum("test session starts" in line for line in lines) == 1, done.stdout
    summary = r"=+ 4 failed, 4 passed, 4 deselected, 2 errors in [\d.]+s =+"
    assert re.fullmatch(summary, lines[-1]), done.stdout
    for expected in (
        "FAILED tests/test_inner.py::test_fails_on_one - rank 1: AssertionError",
        "FAILED tests/test_inner.py::test_agree - ranks 0, 1, 2: Failed: wrong on 2 of",
        "FAILED tests/test_inner.py::test_raises_before_agree - rank 2: ValueError",
        "FAILED tests/test_inner.py::test_skips_on_one - ranks 0, 1, 2: out of step",
        "ERROR tests/test_inner.py::test_setup - rank 1: AssertionError",
        "ERROR tests/test_inner.py::test_teardown - rank 1: AssertionError",
        "  rank 1: got 1",
        "  rank 2: got 2",
        "spoken by 1",
        "out of step: passed on rank 0, skipped on rank 1, passed on rank 2",
    ):
        assert expected in done.stdout, f"{expected}\n{done.stdout}"


def end_of(suite: str, path: Path, within_s: float, *options: str) -> str:
    """What a suite printed that must end by itself, with a status that tells of it, in good time."""
    began = time.monotonic()
    done = run_suite(path, 3, suite, *options)
    said = f"{done.stdout}\n{done.stderr}"
    assert done.returncode != 0, said
    assert time.monotonic() - began < within_s, said
    return said


STUCK = """
    def test_before(rank):
        assert rank != 2, "told although the run has no end"

    @pytest.mark.timeout(8)
    def test_stuck(rank):
        if rank == 1:
            raise ValueError("the reason")
        print("held by", rank)
        MPI.COMM_WORLD.Barrier()
"""


@pytest.mark.launch
@pytest.mark.timeout(120)
def test_ranks_stuck_in_a_collective_end_the_job_and_are_named(tmp_path: Path) -> None:
    said = end_of(STUCK, tmp_path, within_s=60)
    for expected in (
        "rank 0 of 3: tests/test_inner.py::test_stuck: no end after ",
        "rank 2 of 3: tests/test_inner.py::test_stuck: no end after ",
        "rank 1 of 3: tests/test_inner.py::test_stuck: waits for the other ranks after ",
        "ValueError: the reason",
        "told although the run has no end",
        "[rank 2] held by 2",
    ):
        assert expected in said, f"{expected}\n{said}"
    assert re.search(r"\[rank 2\]   File .*test_inner.py.*in test_stuck", said), said
    assert "rank 1 of 3: tests/test_inner.py::test_stuck: no end" not in said, said


MISMATCH = """
    import torch

    import mpicoll as dist

    def test_calls(world, rank):
        dist.all_reduce(torch.ones(2), [dist.ReduceOp.SUM, dist.ReduceOp.MAX][rank])
        time.sleep(30)
"""


@pytest.mark.launch
def test_what_mpicoll_says_before_it_ends_the_job_is_shown(tmp_path: Path) -> None:
    """It was captured by pytest, and lost."""
    done = run_suite(tmp_path, 2, MISMATCH)
    assert done.returncode != 0
    assert "[rank 1] mpicoll: group '0', collective number 1: the ranks do not call the same." in done.stderr, done.stderr


@pytest.mark.ranks(1)
@pytest.mark.parametrize(("load", "limit_s"), [(0.0, 10.0), (2.0, 10.0), (5.0, 25.0), (100.0, 40.0)])
def test_limits_grow_with_the_load_of_the_machine(load: float, limit_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(_cpus, "usable_cores", lambda: 2)
    assert busy.longer(10.0) == limit_s


HOLDS_THE_GIL = """
    @pytest.mark.timeout(2)
    def test_holds_the_gil():
        ctypes.PyDLL(None).sleep(300)
"""


@pytest.mark.launch
@pytest.mark.timeout(120)
def test_a_call_that_holds_the_gil_ends_too(tmp_path: Path) -> None:
    said = end_of(HOLDS_THE_GIL, tmp_path, within_s=60)
    assert "in test_holds_the_gil" in said, said


LEAVES = """
    def test_leaves(rank):
        if rank == 1:
            raise KeyboardInterrupt
        agree(True)
"""


@pytest.mark.launch
@pytest.mark.timeout(120)
def test_a_rank_that_leaves_the_session_takes_the_others_with_it(tmp_path: Path) -> None:
    said = end_of(LEAVES, tmp_path, within_s=60)
    assert "rank 1 left the session during end of call of tests/test_inner.py::test_leaves" in said, said


DIES = """
    def test_dies(rank):
        if rank == 1:
            os.kill(os.getpid(), 9)
        agree(True)
"""


@pytest.mark.launch
@pytest.mark.timeout(120)
def test_a_killed_rank_ends_the_job(tmp_path: Path) -> None:
    end_of(DIES, tmp_path, within_s=60)


DIFFERENT = """
    if MPI.COMM_WORLD.rank == 1:
        def test_only_here(): pass

    def test_everywhere(): MPI.COMM_WORLD.Barrier()
"""


@pytest.mark.launch
@pytest.mark.timeout(120)
def test_ranks_that_collect_different_tests_run_none(tmp_path: Path) -> None:
    said = end_of(DIFFERENT, tmp_path, within_s=60)
    assert "rank 0 / rank 1 collected different tests: 1 / 2 tests" in said, said


SHARED = """
    @pytest.fixture(scope="module")
    def shared():
        yield 1
        print("torn down once")

    def test_first(shared):
        pass

    def test_second(shared):
        pass

    class TestThird:
        def test_third(self, shared):
            pass
"""


@pytest.mark.launch
@pytest.mark.timeout(100)
def test_a_session_that_shares_runs_what_no_other_has_claimed(tmp_path: Path) -> None:
    claims = tmp_path / "claims"
    claims.mkdir()
    assert claim(claims, "tests/test_inner.py::test_second")
    assert not claim(claims, "tests/test_inner.py::test_second")
    done = run_suite(tmp_path, 1, SHARED, "-v", "-s", f"--share={claims}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("torn down once") == 1, done.stdout
    assert "2 passed" in done.stdout, done.stdout
    assert "test_second" not in done.stdout, done.stdout

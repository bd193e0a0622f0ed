"""MPICOLL_ON_TIMEOUT=raise: where the job would end because a rank is late, the ranks that wait get an error."""

import re

import pytest

from tests.support import ROOT, launch

pytestmark = [pytest.mark.launch, pytest.mark.timeout(150)]
SCRIPT = str(ROOT / "tests/faults/scripts/on_timeout.py")
RAISE = {"MPICOLL_ON_TIMEOUT": "raise"}
COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "broadcast", "barrier")


@pytest.mark.parametrize(("words", "env"), [(["mpicoll"], RAISE), (["torch"], RAISE), (["torch", "options"], {})])
def test_ranks_that_wait_get_an_error_and_other_groups_go_on(words: list[str], env: dict[str, str]) -> None:
    done = launch(3, SCRIPT, *words, timeout_s=120, env=env)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    for rank in (1, 2):
        for name in (*COLLECTIVES, "recv", "send"):
            found = re.findall(rf"^rank {rank}: {name} raised after ([\d.]+) s: (.*)$", done.stdout, re.MULTILINE)
            assert len(found) == 1, (rank, name, said)
            seconds, error = found[0]
            assert 0.9 < float(seconds) < 5, said
            assert "Timed out" in error, said
            assert re.search("[Rr]ank 0", error), said
    assert all(f"rank {rank}: end\n" in done.stdout for rank in range(3)), said


def test_without_it_the_job_ends() -> None:
    done = launch(3, SCRIPT, "mpicoll", timeout_s=60)
    assert done.returncode != 0
    assert "all_reduce exceeded the group's timeout of 1 s; aborting the job" in done.stderr, done.stderr

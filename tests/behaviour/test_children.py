"""Processes that a rank starts: forked ones compute and never touch MPI, spawned ones do not join the job (trap 57)."""

import pytest

from tests.support import ROOT, launch

pytestmark = [pytest.mark.launch, pytest.mark.timeout(150)]

SCRIPT = str(ROOT / "tests" / "behaviour" / "scripts" / "children.py")


@pytest.mark.parametrize("cases", [("data_loader", "spawned", "programs"), ("forked",)], ids=" ".join)
def test_children(cases: tuple[str, ...]) -> None:
    done = launch(2, SCRIPT, *cases, timeout_s=90)
    assert done.returncode == 0, done.stdout + done.stderr
    for case in cases:
        for rank in range(2):
            assert f"rank {rank}: {case} is well" in done.stdout, done.stdout + done.stderr
    if cases == ("forked",):
        assert done.stderr.count("ZeroDivisionError") == 2, done.stderr
        assert "aborting" not in done.stderr, done.stderr
    else:
        assert done.stderr == "", done.stderr

"""What one rank refuses, and its program catches, is named on the other rank, whether mpicoll or torch's own code refuses it."""

import re

import pytest

from tests.faults.clock import FAST
from tests.support import ROOT, launch

pytestmark = pytest.mark.launch

SCRIPT = str(ROOT / "tests" / "faults" / "scripts" / "refusals.py")
REFUSED = {  # by case: the collective that rank 1 is in, and the error of rank 0 at both doors
    "group": ("all_reduce", "TypeError: all_reduce: group must be a ProcessGroup or None, got str 'x'"),
    "source": ("broadcast", "ValueError: .*"),
    "no tensor": ("all_reduce", "TypeError: .*"),
    "length": ("scatter", "ValueError: .*"),
    "no list": ("scatter", "ValueError: .*"),
    "size": ("scatter", "ValueError: .*"),
    "dtype": ("scatter", "(Type|Value)Error: .*"),
    "no objects": ("broadcast", "ValueError: source rank must provide non-None scatter_object_input_list"),
    "objects": ("scatter", "ValueError: scatter: scatter_list has 3 tensors, the group has 2 ranks; .*"),
    "no output": ("broadcast", "ValueError: Expected argument scatter_object_output_list to be a list .*"),
}


def test_with_the_full_check_the_other_rank_raises_and_both_go_on() -> None:
    done = launch(2, SCRIPT, timeout_s=60, env={"MPICOLL_CHECK": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    for door in ("mpicoll", "torch.distributed"):
        for case, (operation, error) in REFUSED.items():
            got = dict(re.findall(rf"^{door}, {case}: rank (\d) got (.*)$", done.stdout, re.MULTILINE))
            assert re.fullmatch(error, got["0"]), f"{door}, {case}: {got}"
            named = (
                rf"CollectiveMismatch: {operation} .* Rank 0: {operation}, refused: {re.escape(got['0'])}; rank 1: {operation}.*"
            )
            assert re.fullmatch(named, got["1"]), f"{door}, {case}: {got}"
    assert done.stdout.count("survived with [0.0, 0.0]") == 2 * 2 * len(REFUSED), done.stdout


@pytest.mark.parametrize(("case", "door"), [("group", "torch"), ("source", "mpicoll"), ("objects", "torch")])
def test_without_it_the_job_ends(case: str, door: str) -> None:
    done = launch(2, SCRIPT, case, door, timeout_s=40, env=FAST)
    operation, error = REFUSED[case]
    assert done.returncode != 0
    assert "survived" not in done.stdout, done.stdout
    assert re.search(rf"Rank 0: {operation}, refused: {error}", done.stderr), done.stderr
    assert re.search(rf"rank 1: {operation}\(.*\)", done.stderr), done.stderr

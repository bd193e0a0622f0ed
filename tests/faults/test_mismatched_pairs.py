"""Without MPICOLL_CHECK: no pair of calls that do not belong together (mismatches.py) returns on all ranks with nothing said."""

import re
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.faults.mismatches import Call, pairs
from tests.support import ROOT, launch

pytestmark = [pytest.mark.launch, pytest.mark.slow]

SCRIPT = str(ROOT / "tests" / "faults" / "scripts" / "mismatched.py")
JOBS = 3  # at a time: they often wait
ALL_RAISE, NAMED, SOME_RAISE = "all ranks raise", "the job ends, both calls named", "some ranks raise"
BY_MPI, OTHER = "MPI ends the job", "another end"
NAMES = re.compile(r"collective number \d+: .*?\. Rank \d+: (\w+).*?; rank \d+: (\w+)")
NEW_NAMES = {"all_gather_into_tensor": "all_gather_single", "reduce_scatter_tensor": "reduce_scatter_single"}  # of torch


def outcome(pair: tuple[Call, Call], ranks: Sequence[str], stderr: str) -> str:
    """Returns what the ranks of a job have seen: ``ranks`` are their words, ``stderr`` is the job's, empty if it went on."""
    raised = [what.startswith("raised") for what in ranks]
    if all(raised):
        return ALL_RAISE
    named = {frozenset(found) for found in NAMES.findall(stderr)}
    if frozenset(NEW_NAMES.get(call.operation, call.operation) for call in pair) in named:
        return NAMED
    if any(raised):
        return SOME_RAISE
    return BY_MPI if "Fatal error in internal_" in stderr else OTHER


def find(size: str, indices: Sequence[int], door: str) -> dict[int, tuple[str, str]]:
    """Makes these pairs of calls. Returns the outcome of each one, and what was seen. A pair that ends the job is its last."""
    all_pairs, found, left = pairs(large=size == "large"), dict[int, tuple[str, str]](), list(indices)
    while left:
        with tempfile.TemporaryDirectory() as name:
            try:
                stderr = launch(2, SCRIPT, door, size, name, *map(str, left), timeout_s=100).stderr
            except pytest.fail.Exception as hang:
                stderr = str(hang)
            files = {index: sorted(Path(name).glob(f"{index}-*")) for index in left}
            words = {index: [file.read_text() for file in files[index]] for index in left if files[index]}
        assert words, f"the job did not begin:\n{stderr}"
        last = list(words)[-1]
        for index, ranks in words.items():
            ends = outcome(all_pairs[index], ranks, stderr if index == last else "")
            found[index] = ends, "; ".join([*ranks, *stderr.splitlines()[:3]])
        left = left[left.index(last) + 1 :]
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("size", "door"), [("small", "torch"), ("large", "mpicoll")])
def test_every_pair_ends_in_an_error(size: str, door: str) -> None:
    """Most large tensors go through shared memory."""
    every = range(len(pairs()))
    with ThreadPoolExecutor(JOBS) as pool:
        parts = list(pool.map(lambda start: find(size, every[start::JOBS], door), range(JOBS)))
    found = {index: ends for part in parts for index, ends in part.items()}
    assert len(found) == len(every)
    wrong = [f"{' / '.join(map(str, pairs()[index]))}: {seen}" for index, (ends, seen) in found.items() if ends == OTHER]
    assert not wrong, "\n".join(wrong)

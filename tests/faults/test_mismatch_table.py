"""The table of mismatches in docs/reference/faults.md, and what makes it."""

from __future__ import annotations

import pytest

from tests.faults.clock import FAST
from tests.faults.mismatch_table import ALL_RAISE, COUNTS, MODES, NAME, NAMED, OUTCOMES, PAGE, SILENT, find, find_all, table
from tests.faults.mismatches import KINDS, kind, pairs
from tests.support import pages


def test_the_page_shows_all_pairs_and_none_that_returns_with_nothing_said() -> None:
    counts = pages.figures(COUNTS)
    assert {name.split()[0] for name in counts} == {"Open", "MPICH"}
    for mpi, modes in counts.items():
        assert list(modes) == list(MODES), mpi
        for mode, kinds in modes.items():
            ends = list(kinds.values())
            assert sum(sum(each.values()) for each in ends) == len(pairs()), (mpi, mode)
            assert {name for each in ends for name in each} <= {*OUTCOMES} - {SILENT}, (mpi, mode)
            assert "CHECK" not in mode or all(each.keys() == {ALL_RAISE} for each in ends), (mpi, mode)
    assert pages.shown(PAGE, NAME) == table(counts)


@pytest.mark.launch
def test_another_reduction_and_another_root_are_named() -> None:
    """Through MPI they return on all ranks; the ledger ends the job."""
    indices = [next(i for i, pair in enumerate(pairs()) if kind(*pair) == name) for name in ("reduction", "root")]
    found = find("small tensors", indices, 2, "mpicoll", **FAST)
    assert [found[index][0] for index in indices] == [NAMED, NAMED], found


@pytest.mark.launch
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_pair_ends_in_an_error_through_torch() -> None:
    found = find_all("small tensors", 2, "torch")
    assert len(found) == len(pairs())
    assert {kind(*pair) for pair in pairs()} == set(KINDS)
    wrong = {str(pairs()[index]): seen for index, (ends, seen) in found.items() if ends not in {*OUTCOMES} - {SILENT}}
    assert not wrong

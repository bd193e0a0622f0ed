"""Plans of reductions, without MPI."""

from __future__ import annotations

from mpicoll._tensors import buffers, plans


def test_dtypes_that_need_no_check_have_a_sum() -> None:
    """The engine looks them up in SUM_PLANS and asks nothing else."""
    assert set(plans.SUM_PLANS) >= buffers.ORDINARY

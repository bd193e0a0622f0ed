"""Which algorithm carries an operation out. Decided only from values that are equal on every rank of the group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

LARGEST_DISPLACEMENT = 2**31 - 1  # MPI's displacements are C ints


def all_gather(nbytes: Sequence[int]) -> Literal["even", "uneven", "pairs"]:
    """``nbytes``: the size of every rank's block, which every rank knows from its list of outputs."""
    if min(nbytes) == max(nbytes):
        return "even"
    return "uneven" if sum(nbytes) <= LARGEST_DISPLACEMENT else "pairs"

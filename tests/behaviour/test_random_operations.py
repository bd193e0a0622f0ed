"""2,000 random operations; 100,000 by the command in random_operations.py."""

from __future__ import annotations

import pytest

from tests.behaviour import random_operations
from tests.support import agree


@pytest.mark.usefixtures("world")
@pytest.mark.timeout(120)
def test_random_operations(seed: int) -> None:
    """All results are right; memory, descriptors and threads do not grow."""
    grown = random_operations.run(seed, 2000)
    agree(not grown, grown)

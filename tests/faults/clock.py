"""The clock of jobs in which ranks wait: how fast the time of fault reports runs, and when they began."""

import re

import pytest

# Environment of a job in which ranks wait: a missing rank is named after 0.6 s, not after 3.
FAST = {"_MPICOLL_TIME_SCALE": "0.2"}


@pytest.fixture
def clock(request: pytest.FixtureRequest) -> dict[str, str]:
    """The environment of this test's jobs: FAST, and nothing in a test marked slow, which takes the times of users."""
    return {} if request.node.get_closest_marker("slow") else FAST


def began(output: str) -> float:
    """When the last rank began to wait, by the clock: ranks print it."""
    return max(float(text) for text in re.findall(r"^began ([\d.]+)$", output, re.MULTILINE))

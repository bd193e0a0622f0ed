"""Every test here runs in a world that an unmodified torch script would have, as those of tests/stack do."""

from tests.stack.conftest import mpi_world  # noqa: F401

"""MPI_Abort that does not end the process."""

from __future__ import annotations

import time

import pytest

from mpicoll._mpi import abort
from tests.support import launch

HANGING = """
import time, mpicoll as dist
from mpicoll._mpi import library

class Hanging:
    def __getattr__(self, name):
        return getattr(MPI, name)
    class COMM_WORLD:
        Abort = staticmethod(lambda code: time.sleep(100))

dist.init_process_group()
MPI, library.MPI = library.MPI, Hanging()
if dist.get_rank() == 1:
    raise ArithmeticError("the culprit")
time.sleep(100)
"""


@pytest.mark.launch
def test_a_rank_that_mpi_does_not_end_ends_itself() -> None:
    began = time.monotonic()
    done = launch(2, "-c", HANGING, timeout_s=50)
    assert time.monotonic() - began < abort.ABORT_S + 20
    assert done.returncode != 0
    assert "ArithmeticError: the culprit" in done.stderr
    assert "mpicoll: rank 1 of 2" in done.stderr

"""MPI_Abort that does not end the process."""

import re
import time

import pytest

from mpicoll._mpi import abort
from tests.support import launch

HANGING = """
import time, mpicoll as dist
from mpicoll._mpi import library

class World:
    Abort = staticmethod(lambda code: time.sleep(100))
    def __getattr__(self, name):
        return getattr(MPI.COMM_WORLD, name)

class Hanging:
    COMM_WORLD = World()
    def __getattr__(self, name):
        return getattr(MPI, name)

dist.init_process_group()
MPI, library.MPI = library.MPI, Hanging()
if dist.get_rank() == 1:
    print("raised at", time.time())
    raise ArithmeticError("the culprit")
time.sleep(100)
"""


@pytest.mark.launch
def test_a_rank_that_mpi_does_not_end_ends_itself() -> None:
    done = launch(2, "-c", HANGING, timeout_s=50)
    raised = re.search(r"raised at (\S+)", done.stdout)
    assert raised is not None, done.stderr
    assert time.time() - float(raised.group(1)) < abort.ABORT_S + 15
    assert done.returncode != 0
    assert "ArithmeticError: the culprit" in done.stderr
    assert "mpicoll: rank 1 of 2" in done.stderr

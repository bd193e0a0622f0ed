"""How often a rank that computes must look after a large message until it has gone."""

import re

import pytest

from tests.support import is_open_mpi, launch

MOST = 20  # looks: 4 MiB are 128 pieces of 32 KiB, of which Open MPI's default sends 3 at each look

SEND = """
import time
import numpy as np
import mpicoll
mpicoll.init_process_group()
comm, memory, looks = mpicoll.get_comm(), np.ones(4 << 20, dtype=np.uint8), 0
if comm.Get_rank() == 0:
    request = comm.Isend(memory, 1)
    while not request.Test():
        looks += 1
        time.sleep(0.02)  # the receiver has read what has been sent
    print(f"looks: {looks}", flush=True)
else:
    comm.Recv(memory, 0)
mpicoll.destroy_process_group()
"""


@pytest.mark.launch
@pytest.mark.skipif(not is_open_mpi(), reason="Open MPI's variable")
def test_a_large_message_goes_in_few_looks() -> None:
    """A poller that shares its core with a computation looks about once a millisecond."""
    result = launch(2, "-c", SEND, fresh=True)
    assert result.returncode == 0, result.stderr
    looks = re.search(r"looks: (\d+)", result.stdout)
    assert looks is not None, result.stdout
    assert int(looks[1]) <= MOST, result.stdout

"""What is special in MPICH: a fault of 4.0 that mpicoll goes around, and messages in pieces of 8 KiB."""

from pathlib import Path

import pytest
import torch

import mpicoll
from mpicoll._algorithms import native
from mpicoll._mpi import runtime
from mpicoll._mpi.channel import Channel
from mpicoll._mpi.datatypes import predefined
from tests.support import agree, is_open_mpi, launch


@pytest.mark.min_ranks(2)
def test_a_reduce_in_place_at_any_root(rank: int, size: int) -> None:
    """MPICH 4.0.2 ended with SIGSEGV at every root but 0."""
    running = runtime.start()
    channel = Channel(running, running.base.Dup())
    for root in range(size):
        for count in (0, 1, 1000, 5000, 100_000):
            memory = torch.full((count,), rank + 1.0)
            native.reduce(channel, memory, predefined("FLOAT"), predefined("SUM"), root, rank == root)
            expected = size * (size + 1) / 2 if rank == root else rank + 1
            agree(bool((memory == expected).all()), (root, count))
    channel.free()


@pytest.mark.min_ranks(2)
@pytest.mark.usefixtures("world")
def test_a_small_reduce_to_any_rank(rank: int, size: int) -> None:
    """The same, in the call that the fast path makes."""
    for root in range(size):
        for count in (500, 2000):
            tensor = torch.full((count,), rank + 1.0)
            mpicoll.reduce(tensor, root)
            agree(rank != root or bool((tensor == size * (size + 1) / 2).all()), (root, count))


@pytest.mark.usefixtures("world")
@pytest.mark.skipif(is_open_mpi(), reason="files of MPICH")
def test_shared_memory_of_mpich_has_no_name_once_there_is_a_world() -> None:
    """Hydra ends the monitors of a job whose supervisor was killed before they have removed all: 1 MB a rank was left."""
    mapped = {line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/mpich_" in line}
    agree(not [name for name in mapped if not name.endswith("(deleted)")], mapped)


@pytest.mark.launch
@pytest.mark.skipif(is_open_mpi(), reason="a setting of MPICH")
def test_a_message_of_mpi4py_moves_in_pieces_while_its_sender_waits_in_mpicoll() -> None:
    """MPICH without CMA, as where kernel.yama.ptrace_scope is 1 (Ubuntu). 4 MiB took 8 s, 8 KiB at each look of the sender."""
    done = launch(2, "tests/mpi/scripts/in_pieces.py", env={"MPIR_CVAR_CH4_CMA_ENABLE": "0"})
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("rank 1")] == ["rank 1 of 2: in time"], done.stdout

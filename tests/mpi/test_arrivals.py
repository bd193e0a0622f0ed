"""Messages whose size is not known before: found and received without matched probes."""

import ast

from mpi4py import MPI

from mpicoll._mpi import arrivals
from tests.project.sources import MODULES, name, tree
from tests.support import agree, everyone

TAG = 5  # not one of the package's


def test_objects_of_any_size_come_in_the_order_of_their_sender(rank: int, size: int) -> None:
    comm = MPI.COMM_WORLD.Dup()
    sent = [comm.isend((rank, number, "x" * 10**number), to, TAG) for number in range(6) for to in range(size)]
    received: list[tuple[int, tuple[int, int, str]]] = []
    while len(received) < 6 * size:
        received += arrivals.objects(comm, TAG)
    MPI.Request.waitall(sent)
    expected = {other: [(other, number, "x" * 10**number) for number in range(6)] for other in range(size)}
    agree({other: [content for source, content in received if source == other] for other in range(size)} == expected)
    comm.Free()


def test_a_message_stays_until_it_is_received(rank: int, size: int) -> None:
    comm = MPI.COMM_WORLD.Dup()
    assert arrivals.first(comm, MPI.ANY_SOURCE, TAG) is None
    everyone(None)
    request = comm.Isend(bytes(3), (rank + 1) % size, TAG)
    while (arrived := arrivals.first(comm, MPI.ANY_SOURCE, TAG)) is None:
        pass
    same = arrivals.first(comm, arrived.source, MPI.ANY_TAG) == arrived == ((rank - 1) % size, TAG, 3)
    content = arrived.received(comm)
    request.Wait()
    agree(same and content == bytes(3) and arrivals.first(comm, MPI.ANY_SOURCE, TAG) is None, arrived)
    comm.Free()


def test_no_matched_probes() -> None:
    """Note [No matched probes]. `comm.recv` of mpi4py uses them too."""
    matched = {"Improbe", "improbe", "Mprobe", "mprobe", "recv", "irecv", "sendrecv"}
    wrong = [
        f"{name(path)}:{node.lineno}: {ast.unparse(node)}"
        for path in MODULES
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and node.attr in matched and ast.unparse(node.value).endswith(("comm", "COMM_WORLD"))
    ]
    assert not wrong, "these need a matched probe; use `mpicoll._mpi.arrivals`:\n" + "\n".join(wrong)

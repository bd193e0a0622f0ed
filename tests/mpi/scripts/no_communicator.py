"""init_process_group and init_rpc while MPI has no communicator left, and afterwards. MPICH has 2048 of them."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from mpi4py import MPI

import mpicoll
from mpicoll import rpc
from mpicoll._mpi import runtime


class Exhausted(MPI.Intracomm):
    """Open MPI's communicators are too many to use up here."""

    def Dup(self, info: Any = None) -> Any:
        raise MPI.Exception(MPI.ERR_INTERN)

    Idup = Dup


@contextmanager
def no_communicator() -> Iterator[None]:
    used: list[Any] = []
    world, connected = runtime.start(), runtime.start().connected
    if MPI.get_vendor()[0] == "Open MPI":
        base, comm = world.base, world.comm if connected else None
        world.base = Exhausted(base)
        if connected:
            world.__dict__["comm"] = Exhausted(comm)
        yield
        world.base = base
        if connected:
            world.__dict__["comm"] = comm
    else:
        with suppress(MPI.Exception):
            used.extend(MPI.COMM_WORLD.Dup() for _ in range(2048))
        yield
        for each in used:
            each.Free()


def refused(call: Any) -> None:
    try:
        call()
    except mpicoll.CommunicationError as error:
        print(f"refused: {error}\n", end="", flush=True)


with no_communicator():
    refused(mpicoll.init_process_group)
mpicoll.init_process_group()
tensor = torch.ones(1)
mpicoll.all_reduce(tensor)
with no_communicator():
    refused(lambda: rpc.init_rpc(f"worker{mpicoll.get_rank()}"))
rpc.init_rpc(f"worker{mpicoll.get_rank()}")
answer = rpc.rpc_sync("worker0", torch.add, (tensor, 1))
rpc.shutdown()
mpicoll.destroy_process_group()
print(f"then {answer.item()}\n", end="", flush=True)

"""One-sided access to the memory of other ranks: put, get, accumulate; and signals, which are messages behind the puts."""

from __future__ import annotations

from ctypes import memmove
from dataclasses import dataclass
from datetime import timedelta
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from mpicoll._base.errors import MpicollError, UnsupportedReduction
from mpicoll._base.waits import EXIT_S
from mpicoll._engine.collectives import REFUSALS, Collectives
from mpicoll._engine.poller import pending, poller
from mpicoll._engine.work import Work
from mpicoll._mpi.backoff import Backoff
from mpicoll._mpi.datatypes import predefined
from mpicoll._mpi.remote_memory import RemoteMemory
from mpicoll._mpi.runtime import SIGNAL_TAGS
from mpicoll._tensors import buffers, checks, reductions
from mpicoll._tensors.reductions import Op

DONE = Work("an access that has ended", [], timeout_s=0)
DONE._complete()
NOTHING = torch.empty(0, dtype=torch.uint8)  # what a signal's message has


def view(memory: Any, offset: int, dtype: torch.dtype, count: int) -> Tensor:
    """A tensor over a buffer. ``offset``: in bytes."""
    with torch.inference_mode(False):
        return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)


@dataclass(frozen=True, eq=False)
class Exposed:
    """The tensors that the ranks of a group have registered with one window."""

    tensor: Tensor  # of this rank
    memory: RemoteMemory
    counts: list[int]  # elements of each rank's tensor
    dtypes: list[torch.dtype]

    def mapped(self, rank: int) -> Tensor | None:
        """The tensor of a rank in memory that this process maps; None if it does not."""
        place = self.memory.mapped[rank]
        return None if place is None else view(*place, self.dtypes[rank], self.counts[rank])


class Accesses:
    """put, get, accumulate, signal, wait_signal, and the registration of tensors, of one group. Ranks are group ranks."""

    def __init__(self, group: Collectives) -> None:
        self.group = group
        self.windows = 0  # that the group has had: equal on all ranks
        self._exposed: list[Exposed] = []

    def share(self, dtype: torch.dtype, count: int) -> Tensor | None:
        """A tensor of so many elements in memory of `remote_memory.share`, or None (collective)."""
        shared = self.group.value("empty_shared", self.group.host.storages.share, count * dtype.itemsize)
        if shared is None or count == 0:
            return None
        memory, offset = shared.parts[self.group.host.windows.node.index(self.group.rank)]
        tensor = view(memory, offset, dtype, count)
        self.group.host.storages.add(tensor.untyped_storage(), shared)
        return tensor

    def expose(self, tensor: Tensor) -> Exposed:
        """Lets the other ranks access a tensor, which must live until `withdraw` (collective).

        Raises:
            ValueError: The tensor is not contiguous, or not on the CPU.
        """
        operation = "tensor_register"
        try:
            _check_memory(operation, tensor)
        except REFUSALS as error:
            self.group.refused(operation, error)
            raise
        place = self.group.channel, tensor.data_ptr(), tensor.nbytes, str(tensor.dtype).removeprefix("torch.").encode()
        memory = self.group.value(operation, RemoteMemory, *place, reads=[tensor])
        dtypes = [getattr(torch, name.decode()) for name in memory.kinds]
        counts = [nbytes // dtype.itemsize for nbytes, dtype in zip(memory.sizes, dtypes, strict=True)]
        exposed = Exposed(tensor, memory, counts, dtypes)
        self._exposed.append(exposed)
        if memory.by_mpi and not all(memory.addresses):
            poller.serve(self.group.channel)
        return exposed

    def withdraw(self, exposed: Exposed) -> None:
        """Ends the access to the tensors of all ranks (collective)."""
        self.group.run("tensor_deregister", (self._withdraw, (exposed,), ()), [])

    def _withdraw(self, exposed: Exposed) -> None:
        self._exposed.remove(exposed)
        exposed.memory.free()
        if not self._exposed:
            poller.rest(self.group.channel)

    def withdraw_all(self) -> None:
        """Frees what is still exposed if all ranks come within `EXIT_S`; MPICH ends with an error if a window is left."""
        while self._exposed and self._all_leave():
            self._withdraw(self._exposed[0])

    def _all_leave(self) -> bool:
        """A dissemination barrier of messages. In MPI's, this rank would end a barrier of another rank that goes on."""
        group = self.group
        pause, deadline, tag, messages = Backoff().pause, monotonic() + EXIT_S, _tag(-1), group.host.messages
        for step in (1 << bit for bit in range((group.size - 1).bit_length())):
            to, source = (group.rank + step) % group.size, (group.rank - step) % group.size
            transfers = [messages.isend(NOTHING, to, tag), messages.irecv(NOTHING, NOTHING, source, tag)]
            while transfers := [each for each in transfers if not each.test()]:
                if monotonic() > deadline:
                    return False
                pause()
        return True

    def access(
        self, operation: str, exposed: Exposed, tensor: Tensor, rank: int, offset: int, async_op: bool, op: Op | None = None
    ) -> Work:
        """Moves all elements of ``tensor`` to, or from, the registered tensor of ``rank``. ``offset``: in elements.

        Raises:
            ValueError: The rank, the offset or the tensor is wrong. Nothing has been written.
            UnsupportedReduction: MPI does not reduce this dtype by ``op`` as it is.
            MpicollError: MPI cannot reach the rank in a job that goes on when a rank dies.
        """
        if self.group.broken is not None:
            self.group.check_usable(operation)
        checks.group_rank(operation, "the peer", rank, self.group.size)
        _check_memory(operation, tensor)
        memory, size = exposed.memory, tensor.dtype.itemsize
        offset, count = offset if type(offset) is int else checks.integer(operation, "the offset", offset), tensor.numel()
        if tensor.dtype != exposed.dtypes[rank]:
            raise TypeError(f"{operation}: the tensor is {tensor.dtype}, that of rank {rank} is {exposed.dtypes[rank]}")
        if offset < 0 or offset + count > exposed.counts[rank]:
            raise ValueError(
                f"{operation}: {count} elements at offset {offset} do not fit into the tensor of rank {rank}, which has "
                f"{exposed.counts[rank]} elements"
            )
        own, there = tensor.data_ptr(), memory.addresses[rank] + offset * size
        reduction = () if op is None else _reduction(operation, tensor.dtype, op)
        if op is None and memory.addresses[rank]:
            target, source = (own, there) if operation == "get" else (there, own)
            memmove(target, source, count * size)
            return DONE
        if not memory.by_mpi:
            raise MpicollError(
                f"{self.group.where(operation)}: MPI cannot access the memory of rank {rank} in a job that goes on when a rank "
                "dies; put and get work in memory of empty_shared, between ranks of one node"
            )
        arguments = operation.capitalize(), own, tensor.nbytes, rank, offset * size, *reduction
        if async_op:  # Open MPI's MPI_Rput of 64 MB waits for the target
            return pending(self.group, operation, self.group.guarded(operation, memory.start, arguments, rank), tensor, rank)
        self.group.guarded(operation, memory.move, arguments, rank)
        return DONE

    def flush(self, operation: str, exposed: Exposed, rank: int | None = None) -> None:
        """Returns when what this rank has started at ``rank``, None: at any rank, has arrived there."""
        for peer in [peer for peer in sorted(exposed.memory.unflushed) if rank in (None, peer)]:
            self.group.guarded(operation, exposed.memory.flush, (peer,), peer)
        exposed.memory.sync()

    def signal(self, number: int, rank: int, async_op: bool, timeout: timedelta | None) -> Work:
        """Sends a signal of the group's window of this number."""
        self.group.check_usable("signal")
        transfer = self.group.host.messages.isend(NOTHING, rank, _tag(number))
        return _ended(pending(self.group, "signal", transfer, NOTHING, rank), async_op, timeout)

    def wait_signal(self, exposed: Exposed, number: int, rank: int, async_op: bool, timeout: timedelta | None) -> Work:
        """Takes one signal from ``rank``: every signal ends one wait."""
        self.group.check_usable("wait_signal")
        transfer = self.group.host.messages.irecv(NOTHING, NOTHING, rank, _tag(number))
        work = pending(self.group, "wait_signal", transfer, NOTHING, rank)
        work._on_completion(exposed.memory.sync)
        return _ended(work, async_op, timeout)


def _check_memory(operation: str, tensor: Tensor) -> None:
    if buffers.is_dense_cpu(tensor):
        return
    checks.movable(operation, tensor)
    if tensor.device.type != "cpu":
        raise ValueError(f"{operation}: the tensor is on device {tensor.device}; windows take tensors in host memory only")
    if not buffers.is_plain(tensor):
        raise ValueError(f"{operation}: the tensor is not contiguous: shape {tuple(tensor.shape)}, strides {tensor.stride()}")


def _reduction(operation: str, dtype: torch.dtype, op: Op) -> tuple[object, object]:
    entry = reductions.lookup(operation, dtype, op)
    if not entry.native:
        raise UnsupportedReduction(f"{operation}: {reductions.name(op)} on {dtype}: MPI does not reduce it as it is")
    return predefined(entry.mpi_type), predefined(entry.mpi_op)


def _tag(number: int) -> int:
    """The tag of a window's signals, one of the group's own tags: see `Channel`."""
    return number % SIGNAL_TAGS - SIGNAL_TAGS


def _ended(work: Work, async_op: bool, timeout: timedelta | None) -> Work:
    work.limit(timeout)
    if not async_op:
        work.wait()
    return work

"""The collectives that are measured: their memory, its values before and after, and a call for each implementation.

Sizes in bytes follow the NCCL tests: all that is gathered, scattered or exchanged, not the part of one rank. All implementations
use the same memory, except for lists of tensors: there MPI uses one array.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from mpicoll._mpi.library import MPI
from mpicoll.bench import patterns

CPU = torch.device("cpu")
Call = Callable[[], object]
Parts = list[tuple[Tensor, Tensor]]  # memory, and the values that repeat in it


@dataclass(frozen=True)
class Memory:
    """The memory that a call reads and writes."""

    sent: Parts = field(default_factory=list)
    expected: Parts = field(default_factory=list)  # the expected result; the same memory as sent for an operation in place
    exact: bool = True

    def prepare(self) -> None:
        for tensor, _ in self.expected:
            tensor.zero_()
        for tensor, values in self.sent:
            patterns.fill(tensor, values)

    def right(self) -> bool:
        return all(patterns.holds(tensor, values, self.exact) for tensor, values in self.expected)

    def clear(self) -> None:
        """Zeroes the memory, so that repeated sums stay 0."""
        for tensor, _ in self.sent + self.expected:
            tensor.zero_()


@dataclass(frozen=True)
class Operation:
    """One row. A call that is None: this rank does not take part.

    Args:
        call_through: Makes the call of a module with the interface of torch.distributed.
        raw: Makes the call of MPI.
    """

    memory: Memory
    call_through: Callable[[Any, Any], Call | None]  # (module, group)
    raw: Callable[[], Call | None] | None  # None: MPI has no such datatype or operation
    raw_memory: Memory | None = None  # None: the same


@dataclass(frozen=True)
class Shape:
    """Sizes and values of this rank."""

    rank: int
    size: int
    count: int  # elements in total; a multiple of size where they are split among ranks
    dtype: torch.dtype
    op: str = "SUM"
    device: torch.device = CPU

    @property
    def part(self) -> int:
        return self.count // self.size

    @property
    def name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def moves(self) -> bool:
        """Whether MPI has this dtype."""
        return mpi_has(self.name, None)

    @property
    def torch_op(self) -> Any:
        return getattr(torch.distributed.ReduceOp, self.op)

    def empty(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=self.dtype, device=self.device)

    def parts(self) -> list[Tensor]:
        return [self.empty(self.part) for _ in range(self.size)]

    def of(self, rank: int, start: int = 0) -> Tensor:
        return patterns.block(rank, start, self.dtype, self.op).to(self.device)

    def reduced(self, start: int = 0) -> Tensor:
        return patterns.reduced(self.size, start, self.dtype, self.op).to(self.device)

    def from_each(self, tensors: Sequence[Tensor], start: int = 0) -> Parts:
        """One of ``tensors`` of each rank, which holds its vector from element ``start`` on."""
        return [(tensor, self.of(rank, start)) for rank, tensor in enumerate(tensors)]

    def to_each(self, tensors: Sequence[Tensor]) -> Parts:
        """One of ``tensors`` for each rank: the parts of the vector of this rank."""
        return [(tensor, self.of(self.rank, i * self.part)) for i, tensor in enumerate(tensors)]

    def raw(self, name: str, *words: object, op: str | None = None) -> Callable[[], Call] | None:
        """Makes the call of MPI, see `mpi_call`; None: MPI has no such datatype or operation."""
        return partial(mpi_call, name, *words, op=op) if mpi_has(self.name, op) else None

    @property
    def exact(self) -> bool:
        return self.op != "AVG"


def all_reduce(s: Shape) -> Operation:
    x = s.empty(s.count)
    memory = Memory([(x, s.of(s.rank))], [(x, s.reduced())], s.exact)
    return Operation(memory, _through("all_reduce", x, s.torch_op), s.raw("Allreduce", MPI.IN_PLACE, x, op=s.op))


def reduce(s: Shape) -> Operation:
    x = s.empty(s.count)
    memory = Memory([(x, s.of(s.rank))], [(x, s.reduced())] if s.rank == 0 else [], s.exact)
    raw = s.raw("Reduce", *((MPI.IN_PLACE, x) if s.rank == 0 else (x, None)), op=s.op)
    return Operation(memory, _through("reduce", x, 0, s.torch_op), raw)


def broadcast(s: Shape) -> Operation:
    x = s.empty(s.count)
    memory = Memory([(x, s.of(0))] if s.rank == 0 else [], [(x, s.of(0))])
    return Operation(memory, _through("broadcast", x, 0), s.raw("Bcast", x))


def all_gather_into_tensor(s: Shape) -> Operation:
    own, every = s.empty(s.part), s.empty(s.count)
    memory = Memory([(own, s.of(s.rank))], s.from_each(every.chunk(s.size)))
    return Operation(memory, _through("all_gather_into_tensor", every, own), s.raw("Allgather", own, every))


def all_gather(s: Shape) -> Operation:
    own, every = s.empty(s.part), s.parts()
    memory, single = Memory([(own, s.of(s.rank))], s.from_each(every)), all_gather_into_tensor(s)
    return Operation(memory, _through("all_gather", every, own), single.raw, single.memory)


def gather(s: Shape) -> Operation:
    own = s.empty(s.part)
    every, whole = (s.parts(), s.empty(s.count)) if s.rank == 0 else (None, None)
    sent = [(own, s.of(s.rank))]
    raw_memory = Memory(sent, [] if whole is None else s.from_each(whole.chunk(s.size)))
    memory = Memory(sent, s.from_each(every or []))
    return Operation(memory, _through("gather", own, every, 0), s.raw("Gather", own, whole), raw_memory)


def scatter(s: Shape) -> Operation:
    own = s.empty(s.part)
    every, whole = (s.parts(), s.empty(s.count)) if s.rank == 0 else (None, None)
    expected = [(own, s.of(0, s.rank * s.part))]
    raw_memory = Memory([] if whole is None else s.to_each(whole.chunk(s.size)), expected)
    memory = Memory(s.to_each(every or []), expected)
    return Operation(memory, _through("scatter", own, every, 0), s.raw("Scatter", whole, own), raw_memory)


def reduce_scatter_tensor(s: Shape) -> Operation:
    own, every = s.empty(s.part), s.empty(s.count)
    memory = Memory([(every, s.of(s.rank))], [(own, s.reduced(s.rank * s.part))], s.exact)
    raw = s.raw("Reduce_scatter_block", every, own, op=s.op)
    return Operation(memory, _through("reduce_scatter_tensor", own, every, s.torch_op), raw)


def reduce_scatter(s: Shape) -> Operation:
    own, every = s.empty(s.part), s.parts()
    memory = Memory(s.to_each(every), [(own, s.reduced(s.rank * s.part))], s.exact)
    single = reduce_scatter_tensor(s)
    return Operation(memory, _through("reduce_scatter", own, every, s.torch_op), single.raw, single.memory)


def all_to_all_single(s: Shape) -> Operation:
    out, x = s.empty(s.count), s.empty(s.count)
    memory = Memory([(x, s.of(s.rank))], s.from_each(out.chunk(s.size), s.rank * s.part))
    return Operation(memory, _through("all_to_all_single", out, x, None, None), s.raw("Alltoall", x, out))


def all_to_all(s: Shape) -> Operation:
    out, x = s.parts(), s.parts()
    memory, single = Memory(s.to_each(x), s.from_each(out, s.rank * s.part)), all_to_all_single(s)
    return Operation(memory, _through("all_to_all", out, x), single.raw, single.memory)


def barrier(s: Shape) -> Operation:
    return Operation(Memory(), _through("barrier"), partial(mpi_call, "Barrier"))


NEWER = {"all_gather_into_tensor": "all_gather_single", "reduce_scatter_tensor": "reduce_scatter_single"}  # of torch >= 2.13


def _through(name: str, *arguments: object) -> Callable[[Any, Any], Call]:
    """`Operation.call_through` for a function whose last argument is the group.

    Takes the newer of two names: torch >= 2.13 warns at each call of the older one.
    """
    newer = NEWER.get(name, name)
    known = newer if hasattr(torch.distributed, newer) else name
    return lambda dist, group: partial(getattr(dist, known), *arguments, group)


COLLECTIVES: dict[str, Callable[[Shape], Operation]] = {
    made.__name__: made
    for made in (
        all_reduce, reduce, broadcast, all_gather, all_gather_into_tensor, gather, scatter,
        reduce_scatter, reduce_scatter_tensor, all_to_all, all_to_all_single, barrier,
    )
}  # fmt: skip


# --- plain MPI calls, as users write them with mpi4py and NumPy -------------------------------------------------------

MPI_OPERATIONS = {"SUM": MPI.SUM, "PRODUCT": MPI.PROD, "MIN": MPI.MIN, "MAX": MPI.MAX}
MPI_BITWISE = {"BAND": MPI.BAND, "BOR": MPI.BOR, "BXOR": MPI.BXOR}
MPI_INTEGERS = {f"{sign}int{bits}": getattr(MPI, f"{sign}int{bits}_t".upper()) for sign in ("", "u") for bits in (8, 16, 32, 64)}
MPI_FLOATS = {"float32": MPI.FLOAT, "float64": MPI.DOUBLE}
MPI_DATATYPES: dict[str, MPI.Datatype] = {**MPI_INTEGERS, **MPI_FLOATS}  # by NumPy name


def mpi_has(dtype: str, op: str | None) -> bool:
    """Whether MPI has a datatype for this dtype, by its NumPy name, and this reduction of it."""
    return dtype in MPI_DATATYPES and (op is None or op in MPI_OPERATIONS or (op in MPI_BITWISE and dtype in MPI_INTEGERS))


def mpi_call(name: str, *words: object, op: str | None = None) -> Call:
    """The call ``MPI.COMM_WORLD.name(*words)``, with buffers and datatypes bound in advance. The root is rank 0.

    Args:
        words: A tensor becomes its NumPy array and datatype.
        op: The reduction, which is the last word.
    """
    bound = [_buffer(word) if isinstance(word, Tensor) else word for word in words]
    return partial(getattr(MPI.COMM_WORLD, name), *bound, *([] if op is None else [{**MPI_OPERATIONS, **MPI_BITWISE}[op]]))


def _buffer(tensor: Tensor) -> list[object]:
    array = tensor.numpy()
    return [array, MPI_DATATYPES[array.dtype.name]]

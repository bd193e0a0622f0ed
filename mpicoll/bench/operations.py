"""The collectives that are measured: their memory, its values before and after, and a call for each implementation.

Sizes in bytes follow the NCCL tests: all that is gathered, scattered or exchanged, not the part of one rank. All implementations
use the same memory, except for lists of tensors: there MPI uses one array.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from mpicoll.bench import patterns, raw_mpi

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
        return raw_mpi.moves(self.name)

    @property
    def reduces(self) -> bool:
        return raw_mpi.reduces(self.name, self.op)

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

    @property
    def exact(self) -> bool:
        return self.op != "AVG"


def all_reduce(s: Shape) -> Operation:
    x = s.empty(s.count)
    memory = Memory([(x, s.of(s.rank))], [(x, s.reduced())], s.exact)
    raw = (lambda: raw_mpi.all_reduce(x.numpy(), s.op)) if s.reduces else None
    return Operation(memory, lambda dist, group: partial(dist.all_reduce, x, s.torch_op, group), raw)


def reduce(s: Shape) -> Operation:
    x = s.empty(s.count)
    memory = Memory([(x, s.of(s.rank))], [(x, s.reduced())] if s.rank == 0 else [], s.exact)
    raw = (lambda: raw_mpi.reduce(x.numpy(), s.op)) if s.reduces else None
    return Operation(memory, lambda dist, group: partial(dist.reduce, x, 0, s.torch_op, group), raw)


def broadcast(s: Shape) -> Operation:
    x = s.empty(s.count)
    memory = Memory([(x, s.of(0))] if s.rank == 0 else [], [(x, s.of(0))])
    raw = (lambda: raw_mpi.broadcast(x.numpy())) if s.moves else None
    return Operation(memory, lambda dist, group: partial(dist.broadcast, x, 0, group), raw)


def all_gather_into_tensor(s: Shape) -> Operation:
    own, every = s.empty(s.part), s.empty(s.count)
    memory = Memory([(own, s.of(s.rank))], [(part, s.of(i)) for i, part in enumerate(every.chunk(s.size))])
    raw = (lambda: raw_mpi.all_gather(every.numpy(), own.numpy())) if s.moves else None
    return Operation(memory, lambda dist, group: partial(_single(dist, "all_gather"), every, own, group), raw)


def all_gather(s: Shape) -> Operation:
    own, every = s.empty(s.part), s.parts()
    memory = Memory([(own, s.of(s.rank))], [(part, s.of(i)) for i, part in enumerate(every)])
    return _with_raw(memory, lambda dist, group: partial(dist.all_gather, every, own, group), all_gather_into_tensor(s))


def gather(s: Shape) -> Operation:
    own = s.empty(s.part)
    every = s.parts() if s.rank == 0 else None
    whole = s.empty(s.count) if s.rank == 0 else None
    sent = [(own, s.of(s.rank))]
    memory = Memory(sent, [(part, s.of(i)) for i, part in enumerate(every or [])])
    raw_memory = Memory(sent, [(part, s.of(i)) for i, part in enumerate([] if whole is None else whole.chunk(s.size))])
    raw = (lambda: raw_mpi.gather(None if whole is None else whole.numpy(), own.numpy())) if s.moves else None
    return Operation(memory, lambda dist, group: partial(dist.gather, own, every, 0, group), raw, raw_memory)


def scatter(s: Shape) -> Operation:
    own = s.empty(s.part)
    every = s.parts() if s.rank == 0 else None
    whole = s.empty(s.count) if s.rank == 0 else None
    expected = [(own, s.of(0, s.rank))]
    memory = Memory([(part, s.of(0, i)) for i, part in enumerate(every or [])], expected)
    raw_memory = Memory([(part, s.of(0, i)) for i, part in enumerate([] if whole is None else whole.chunk(s.size))], expected)
    raw = (lambda: raw_mpi.scatter(own.numpy(), None if whole is None else whole.numpy())) if s.moves else None
    return Operation(memory, lambda dist, group: partial(dist.scatter, own, every, 0, group), raw, raw_memory)


def reduce_scatter_tensor(s: Shape) -> Operation:
    own, every = s.empty(s.part), s.empty(s.count)
    memory = Memory([(every, s.of(s.rank))], [(own, s.reduced(s.rank * s.part))], s.exact)
    raw = (lambda: raw_mpi.reduce_scatter(own.numpy(), every.numpy(), s.op)) if s.reduces else None

    def call_through(dist: Any, group: Any) -> Call:
        return partial(_single(dist, "reduce_scatter"), own, every, s.torch_op, group)

    return Operation(memory, call_through, raw)


def reduce_scatter(s: Shape) -> Operation:
    own, every = s.empty(s.part), s.parts()
    sent = [(part, s.of(s.rank, i * s.part)) for i, part in enumerate(every)]
    memory = Memory(sent, [(own, s.reduced(s.rank * s.part))], s.exact)

    def call_through(dist: Any, group: Any) -> Call:
        return partial(dist.reduce_scatter, own, every, s.torch_op, group)

    return _with_raw(memory, call_through, reduce_scatter_tensor(s))


def all_to_all_single(s: Shape) -> Operation:
    out, x = s.empty(s.count), s.empty(s.count)
    memory = Memory([(x, s.of(s.rank))], [(part, s.of(i, s.rank * s.part)) for i, part in enumerate(out.chunk(s.size))])
    raw = (lambda: raw_mpi.all_to_all(out.numpy(), x.numpy())) if s.moves else None
    return Operation(memory, lambda dist, group: partial(dist.all_to_all_single, out, x, None, None, group), raw)


def all_to_all(s: Shape) -> Operation:
    out, x = s.parts(), s.parts()
    sent = [(part, s.of(s.rank, i * s.part)) for i, part in enumerate(x)]
    memory = Memory(sent, [(part, s.of(i, s.rank * s.part)) for i, part in enumerate(out)])
    return _with_raw(memory, lambda dist, group: partial(dist.all_to_all, out, x, group), all_to_all_single(s))


def barrier(s: Shape) -> Operation:
    return Operation(Memory(), lambda dist, group: partial(dist.barrier, group), raw_mpi.barrier)


def _single(dist: Any, operation: str) -> Any:
    """The newer of two names: torch >= 2.13 warns at each call of the older one."""
    old = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}[operation]
    return getattr(dist, f"{operation}_single") if hasattr(torch.distributed, f"{operation}_single") else getattr(dist, old)


def _with_raw(memory: Memory, call_through: Callable[[Any, Any], Call], single: Operation) -> Operation:
    return Operation(memory, call_through, single.raw, single.memory)


COLLECTIVES: dict[str, Callable[[Shape], Operation]] = {
    made.__name__: made
    for made in (
        all_reduce, reduce, broadcast, all_gather, all_gather_into_tensor, gather, scatter,
        reduce_scatter, reduce_scatter_tensor, all_to_all, all_to_all_single, barrier,
    )
}  # fmt: skip

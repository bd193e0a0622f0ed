"""The harness: a world, groups of Gloo and NCCL on the same ranks, a control channel, and the measurement of a row."""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed

import mpicoll
from mpicoll._algorithms import blocks
from mpicoll._base.errors import UnsupportedReduction
from mpicoll._device import streams
from mpicoll.bench import formulas
from mpicoll.bench.formulas import REDUCTIONS, spell
from mpicoll.bench.operations import CPU, Memory, Operation, Shape
from mpicoll.bench.rounds import Call, ControlChannel, Pace, Rounds
from mpicoll.bench.row import API, BACKEND, BUS, COPIES, COPY, GLOO, NCCL, RAW, Row

WAYS = (API, BACKEND, GLOO, RAW)
FLOORS = (COPY, COPIES, BUS)
REFUSALS = (RuntimeError, ValueError, TypeError, NotImplementedError)  # errors by which backends of torch refuse an operation
Maker = Callable[[Shape], Operation]


class Skipped(Exception):
    """This row cannot be measured on any rank; the message says why."""


@dataclass
class Harness:
    """Measures rows in one job; every method is collective. device: of the tensors; those of raw MPI are on the host."""

    control: ControlChannel
    pace: Pace
    device: torch.device = CPU

    @property
    def rank(self) -> int:
        return self.control.rank

    @property
    def size(self) -> int:
        return self.control.size

    @cached_property
    def rounds(self) -> Rounds:
        return Rounds(self.control, self.pace)

    @cached_property
    def gloo(self) -> Any:
        """A Gloo group of torch on the same ranks."""
        return torch.distributed.new_group(backend="gloo")

    @cached_property
    def nccl(self) -> Any:
        """An NCCL group of torch on the same ranks, or the reason why there is none."""
        if not torch.distributed.is_nccl_available():
            return "this torch has no NCCL"
        places = self.control.all((socket.gethostname(), self.device.index))
        if len(set(places)) < len(places):
            return "ranks share a GPU, which NCCL refuses"
        return torch.distributed.new_group(backend="nccl")

    def shape(self, nbytes: int, dtype: torch.dtype, op: str = "SUM") -> Shape:
        return Shape(self.rank, self.size, nbytes // dtype.itemsize, dtype, op, self.device)

    def row(self, what: str, make: Maker, nbytes: int, dtype: torch.dtype, op: str, ways: Sequence[str] = WAYS) -> Row:
        """Checks each implementation, then times all of them.

        Args:
            nbytes: Total size, see operations.py.
            ways: Implementations, from `WAYS`.

        Raises:
            Skipped: The dtype does not support the op.
            AssertionError: A result is wrong; the message names the implementation.
        """
        shape = self.shape(nbytes, dtype, op)
        label = " ".join([what, shape.name, op if what in REDUCTIONS else "", spell(nbytes)])
        operation = make(shape)
        tried = dict.fromkeys(ways, operation)
        if RAW in tried and self.device != CPU:
            tried[RAW] = make(replace(shape, device=CPU))
        calls, missing = self._checked(label, tried)
        calls |= self.copies(what, nbytes)
        times = self.rounds.times(calls)
        if what == "latency":  # a call is a round trip
            times = {way: series if way in FLOORS else [t / 2 for t in series] for way, series in times.items()}
        named = ("", "") if not nbytes else (shape.name, op if what in REDUCTIONS else "")
        return Row(what, nbytes, self.size, times, *named, missing)

    def _checked(self, label: str, tried: Mapping[str, Operation]) -> tuple[dict[str, Call | None], dict[str, str]]:
        """The calls by implementation, and the reasons for missing ones."""
        calls, missing = {}, {}
        for way, operation in tried.items():
            if way == RAW and operation.raw is None:
                missing[way] = "MPI has no such datatype or operation"
                continue
            if way == NCCL and isinstance(self.nccl, str):
                missing[way] = self.nccl
                continue
            memory = operation.raw_memory or operation.memory if way == RAW else operation.memory
            call = self._call(operation, way)
            refusal = self._check(f"{label}: {way}", way, call, memory)
            if refusal is None:
                calls[way] = call
            else:
                missing[way] = refusal
        return calls, missing

    def _call(self, operation: Operation, way: str) -> Call | None:
        if way == RAW:
            return None if operation.raw is None else operation.raw()
        if way in (GLOO, NCCL):
            call = operation.call_through(torch.distributed, self.gloo if way == GLOO else self.nccl)
        else:
            call = operation.call_through(torch.distributed if way == BACKEND else mpicoll, None)
        return call if call is None or self.device == CPU else self._settled(call)

    def _settled(self, call: Call) -> Call:
        """The call, and a wait for all GPU work that it has started."""

        def called() -> None:
            call()
            streams.settle(self.device)

        return called

    def _check(self, label: str, way: str, call: Call | None, memory: Memory) -> str | None:
        """Calls once with test values. Returns the reason if a backend of torch refuses; raises if the result is wrong."""
        memory.prepare()
        refusal = None
        try:
            if call is not None:
                call()
        except UnsupportedReduction as error:
            raise Skipped(f"{label}: {error}") from None
        except REFUSALS as error:
            if way not in (GLOO, NCCL):
                raise
            refusal = str(error).split("\n")[0]
        if all(self.control.all(refusal is None)) and not memory.right():
            raise AssertionError(f"{label}: wrong result on rank {self.rank} of {self.size}")
        memory.clear()
        self.control.arrive()  # a rank with a wrong result has ended the job by now
        return refusal

    def copies(self, what: str, nbytes: int) -> dict[str, Call | None]:
        """The memory copies of the floor: by rank 0 alone, and by all ranks at once. Empty if the row has no floor."""
        copied = formulas.floor_bytes(what, nbytes, self.size)
        if not copied:
            return {}
        make = _memory_copy if self.device == CPU else self._device_copy
        call = make(copied, formulas.repeats(what))
        over_the_bus = {} if self.device == CPU else {BUS: self._device_copy(nbytes, 1, out=True)}
        return {COPY: call if self.rank == 0 else None, COPIES: call, **over_the_bus}

    def _device_copy(self, nbytes: int, times: int, out: bool = False) -> Call:
        """out: to pinned host memory."""
        source = torch.ones(nbytes, dtype=torch.uint8, device=self.device)
        target = streams.pinned(source.shape, source.dtype) if out else torch.ones_like(source)
        return self._settled(lambda: [target.copy_(source, non_blocking=True) for _ in range(times)])


def _memory_copy(nbytes: int, times: int) -> Call:
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)
    to, origin = target.data_ptr(), source.data_ptr()
    copy = ctypes.memmove if torch.get_num_threads() == 1 else blocks.copy

    def call() -> tuple[object, object]:
        for _ in range(times):
            copy(to, origin, nbytes)
        return source, target  # keeps the memory alive as long as the call

    return call


@contextmanager
def open_harness(pace: Pace, device: str = "cpu", threads: int = 1) -> Iterator[Harness]:
    """Makes the world and destroys it (collective)."""
    torch.set_num_threads(threads)
    mpicoll.init_process_group()
    torch.set_num_threads(threads)  # a start may have changed the number
    control = ControlChannel()
    harness = Harness(control, pace, CPU if device == "cpu" else streams.own_device(control.local_rank))
    yield harness
    control.arrive()
    mpicoll.destroy_process_group()
    control.close()

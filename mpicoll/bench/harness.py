"""Where rows are measured: the world, a Gloo group of the same ranks, the control; and the ways to call one collective there."""

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
from mpicoll._cuda import streams
from mpicoll.bench import formulas
from mpicoll.bench.control import ControlChannel
from mpicoll.bench.formulas import REDUCTIONS, spell
from mpicoll.bench.operations import CPU, Memory, Operation, Shape
from mpicoll.bench.rounds import Call, Pace, Rounds
from mpicoll.bench.row import API, BACKEND, BUS, COPIES, COPY, FLOAT32, GLOO, NCCL, RAW, Row
from mpicoll.errors import UnsupportedReduction

WAYS = (API, BACKEND, GLOO, RAW)
FLOORS = (COPY, COPIES, BUS)
REFUSALS = (RuntimeError, ValueError, TypeError, NotImplementedError)  # of torch's own backends
Maker = Callable[[Shape], Operation]


class Skipped(Exception):
    """This row cannot be measured, on any rank; says why."""


def has_twin(what: str, dtype: torch.dtype) -> bool:
    """Whether as many bytes of float32 are measured beside it."""
    return what in REDUCTIONS and dtype in (torch.float16, torch.bfloat16)


@dataclass
class Harness:
    """One job's; every method is collective.

    device: where the tensors are that collectives and messages take; MPI's own (RAW) takes the host's memory.
    """

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
        """torch's Gloo, on the same ranks."""
        return torch.distributed.new_group(backend="gloo")

    @cached_property
    def nccl(self) -> Any:
        """torch's NCCL, on the same ranks; why there is none, if there is none."""
        if not torch.distributed.is_nccl_available():
            return "this torch has no NCCL"
        places = self.control.all((socket.gethostname(), self.device.index))
        if len(set(places)) < len(places):
            return "ranks share a GPU, which NCCL refuses"
        return torch.distributed.new_group(backend="nccl")

    def shape(self, nbytes: int, dtype: torch.dtype, op: str = "SUM") -> Shape:
        return Shape(self.rank, self.size, nbytes // dtype.itemsize, dtype, op, self.device)

    def row(self, what: str, make: Maker, nbytes: int, dtype: torch.dtype, op: str, ways: Sequence[str] = WAYS) -> Row:
        """Checks each way, then measures all.

        Args:   nbytes: of the whole, see operations.py. ways: out of WAYS.
        Raises: Skipped: the dtype does not have the op. AssertionError: a wrong result, naming the way.
        """
        shape = self.shape(nbytes, dtype, op)
        label = " ".join([what, shape.name, op if what in REDUCTIONS else "", spell(nbytes)])
        operation = make(shape)
        tried = dict.fromkeys(ways, operation)
        if RAW in tried and self.device != CPU:
            tried[RAW] = make(replace(shape, device=CPU))
        if has_twin(what, dtype):
            tried[FLOAT32] = make(self.shape(nbytes, torch.float32, op))
        calls, missing = self._checked(label, tried)
        calls |= self.copies(what, nbytes)
        times = self.rounds.times(calls)
        if what == "latency":  # a call is there and back
            times = {way: series if way in FLOORS else [t / 2 for t in series] for way, series in times.items()}
        named = ("", "") if not nbytes else (shape.name, op if what in REDUCTIONS else "")
        return Row(what, nbytes, self.size, times, *named, missing)

    def _checked(self, label: str, tried: Mapping[str, Operation]) -> tuple[dict[str, Call | None], dict[str, str]]:
        """The calls by way, and why others are missing."""
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
        """With all that it has given the GPU."""

        def called() -> None:
            call()
            streams.settle(self.device)

        return called

    def _check(self, label: str, way: str, call: Call | None, memory: Memory) -> str | None:
        """Calls once, on values that tell where they come from; returns why a backend of torch's refused."""
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
        self.control.arrive()  # a rank that was wrong ends the job here
        return refusal

    def copies(self, what: str, nbytes: int) -> dict[str, Call | None]:
        """The floor, by rank 0 alone and by all ranks at once; nothing where the row has none."""
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

        def call() -> None:
            for _ in range(times):
                target.copy_(source, non_blocking=True)

        return self._settled(call)


def _memory_copy(nbytes: int, times: int) -> Call:
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)
    to, origin, copy = target.data_ptr(), source.data_ptr(), ctypes.memmove

    def call() -> tuple[object, object]:
        for _ in range(times):
            copy(to, origin, nbytes)
        return source, target  # the memory lives as long as the call

    return call


@contextmanager
def open_harness(pace: Pace, device: str = "cpu") -> Iterator[Harness]:
    """Makes the world, and destroys it (collective)."""
    mpicoll.init_process_group()
    torch.set_num_threads(1)
    control = ControlChannel()
    made = Harness(control, pace, CPU if device == "cpu" else streams.own_device(control.place))
    yield made
    made.control.arrive()
    mpicoll.destroy_process_group()
    made.control.close()

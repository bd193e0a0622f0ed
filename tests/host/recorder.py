"""Runs the collectives of `HostCollectives` for any number of ranks in one process, and records what each rank would do.

The choice of the algorithm, the algorithms, the exchanges, the window and the channel are the real ones. Replaced is what is
below and beside them:

    communicator   notes messages and collectives, and moves nothing; each request has ended when it is asked for
    segment        memory of its own for each rank, in which all other ranks have announced all turns
    memmove        notes its bytes
    kernels        note their operands

The ranks run one after the other, and `unmatched` joins their records. A rank that looks for a message (Iprobe) finds those that
the others have sent in the round before: the rank runs again until all that it needs has been sent. The record does not show
messages that a collective of MPI sends. It shows no times: benchmarks/model.py computes them from the events.
"""

from __future__ import annotations

import mmap
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias
from unittest import mock

import torch
from mpi4py import MPI
from torch import Tensor
from torch.distributed import ReduceOp

from mpicoll._algorithms import direct, plans, rail, stages, window, windows
from mpicoll._algorithms.hierarchical import Stages
from mpicoll._algorithms.plans import Plan
from mpicoll._algorithms.window import LINE, Window
from mpicoll._algorithms.windows import Windows
from mpicoll._host import algorithm_choice, collectives
from mpicoll._host.algorithm_choice import Choices
from mpicoll._host.collectives import HostCollectives
from mpicoll._mpi import shared_segment
from mpicoll._mpi.channel import Channel
from mpicoll._mpi.datatypes import BYTE
from mpicoll._mpi.shared_segment import WORD, Segment
from mpicoll._mpi.topology import Topology
from mpicoll._tensors import calls
from mpicoll._tensors.combine import Kernel

ALWAYS = 1 << 62  # more turns than a rank takes


class Message(NamedTuple):
    """A message as its sender or its receiver sees it. ``rank``: the other one of them."""

    comm: str
    rank: int
    tag: int
    nbytes: int


class Event(NamedTuple):
    """What a rank does at one point of its program. ``of`` depends on the kind:

    send, receive    the Message
    collective       (name, number of ranks, bytes of this rank's memory)
    barrier          number of ranks
    wait             the number of the event whose end the rank needs
    copy             number of calls of memmove, one behind the other, of ``nbytes`` together
    combine          number of operands of ``nbytes`` each; also reduce_local
    announce, await  (method of Window, turn)
    """

    kind: str
    of: Any
    nbytes: int = 0


@dataclass
class Record:
    """What one rank has done."""

    rank: int
    events: list[Event] = field(default_factory=list)  # in their order
    calls: Counter[str] = field(default_factory=Counter)  # of MPI, by name
    algorithms: list[str] = field(default_factory=list)  # as the log names them
    turns: int = 0  # of the window
    open: int = 0  # requests that nobody has waited for
    open_receives: int = 0
    most_open: int = 0
    most_receives: int = 0

    def all_of(self, kind: str) -> list[Any]:
        return [event.of for event in self.events if event.kind == kind]

    @property
    def sends(self) -> list[Message]:
        return self.all_of("send")

    @property
    def receives(self) -> list[Message]:
        return self.all_of("receive")

    @property
    def collectives(self) -> list[tuple[str, int, int]]:
        return self.all_of("collective")

    @property
    def copies(self) -> int:
        """Number of calls of memmove, within the node."""
        return sum(self.all_of("copy"))

    @property
    def copied(self) -> int:
        """Their bytes."""
        return sum(event.nbytes for event in self.events if event.kind == "copy")

    @property
    def operands(self) -> int:
        """Of all calls of kernels: each is a call of torch."""
        return sum(self.all_of("combine"))

    @property
    def mpi_calls(self) -> int:
        return self.calls.total()

    def note(self, kind: str, of: Any, nbytes: int = 0) -> int:
        """Returns the number of the event."""
        self.events.append(Event(kind, of, nbytes))
        return len(self.events) - 1

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Replaces memmove. Copies one behind the other are one event: a reduce_scatter makes a million."""
        last = self.events[-1] if self.events else None
        if last is not None and last.kind == "copy":
            self.events[-1] = Event("copy", last.of + 1, last.nbytes + nbytes)
        else:
            self.note("copy", 1, nbytes)

    def combine(self, parts: Sequence[Tensor], out: Tensor) -> None:
        """Replaces a kernel."""
        self.note("combine", len(parts), out.nbytes)

    def reduce_local(self, part: Sequence[Any], out: Sequence[Any]) -> None:
        """Replaces MPI_Reduce_local."""
        self.calls["Reduce_local"] += 1
        self.note("reduce_local", 1, memoryview(part[0]).nbytes)


class Blocked(Exception):
    """The rank looks for a message that its sender has not sent in the round before."""


class Request:
    """A message or a collective under way, event ``number``; a receive of ``received``. It has ended when it is asked for."""

    def __init__(self, record: Record, number: int, received: Message | None = None) -> None:
        self._record, self._number, self._received, self._open = record, number, received, True
        record.open += 1
        record.open_receives += received is not None
        record.most_open = max(record.most_open, record.open)
        record.most_receives = max(record.most_receives, record.open_receives)

    def Wait(self, status: MPI.Status | None = None) -> None:
        self._end("Wait", status)

    def Test(self, status: MPI.Status | None = None) -> bool:
        self._end("Test", status)
        return True

    def _end(self, name: str, status: MPI.Status | None) -> None:
        record, received = self._record, self._received
        record.calls[name] += 1
        record.note("wait", self._number)
        record.open -= self._open
        record.open_receives -= self._open and received is not None
        self._open = False
        if status is not None and received is not None:
            status.Set_elements(BYTE, received.nbytes)


class Communicator:
    """A communicator of ``members``, ranks of the group. ``sent``: what each rank has sent in the round before."""

    def __init__(self, job: Job, record: Record, members: Sequence[int], sent: Sent, name: str = "all") -> None:
        self._job, self._record, self._members, self._sent, self._name = job, record, members, sent, name
        self._coming: dict[int, deque[Message]] = {}

    def Get_rank(self) -> int:
        return self._members.index(self._record.rank)

    def Get_size(self) -> int:
        return len(self._members)

    def Split(self, place: int, node: int) -> Communicator:
        rail = range(place, self._job.ranks, self._job.ranks_per_node)
        assert rail[node] == self._record.rank
        return Communicator(self._job, self._record, rail, self._sent, f"rail {place}")

    def Isend(self, buffer: Sequence[Any], peer: int, tag: int) -> Request:
        self._record.calls["Isend"] += 1
        message = self._message(buffer, peer, tag)
        return Request(self._record, self._record.note("send", message, message.nbytes))

    def Irecv(self, buffer: Sequence[Any], peer: int, tag: int) -> Request:
        self._record.calls["Irecv"] += 1
        message = self._message(buffer, peer, tag)
        if peer in self._coming:
            self._coming[peer].popleft()
        return Request(self._record, self._record.note("receive", message, message.nbytes), message)

    def Iprobe(self, peer: int, tag: int, status: MPI.Status) -> bool:
        self._record.calls["Iprobe"] += 1
        if peer not in self._coming:
            sent = self._sent.get(self._members[peer], ())
            envelope = self._name, self._record.rank, tag
            self._coming[peer] = deque(message for message in sent if message[:3] == envelope)
        if not self._coming[peer]:
            raise Blocked
        status.Set_source(peer)
        status.Set_tag(tag)
        status.Set_elements(BYTE, self._coming[peer][0].nbytes)
        return True

    def Ibarrier(self) -> Request:
        self._record.calls["Ibarrier"] += 1
        return Request(self._record, self._record.note("barrier", len(self._members)))

    def __getattr__(self, name: str) -> Callable[..., Request | None]:
        """MPI's collectives, blocking or not."""
        if not hasattr(MPI.Intracomm, name):
            raise AttributeError(name)

        def call(*arguments: Any) -> Request | None:
            memories = [argument[0] for argument in arguments[:2] if isinstance(argument, list)]
            nbytes = max(memoryview(memory).nbytes for memory in memories)
            self._record.calls[name] += 1
            number = self._record.note("collective", (name, len(self._members), nbytes), nbytes)
            return Request(self._record, number) if name.startswith("I") else None

        return call

    def _message(self, buffer: Sequence[Any], peer: int, tag: int) -> Message:
        _, count, datatype = buffer
        return Message(self._name, self._members[peer], tag, count * datatype.Get_size())


class Job(NamedTuple):
    """A group of ``ranks`` on nodes of ``ranks_per_node``, each with ``threads``, and rank 0's settings."""

    ranks: int
    ranks_per_node: int
    choices: Choices = Choices()
    overruns: bool = False  # `Runtime.overruns`
    threads: int = 1

    @property
    def nodes(self) -> int:
        return self.ranks // self.ranks_per_node

    @property
    def known(self) -> algorithm_choice.Thresholds:
        return algorithm_choice.of_group(self.choices, [self.ranks_per_node] * self.nodes)

    def record(
        self, operation: str, nbytes: int, dtype: torch.dtype = torch.float32, ranks: Iterable[int] | None = None
    ) -> Records:
        """Runs ``operation`` on every rank, or on some of them if none has to look for messages of the others."""

        def run(host: HostCollectives, record: Record) -> None:
            plan = plans.lookup(operation, dtype, ReduceOp.SUM)
            assert plan.kernel is not None
            OPERATIONS[operation](host, replace(plan, kernel=plan.kernel._replace(combine=record.combine)), nbytes)

        records: dict[int, Record] = {}
        running = list(range(self.ranks) if ranks is None else ranks)
        while running:
            sent = {rank: record.sends for rank, record in records.items()}
            blocked = [rank for rank in running if not self._ran(run, rank, sent, records)]
            new = sum(len(record.sends) for record in records.values()) - sum(map(len, sent.values()))
            assert new or not blocked, f"ranks {blocked} wait for messages that nobody sends"
            running = blocked
        return Records(self, records)

    def _ran(self, run: Callable[[HostCollectives, Record], None], rank: int, sent: Sent, records: dict[int, Record]) -> bool:
        record = records[rank] = Record(rank)
        with _recording(self, record):
            host = self._host(record, sent)
            try:
                run(host, record)
            except Blocked:
                return False
        of_node = host.windows.window if host.windows.nodes is None else host.windows.nodes.window
        record.turns = 0 if of_node is None else of_node.turn
        assert record.open == 0, "the operation has ended before its requests"
        return True

    def _host(self, record: Record, sent: Sent) -> HostCollectives:
        """What `registry.host_collectives` returns, over a communicator that records."""
        runtime: Any = SimpleNamespace(
            lock=nullcontext(), thread_levels=(MPI.THREAD_MULTIPLE,), serialized=False, overruns=self.overruns, tag_ub=0
        )
        comm: Any = Communicator(self, record, range(self.ranks), sent)
        channel = Channel(runtime, comm)
        nodes = tuple(rank // self.ranks_per_node * self.ranks_per_node for rank in range(self.ranks))
        made = Windows(channel, Topology(nodes, crowded=False, threads=self.threads), self.choices.chunk, channel.in_background)
        if self.known.large == algorithm_choice.HIERARCHICAL:
            made.connect()
        return HostCollectives(channel, made, self.known, lambda _, name, __: record.algorithms.append(name), checked=False)


class Records(NamedTuple):
    """What the ranks have done, by rank."""

    job: Job
    of: dict[int, Record]

    def unmatched(self) -> list[str]:
        """Describes the pairs whose sends and receives differ in number, order, size or tag. Of ranks without a record: none."""
        sends, receives = self._by_pair("sends"), self._by_pair("receives")
        pairs = sends.keys() | receives.keys()
        wrong = (pair for pair in pairs if sends.get(pair) != receives.get(pair) and self.of.keys() >= {*pair[1:]})
        return [f"{pair}: sent {sends.get(pair)}, received {receives.get(pair)}" for pair in sorted(wrong)]

    def _by_pair(self, side: str) -> dict[tuple[str, int, int], list[tuple[int, int]]]:
        """The (tag, size) of the messages of each communicator, sender and receiver."""
        found: dict[tuple[str, int, int], list[tuple[int, int]]] = {}
        for rank, record in self.of.items():
            for message in getattr(record, side):
                pair = (rank, message.rank) if side == "sends" else (message.rank, rank)
                found.setdefault((message.comm, *pair), []).append((message.tag, message.nbytes))
        return found

    def card(self) -> int:
        """Returns the bytes of the messages that leave the node that sends most."""
        size, found = self.job.ranks_per_node, Counter[int]()
        for rank, record in self.of.items():
            found[rank // size] += sum(each.nbytes for each in record.sends if each.rank // size != rank // size)
        return max(found.values())

    def most(self, value: Callable[[Record], int]) -> int:
        return max(map(value, self.of.values()))

    def algorithm(self) -> set[str]:
        return {name for record in self.of.values() for name in record.algorithms} or {"one MPI call"}


Sent: TypeAlias = "Mapping[int, Sequence[Message]]"
Operation: TypeAlias = "Callable[[HostCollectives, Plan, int], None]"  # the plan is of a sum; bytes, of all blocks together


def _all_reduce(host: HostCollectives, plan: Plan, nbytes: int) -> None:
    memory = _empty(nbytes, plan)
    calls.run(host.all_reduce(memory, plan))


def _reduce(host: HostCollectives, plan: Plan, nbytes: int) -> None:
    memory = _empty(nbytes, plan)
    calls.run(host.reduce(memory, plan, 1))


def _reduce_scatter(host: HostCollectives, plan: Plan, nbytes: int) -> None:
    source, target = _empty(nbytes, plan), _empty(nbytes // host.size, plan)
    calls.run(host.reduce_scatter_single(target, source, plan))


def _all_gather(host: HostCollectives, plan: Plan, nbytes: int) -> None:
    target, source = _empty(nbytes, plan), _empty(nbytes // host.size, plan)
    calls.run(host.all_gather_single(target, source))


def _broadcast(host: HostCollectives, plan: Plan, nbytes: int) -> None:
    memory = _empty(nbytes, plan)
    calls.run(host.broadcast(memory, 1))


def _all_to_all(host: HostCollectives, plan: Plan, nbytes: int) -> None:
    target, source = _empty(nbytes, plan), _empty(nbytes, plan)
    calls.run(host.all_to_all_even(target, source))


def _gather(host: HostCollectives, plan: Plan, nbytes: int) -> None:
    source = _empty(nbytes // host.size, plan)
    targets = list(_empty(nbytes, plan).split(source.numel())) if host.rank == 1 else None
    calls.run(host.gather(targets, source, 1))


OPERATIONS: dict[str, Operation] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "broadcast": _broadcast,
    "all_to_all": _all_to_all,
    "gather": _gather,
}  # fmt: skip


WORDS = {
    "announce": (Window.lay, Window.take),
    "await": (Window.free, Window.await_laid, Window.await_laid_by, Window.await_taken),
}


def _empty(nbytes: int, plan: Plan) -> Tensor:
    """Memory that has an address; nobody writes it, so that it takes no page."""
    return torch.empty(nbytes // plan.dtype.itemsize, dtype=plan.dtype)


@contextmanager
def _recording(job: Job, record: Record) -> Iterator[None]:
    """Replaces what moves and reduces bytes, and the shared segment."""

    def segment(comm: object, nbytes: int, maker: int) -> Segment:
        memory = mmap.mmap(-1, nbytes + WORD)
        words = memoryview(memory).cast("q")
        for line in range(2 * job.ranks_per_node):
            words[line * LINE // words.itemsize] = ALWAYS
        return Segment(memory, ordered=True)

    def of(kernel: Kernel, size: int) -> Stages:
        return real(kernel, size)._replace(partial=record.combine, op=SimpleNamespace(Reduce_local=record.reduce_local))

    def read(self: Window, turn: int, rank: int, count: int) -> tuple[int, ...]:
        return own_numbers(self, turn, self.rank, count)

    def noting(kind: str, method: Callable[..., None]) -> Callable[..., None]:
        def call(self: Window, *arguments: int) -> None:
            record.note(kind, (method.__name__, arguments[-1]))
            method(self, *arguments)

        return call

    real, own_numbers = stages.of, Window.read
    with ExitStack() as stack:
        for kind, methods in WORDS.items():
            for method in methods:
                stack.enter_context(mock.patch.object(Window, method.__name__, noting(kind, method)))
        for module in (collectives, direct, rail, window, windows):
            stack.enter_context(mock.patch.object(module, "memmove", record.copy))
        stack.enter_context(mock.patch.object(windows, "copy", record.copy))
        stack.enter_context(mock.patch.object(shared_segment, "create", segment))
        stack.enter_context(mock.patch.object(Window, "read", read))  # of all_to_all: all ranks write equal numbers
        stack.enter_context(mock.patch.object(stages, "of", of))
        yield

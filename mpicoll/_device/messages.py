"""Messages between two ranks where either end may be a GPU's memory: posted at once, in MPI's order, and carried on by `test`.

Neither side knows where the other one's memory is, nor when a GPU will have written it. So what is posted at once is

    below 4096 bytes    the message itself, if it is there
    of 4096 bytes       an announcement: how long the message is, its number, and by which way its body comes, in pieces:

    direct    MPI takes the memory of both ends as it is         any end in the CPU's memory; GPUs, where MPI takes theirs
    staged    by way of pinned memory, some pieces at a time     GPUs
    ipc       from slots in the sender's GPU, opened by the receiver: a token tells which, an answer that it is free again

The first two are one protocol, of which each end chooses its side. By the third, nothing moves before the receiver has answered,
so that no slot is held by what nobody receives yet; if it cannot open the slots it says so, and the body comes by the first two.
A message longer than the tensor that should receive it is taken all the same, so that its sender ends.
"""

from __future__ import annotations

import struct
from collections import Counter, defaultdict, deque
from collections.abc import Generator, Iterable
from contextlib import nullcontext
from itertools import count
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from mpicoll._algorithms.blocks import pieces
from mpicoll._cuda import ipc, streams
from mpicoll._device.send_slots import Outbox
from mpicoll._mpi.channel import Channel, Status
from mpicoll._mpi.datatypes import BYTE, spec
from mpicoll._mpi.errors import MPIException
from mpicoll._progress.progress import poller
from mpicoll._progress.requests import Posted, left_with_mpi, too_long
from mpicoll._tensors import buffers
from mpicoll._tensors.buffers import Message
from mpicoll.errors import TruncationError

if TYPE_CHECKING:
    from mpicoll._engine.group import Group

Steps: TypeAlias = Generator[None, None, None]  # goes on where it stopped: something has not ended yet

ANNOUNCEMENT = 4096  # bytes
HEAD = struct.Struct("qqq")  # bytes of the message, its number, bytes of the record behind this (0: direct or staged)
PIECE = 4 << 20  # bytes; as a GPU's bus moves in 0.1 ms, and MPI in 0.5
AHEAD = 3  # pieces on their way: one on the GPU's bus, one with MPI, one on the receiver's bus
SHARED_FROM = 64 << 10  # bytes; below, tokens take longer than two copies over the bus
TOKEN = struct.Struct("qqq")  # slot, where the piece begins and ends
ANSWER = struct.Struct("q")  # the first one: whether the slots are open; then the slot that is free again


class Parcels:
    """One per group.

    Args:   direct: MPI takes GPU memory. near: for each rank, whether its GPU's memory and this rank's can be shared.
    """

    def __init__(self, channel: Channel, direct: bool, near: list[bool]) -> None:
        self.channel = channel
        self.direct = direct
        self.near = near
        with channel.lock:
            self.bodies = channel.comm.Dup()
        self._numbers = defaultdict[int, "count[int]"](lambda: count(1))  # of messages announced, by receiver
        self.taken = Counter[str]()  # how many were sent from a GPU by which way; for tests, and for who wonders
        self._outboxes: dict[torch.device, Outbox | None] = {}
        self._opened: dict[tuple[int, bytes], Tensor | None] = {}  # senders' slots, of each of their devices that sends

    def number(self, dst: int) -> int:
        return next(self._numbers[dst])

    def tags(self, number: int) -> tuple[int, int]:
        """Of what goes to the receiver, and of what comes back."""
        half = self.channel.runtime.tag_ub // 2
        return 2 * (number % half), 2 * (number % half) + 1

    def outbox(self, device: torch.device) -> Outbox | None:
        """Made on first use; None, for ever: this memory cannot be shared."""
        if device not in self._outboxes:
            self._outboxes[device] = Outbox.make(device, PIECE)
        return self._outboxes[device]

    def opened(self, src: int, record: bytes, device: torch.device) -> Tensor | None:
        """A sender's slots, opened once: torch counts. ``device`` is the first message's; torch copies to others from there."""
        if (src, record) not in self._opened:
            self._opened[src, record] = ipc.opened(record, device)
        return self._opened[src, record]

    def post(self, values: Tensor, peer: int, tag: int, bodies: bool = True) -> Any:
        comm = self.bodies if bodies else self.channel.peer
        with self.channel.lock:
            return comm.Isend(spec(values.data_ptr(), values.nbytes), peer, tag)

    def expect(self, values: Tensor, peer: int, tag: int, bodies: bool = True) -> Any:
        comm = self.bodies if bodies else self.channel.peer
        with self.channel.lock:
            return comm.Irecv(spec(values.data_ptr(), values.nbytes), peer, tag)

    def ended(self, *requests: Any) -> Steps:
        for request in requests:
            while not self.channel.test(request):
                yield
            poller.moved = True

    def close(self) -> None:
        with self.channel.lock:
            self.bodies.Free()
        self._outboxes.clear()
        self._opened.clear()


class Parcel(Posted):
    """One end of a message. ``_steps`` is what is left to do."""

    def __init__(self, parcels: Parcels, group: Group, operation: str, message_: Message, peer: int, receiving: bool) -> None:
        super().__init__(group, operation, message_, None, receiving)
        self._parcels = parcels
        self._peer = peer
        self._memory = buffers.raw(message_.memory)
        self._on_gpu = not self._memory.is_cpu
        self._marks = streams.marks([self._memory.device]) if self._on_gpu else []
        self._steps: Steps

    def _test(self) -> bool:
        # What one thread has made another one may go on with, in inference mode or not.
        device = streams.on(self._memory.device) if self._on_gpu and self._parcels.direct else nullcontext()
        try:
            with torch.inference_mode(False), device:
                return over(self._steps)
        except (MPIException, TruncationError):
            raise
        except Exception as error:  # a GPU's; the other side waits for what does not come, and MPI may write yet
            left_with_mpi.append(self)
            self.group.fail(error)
            raise

    def _host_memory(self, nbytes: int) -> Tensor:
        """Not written yet; pinned, where a GPU will copy from it."""
        if self._on_gpu:
            return streams.pinned((nbytes,), torch.uint8)
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def _ready(self) -> Steps:
        """Ends when a GPU has done what the caller had launched before."""
        while not streams.passed(self._marks):
            yield


class Sending(Parcel):
    """The sender's end.

    Args:   now: wait for the GPU, so that a short message need not be announced.
    """

    def __init__(self, parcels: Parcels, group: Group, operation: str, message_: Message, dst: int, tag: int, now: bool) -> None:
        super().__init__(parcels, group, operation, message_, dst, receiving=False)
        memory = self._memory
        for _, event in self._marks if now else ():
            streams.arrived(event)
        if memory.nbytes < ANNOUNCEMENT and streams.passed(self._marks):
            if self._on_gpu:
                memory, event = streams.fetch(memory, streams.MESSAGES_OUT)
                streams.arrived(event)
            self._held = memory
            self._steps = parcels.ended(parcels.post(memory, dst, tag, bodies=False))
            return
        number = parcels.number(dst)
        outbox = self._outbox()
        record = b"" if outbox is None else outbox.record(dst)
        outbox = outbox if 0 < len(record) <= ANNOUNCEMENT - HEAD.size else None
        record = b"" if outbox is None else record
        told = HEAD.pack(memory.nbytes, number, len(record)) + record
        self._held = torch.frombuffer(bytearray(told.ljust(ANNOUNCEMENT, b"\0")), dtype=torch.uint8)
        announced = parcels.post(self._held, dst, tag, bodies=False)
        self._steps = self._send(announced, number, outbox)

    def _outbox(self) -> Outbox | None:
        parcels, memory = self._parcels, self._memory
        near = self._on_gpu and not parcels.direct and parcels.near[self._peer] and memory.nbytes >= SHARED_FROM
        return parcels.outbox(memory.device) if near else None

    def _send(self, announced: Any, number: int, outbox: Outbox | None) -> Steps:
        parcels, (there, back) = self._parcels, self._parcels.tags(number)
        yield from self._ready()
        extents = pieces(self._memory.nbytes, PIECE)
        opened = outbox is not None and (yield from self._answer(back))
        if self._on_gpu:
            parcels.taken["ipc" if opened else "direct" if parcels.direct else "staged"] += 1
        if outbox is not None and opened:
            yield from pipelined((self._share(outbox, *extent, there, back) for extent in extents), AHEAD)
        elif self._on_gpu and not parcels.direct:
            self._posted = 0
            yield from pipelined((self._stage(turn, *extent, there) for turn, extent in enumerate(extents)), AHEAD)
        else:
            yield from parcels.ended(*[parcels.post(self._memory[a:b], self._peer, there) for a, b in extents])
        yield from parcels.ended(announced)

    def _answer(self, back: int) -> Generator[None, None, int]:
        answer = torch.empty(ANSWER.size, dtype=torch.uint8, device="cpu")
        yield from self._parcels.ended(self._parcels.expect(answer, self._peer, back))
        return unpacked(ANSWER, answer)[0]

    def _stage(self, turn: int, begin: int, end: int, tag: int) -> Steps:
        values, event = streams.fetch(self._memory[begin:end], streams.MESSAGES_OUT)
        while self._posted < turn or not streams.arrived(event, wait=False):  # pieces must be posted in their order
            yield
        request = self._parcels.post(values, self._peer, tag)
        self._posted += 1
        yield from self._parcels.ended(request)

    def _share(self, outbox: Outbox, begin: int, end: int, there: int, back: int) -> Steps:
        while (slot := outbox.take()) is None:
            yield
        event = streams.push(outbox.slot(slot)[: end - begin], self._memory[begin:end], streams.MESSAGES_OUT)
        while not streams.arrived(event, wait=False):
            yield
        token = packed(TOKEN, slot, begin, end)
        yield from self._parcels.ended(self._parcels.post(token, self._peer, there))
        outbox.give_back((yield from self._answer(back)))  # of a piece of this message, maybe another one


class Receiving(Parcel):
    """The receiver's end.

    Args:   src: a rank, or ANY_SOURCE. come: what came, the message or its announcement, where it was waited for already.
    """

    def __init__(
        self,
        parcels: Parcels,
        group: Group,
        operation: str,
        message_: Message,
        src: int,
        tag: int,
        come: tuple[Tensor, Status] | None = None,
    ) -> None:
        super().__init__(parcels, group, operation, message_, src, receiving=True)
        if come is None:
            self._told = self._host_memory(ANNOUNCEMENT)
            self._request = parcels.expect(self._told, src, tag, bodies=False)
        else:
            self._told, self._status = come
        self._matched = come is not None
        self._steps = self._receive()

    def cancel(self) -> None:
        if self._matched:  # nothing to take back any more
            left_with_mpi.append(self)
        else:
            super().cancel()

    def _receive(self) -> Steps:
        channel, status = self._parcels.channel, self._status
        assert status is not None
        while not self._matched and not channel.test(self._request, status):
            yield
        self._matched = True
        self._peer = self.source = status.Get_source()
        nbytes = status.Get_count(BYTE)
        if nbytes < ANNOUNCEMENT:
            fits = nbytes <= self._memory.nbytes
            if fits:
                yield from self._place(self._told[:nbytes], 0)
        else:
            nbytes, number, length = unpacked(HEAD, self._told)
            fits = nbytes <= self._memory.nbytes
            record = self._told[HEAD.size : HEAD.size + length].numpy().tobytes()
            yield from self._body(nbytes, number, record, fits)
        if not fits:
            raise too_long(self.group, self.operation, self._message)
        if not self._on_gpu:
            self._message.deliver()
        elif self._message.memory is not self._message.tensor:
            event = streams.launch(self._memory.device, self._message.deliver, streams.MESSAGES)
            while not streams.arrived(event, wait=False):
                yield

    def _place(self, values: Tensor, begin: int) -> Steps:
        """Values of the CPU's, or of a slot's, to where they belong."""
        memory = self._memory[begin : begin + values.nbytes]
        if not self._on_gpu:
            memory.copy_(values)
            return
        yield from self._ready()
        event = streams.push(memory, values, streams.MESSAGES)
        while not streams.arrived(event, wait=False):
            yield

    def _body(self, nbytes: int, number: int, record: bytes, fits: bool) -> Steps:
        parcels, (there, back), extents = self._parcels, self._parcels.tags(number), pieces(nbytes, PIECE)
        if record:
            slots = parcels.opened(self._peer, record, self._memory.device) if self._on_gpu and fits else None
            yield from self._say(int(slots is not None), back)
            if slots is not None:
                yield from pipelined((self._from_slot(slots, there, back) for _ in extents), AHEAD)
                return
        if fits and (parcels.direct or not self._on_gpu):
            yield from self._ready()
            yield from parcels.ended(*[parcels.expect(self._memory[a:b], self._peer, there) for a, b in extents])
        else:
            yield from pipelined((self._unstage(a, b, there, fits) for a, b in extents), AHEAD)

    def _from_slot(self, slots: Tensor, there: int, back: int) -> Steps:
        token = torch.empty(TOKEN.size, dtype=torch.uint8, device="cpu")
        yield from self._parcels.ended(self._parcels.expect(token, self._peer, there))
        slot, begin, end = unpacked(TOKEN, token)
        yield from self._place(slots.view(-1, PIECE)[slot][: end - begin], begin)
        yield from self._say(slot, back)

    def _say(self, number: int, back: int) -> Steps:
        answer = packed(ANSWER, number)
        yield from self._parcels.ended(self._parcels.post(answer, self._peer, back))

    def _unstage(self, begin: int, end: int, tag: int, fits: bool) -> Steps:
        values = self._host_memory(end - begin)
        yield from self._parcels.ended(self._parcels.expect(values, self._peer, tag))
        if fits:
            yield from self._place(values, begin)


def packed(form: struct.Struct, *numbers: int) -> Tensor:
    """Numbers as a message."""
    return torch.frombuffer(bytearray(form.pack(*numbers)), dtype=torch.uint8)


def unpacked(form: struct.Struct, told: Tensor) -> tuple[int, ...]:
    return form.unpack(told[: form.size].numpy().tobytes())


def over(steps: Generator[None, None, object]) -> bool:
    """Goes on with them; True if they have come to their end."""
    try:
        next(steps)
    except StopIteration:
        return True
    return False


def pipelined(sequences: Iterable[Generator[None, None, object]], ahead: int) -> Steps:
    """Several sequences of steps at a time, begun one after the other."""
    waiting, running = iter(sequences), deque[Generator[None, None, object]]()
    while True:
        while len(running) < ahead and (following := next(waiting, None)) is not None:
            running.append(following)
        if not running:
            return
        for steps in list(running):
            if over(steps):
                running.remove(steps)
        if running:
            yield

"""Messages between two ranks with tensors on GPUs. They are posted at once, in MPI's order, and moved forward by `test`.

A sender does not know where the receiver's memory is. Its own GPU may not have written the message yet. So it first posts

    below 4096 bytes    eager: the message itself, if the GPU has written it
    of 4096 bytes       a header: the length of the message, its number, and the path by which its body comes, in pieces:

    direct    MPI takes the memory of both ends as it is
    staged    through pinned memory, some pieces at a time
    ipc       from send slots in the sender's GPU, which the receiver opens: a notice says which slot is ready, an answer says
              which slot is free again

direct and staged are one protocol: each end chooses one of them for its own side. With ipc the sender waits for the receiver's
reply before it takes a slot, so an unmatched message holds none. If the receiver cannot open the slots it says so, and the body
comes by direct or staged. A message that is longer than the tensor of its receive is still received, so that its sender ends.
"""

from __future__ import annotations

import struct
from collections import Counter, defaultdict, deque
from collections.abc import Generator, Iterable
from contextlib import nullcontext
from itertools import count
from typing import Any, TypeAlias

import torch
from torch import Tensor

from mpicoll._algorithms.blocks import pieces
from mpicoll._device import ipc, streams
from mpicoll._device.send_slots import SendSlots
from mpicoll._mpi.channel import ANY_SOURCE, FAULTY_ANY_SOURCE, Channel, Status
from mpicoll._mpi.datatypes import BYTE, spec
from mpicoll._mpi.errors import truncated
from mpicoll._mpi.runtime import OWN_TAGS
from mpicoll._tensors import buffers, signatures
from mpicoll._tensors.calls import Transfer

Steps: TypeAlias = Generator[None, None, None]  # yields while a step has not ended; next() tries again

HEADER_BYTES = 4096
HEADER = struct.Struct("qqq")  # bytes of the message, its number, bytes of the record at RECORD (0: direct or staged)
RECORD = HEADER.size + signatures.HEADER.size  # between them: what signatures.py says about the tensor
PIECE = 4 << 20  # bytes; the bus of a GPU moves a piece in 0.1 ms, MPI in 0.5 ms
AHEAD = 3  # pieces under way: one on the sender's bus, one in MPI, one on the receiver's bus
SHARED_FROM = 64 << 10  # bytes; for smaller messages, notices take longer than two copies over the bus
SLOT_READY = struct.Struct("qqq")  # slot, begin and end of the piece
SLOT_FREE = struct.Struct("q")  # first answer: 1 if the receiver opened the slots; later answers: the slot that is free again


class DeviceMessages:
    """The messages of one group. Its methods are those of `HostMessages`."""

    def __init__(self, channel: Channel, direct: bool, near: list[bool], checked: bool) -> None:
        self.channel = channel
        self.direct = direct  # MPI takes GPU memory
        self.checked = checked  # every message has a header, which is compared
        self.near = near  # for each rank, whether it and this rank can share GPU memory
        with channel.lock:
            self.data_comm = channel.comm.Dup()
        self.numbers = defaultdict[int, "count[int]"](lambda: count(1))  # next number of a message with a header, by receiver
        self.taken = Counter[str]()  # number of messages sent per path; read by tests
        self._send_slots: dict[torch.device, SendSlots | None] = {}
        self._opened: dict[tuple[int, bytes], Tensor | None] = {}  # slots of senders, by rank and device

    def send(self, memory: Tensor, dst: int, tag: int) -> Transfer:
        """Starts a send for which the caller waits at once. It waits for the GPU, so that a short message needs no header."""
        return _Sending(self, memory, dst, tag, now=True)

    def isend(self, memory: Tensor, dst: int, tag: int) -> Transfer:
        return _Sending(self, memory, dst, tag, now=False)

    def irecv(self, tensor: Tensor, memory: Tensor, src: int | None, tag: int) -> Transfer:
        return _Receiving(self, tensor, memory, ANY_SOURCE if src is None else src, tag)

    def tags(self, number: int) -> tuple[int, int]:
        """Returns the tag of messages to the receiver, and the tag of its answers."""
        half = self.channel.runtime.tag_ub // 2
        return 2 * (number % half), 2 * (number % half) + 1

    def send_slots(self, device: torch.device) -> SendSlots | None:
        """Returns the send slots of a device, made on first use; None, for ever, if its memory cannot be shared."""
        if device not in self._send_slots:
            self._send_slots[device] = SendSlots.make(device, PIECE)
        return self._send_slots[device]

    def opened(self, src: int, record: bytes, device: torch.device) -> Tensor | None:
        """Returns the slots of a sender, opened once because torch counts openings.

        They are open on the device of the first message. torch copies from there to other devices.
        """
        if (src, record) not in self._opened:
            self._opened[src, record] = ipc.opened(record, device)
        return self._opened[src, record]

    def post(self, values: Tensor, peer: int, tag: int, data: bool = True) -> Any:
        comm, tag = (self.data_comm, tag) if data else (self.channel.comm, OWN_TAGS + tag)
        with self.channel.lock:
            return comm.Isend(spec(values.data_ptr(), values.nbytes), peer, tag)

    def expect(self, values: Tensor, peer: int, tag: int, data: bool = True) -> Any:
        comm, tag = (self.data_comm, tag) if data else (self.channel.comm, OWN_TAGS + tag)
        with self.channel.posting, self.channel.lock:
            return comm.Irecv(spec(values.data_ptr(), values.nbytes), peer, tag)

    def close(self) -> None:
        with self.channel.lock:
            self.data_comm.Free()
        self._send_slots.clear()
        self._opened.clear()


class _Message:
    """One end of a message. ``_steps`` does the remaining work."""

    def __init__(self, messages: DeviceMessages, memory: Tensor, peer: int) -> None:
        self.source, self.nbytes = -1, 0
        self.moved, self.wrong = False, ""
        self._messages = messages
        self._peer = peer
        self._memory = buffers.raw(memory)
        self._marks = streams.marks([self._memory.device])
        self._steps: Steps

    def test(self) -> bool:
        # Another thread, in inference mode or not, may continue with tensors that this one has made.
        device = streams.on(self._memory.device) if self._messages.direct else nullcontext()
        with torch.inference_mode(False), device:
            return over(self._steps)

    def cancel(self) -> bool:
        return False

    def _ended(self, *requests: Any) -> Steps:
        for request in requests:
            while not self._messages.channel.test(request):
                yield
            self.moved = True

    def _ready(self) -> Steps:
        """Ends when the GPU has done the work that the caller launched before the message."""
        while not streams.passed(self._marks):
            yield


class _Sending(_Message):
    """The sender's end. ``now``: waits here for the GPU, so that a short message needs no header."""

    def __init__(self, messages: DeviceMessages, memory: Tensor, dst: int, tag: int, now: bool) -> None:
        super().__init__(messages, memory, dst)
        flat = self._memory
        for _, event in self._marks if now else ():
            streams.arrived(event)
        if flat.nbytes < HEADER_BYTES and not messages.checked and streams.passed(self._marks):
            self._held, event = streams.fetch(flat, streams.MESSAGES_OUT)
            streams.arrived(event)
            self._steps = self._ended(messages.post(self._held, dst, tag, data=False))
            return
        number = next(messages.numbers[dst])
        slots = self._slots()
        record = b"" if slots is None else slots.record(dst)
        slots = slots if 0 < len(record) <= HEADER_BYTES - RECORD else None
        record = b"" if slots is None else record
        header = HEADER.pack(flat.nbytes, number, len(record)) + signatures.header(memory) + record
        self._held = torch.frombuffer(bytearray(header.ljust(HEADER_BYTES, b"\0")), dtype=torch.uint8)
        announced = messages.post(self._held, dst, tag, data=False)
        self._steps = self._send(announced, number, slots)

    def _slots(self) -> SendSlots | None:
        messages, memory = self._messages, self._memory
        near = not messages.direct and messages.near[self._peer] and memory.nbytes >= SHARED_FROM
        return messages.send_slots(memory.device) if near else None

    def _send(self, announced: Any, number: int, slots: SendSlots | None) -> Steps:
        messages, (body_tag, answer_tag) = self._messages, self._messages.tags(number)
        yield from self._ready()
        extents = pieces(self._memory.nbytes, PIECE)
        opened = slots is not None and (yield from self._answer(answer_tag))
        messages.taken["ipc" if opened else "direct" if messages.direct else "staged"] += 1
        if slots is not None and opened:
            yield from pipelined((self._share(slots, *extent, body_tag, answer_tag) for extent in extents), AHEAD)
        elif not messages.direct:
            self._posted = 0
            yield from pipelined((self._stage(turn, *extent, body_tag) for turn, extent in enumerate(extents)), AHEAD)
        else:
            yield from self._ended(*[messages.post(self._memory[a:b], self._peer, body_tag) for a, b in extents])
        yield from self._ended(announced)

    def _answer(self, answer_tag: int) -> Generator[None, None, int]:
        answer = torch.empty(SLOT_FREE.size, dtype=torch.uint8, device="cpu")
        yield from self._ended(self._messages.expect(answer, self._peer, answer_tag))
        return unpacked(SLOT_FREE, answer)[0]

    def _stage(self, turn: int, begin: int, end: int, tag: int) -> Steps:
        values, event = streams.fetch(self._memory[begin:end], streams.MESSAGES_OUT)
        while self._posted < turn or not streams.arrived(event, wait=False):  # pieces must be posted in their order
            yield
        request = self._messages.post(values, self._peer, tag)
        self._posted += 1
        yield from self._ended(request)

    def _share(self, slots: SendSlots, begin: int, end: int, body_tag: int, answer_tag: int) -> Steps:
        while (slot := slots.acquire()) is None:
            yield
        event = streams.push(slots.slots[slot][: end - begin], self._memory[begin:end], streams.MESSAGES_OUT)
        while not streams.arrived(event, wait=False):
            yield
        notice = packed(SLOT_READY, slot, begin, end)
        yield from self._ended(self._messages.post(notice, self._peer, body_tag))
        slots.release((yield from self._answer(answer_tag)))  # it may be the slot of another piece of this message


class _Receiving(_Message):
    """The receiver's end. ``src`` is a rank, or ANY_SOURCE."""

    def __init__(self, messages: DeviceMessages, tensor: Tensor, memory: Tensor, src: int, tag: int) -> None:
        super().__init__(messages, memory, src)
        self._tensor, self._plain = tensor, memory
        self._expected = signatures.header(memory) if messages.checked else b""
        self._status = Status()
        self._header = streams.pinned((HEADER_BYTES,), torch.uint8)
        now = src != ANY_SOURCE or not FAULTY_ANY_SOURCE
        self._request = messages.expect(self._header, src, tag, data=False) if now else None
        self._tag, self._matched = tag, False
        self._steps = self._receive()

    def cancel(self) -> bool:
        return not self._matched and (self._request is None or self._messages.channel.cancel(self._request))

    def _receive(self) -> Steps:
        while self._request is None:  # Note [Receives from any rank] in _mpi/channel.py
            yield
            with self._messages.channel.posting:
                if (arrived := self._messages.channel.arrived(ANY_SOURCE, OWN_TAGS + self._tag)) is not None:
                    self._request = self._messages.expect(self._header, arrived.source, self._tag, data=False)
        while not self._messages.channel.test(self._request, self._status):
            yield
        self._matched = True
        self._peer = self.source = self._status.Get_source()
        nbytes = self._status.Get_count(BYTE)
        if nbytes < HEADER_BYTES:
            fits = nbytes <= self._memory.nbytes
            if fits:
                yield from self._place(self._header[:nbytes], 0)
        else:
            nbytes, number, length = unpacked(HEADER, self._header)
            fits = nbytes <= self._memory.nbytes
            record = self._header[RECORD : RECORD + length].numpy().tobytes()
            yield from self._body(nbytes, number, record, fits)
        self.nbytes = nbytes
        if not fits:
            raise truncated()
        if self._messages.checked:
            self.wrong = signatures.difference(self._header[HEADER.size : RECORD].numpy().tobytes(), self._expected)
        if self._plain is not self._tensor:
            copy_back = lambda: buffers.copy_back([self._tensor], [self._plain])  # noqa: E731
            event = streams.launch(self._memory.device, copy_back, streams.MESSAGES)
            while not streams.arrived(event, wait=False):
                yield

    def _place(self, values: Tensor, begin: int) -> Steps:
        """Copies values from host memory, or from a slot, into the receive's memory."""
        memory = self._memory[begin : begin + values.nbytes]
        yield from self._ready()
        event = streams.push(memory, values, streams.MESSAGES)
        while not streams.arrived(event, wait=False):
            yield

    def _body(self, nbytes: int, number: int, record: bytes, fits: bool) -> Steps:
        messages, (body_tag, answer_tag), extents = self._messages, self._messages.tags(number), pieces(nbytes, PIECE)
        if record:
            slots = messages.opened(self._peer, record, self._memory.device) if fits else None
            yield from self._say(int(slots is not None), answer_tag)
            if slots is not None:
                yield from pipelined((self._from_slot(slots, body_tag, answer_tag) for _ in extents), AHEAD)
                return
        if fits and messages.direct:
            yield from self._ready()
            yield from self._ended(*[messages.expect(self._memory[a:b], self._peer, body_tag) for a, b in extents])
        else:
            yield from pipelined((self._unstage(a, b, body_tag, fits) for a, b in extents), AHEAD)

    def _from_slot(self, slots: Tensor, body_tag: int, answer_tag: int) -> Steps:
        notice = torch.empty(SLOT_READY.size, dtype=torch.uint8, device="cpu")
        yield from self._ended(self._messages.expect(notice, self._peer, body_tag))
        slot, begin, end = unpacked(SLOT_READY, notice)
        yield from self._place(slots.view(-1, PIECE)[slot][: end - begin], begin)
        yield from self._say(slot, answer_tag)

    def _say(self, number: int, answer_tag: int) -> Steps:
        answer = packed(SLOT_FREE, number)
        yield from self._ended(self._messages.post(answer, self._peer, answer_tag))

    def _unstage(self, begin: int, end: int, tag: int, fits: bool) -> Steps:
        values = streams.pinned((end - begin,), torch.uint8)
        yield from self._ended(self._messages.expect(values, self._peer, tag))
        if fits:
            yield from self._place(values, begin)


def packed(form: struct.Struct, *numbers: int) -> Tensor:
    """Returns numbers as the bytes of a message."""
    return torch.frombuffer(bytearray(form.pack(*numbers)), dtype=torch.uint8)


def unpacked(form: struct.Struct, message: Tensor) -> tuple[int, ...]:
    """Returns the numbers at the front of a message."""
    return form.unpack(message[: form.size].numpy().tobytes())


def over(steps: Generator[None, None, object]) -> bool:
    """Runs the next step. Returns True if there is none left."""
    try:
        next(steps)
    except StopIteration:
        return True
    return False


def pipelined(sequences: Iterable[Generator[None, None, object]], ahead: int) -> Steps:
    """Runs up to ``ahead`` sequences of steps at a time. They begin in their order."""
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

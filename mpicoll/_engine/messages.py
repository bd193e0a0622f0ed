"""Messages between two ranks: send, recv, isend, irecv."""

from __future__ import annotations

from time import monotonic

from torch import Tensor
from torch.autograd import profiler

from mpicoll._base.errors import MpicollError
from mpicoll._base.group_errors import TruncationError
from mpicoll._engine import spans
from mpicoll._engine.collectives import Collectives
from mpicoll._engine.poller import pending
from mpicoll._engine.requests import MessageWork, too_long
from mpicoll._engine.work import Work
from mpicoll._faults.late_ranks import Looks
from mpicoll._mpi import bell
from mpicoll._mpi.backoff import Backoff
from mpicoll._mpi.runtime import OWN_TAGS
from mpicoll._tensors import buffers, checks

# From EAGER bytes on, MPI's own send keeps a core busy while it waits for the receiver. So such a send is tested until it has
# ended. The tests make a ping-pong of 64 KiB 20 % slower, of 1 MiB 6 %: a quick succession is tested from TESTED_FROM bytes on.
EAGER, TESTED_FROM = 2 << 10, 1 << 20


class Messages(Collectives):
    """send, recv, isend, irecv. ``src`` and ``dst`` are group ranks; tags are 0 to this MPI's TAG_UB - 1040."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.raises:
            self.send, self.recv = self._send_as_work, self._recv_as_work  # type: ignore[method-assign]

    def _send_as_work(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        self.isend(tensor, dst, tag).wait()

    def _recv_as_work(self, tensor: Tensor, src: int | None, tag: int = 0) -> int:
        work = self.irecv(tensor, src, tag)
        work.wait()
        return work.source_rank()

    def _check(self, operation: str, what: str, rank: int, tag: int) -> None:
        if self.broken is not None:
            self.check_usable(operation)
        checks.group_rank(operation, what, rank, self.size)
        checks.tag(operation, tag, self.channel.runtime.tag_ub)

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        """Sends, and returns when the tensor may be changed again. The receiver may not have it yet."""
        messages = self.host.messages
        buffer = messages.buffer(tensor, dst, tag)
        if buffer is None or self.line.broken is not None or profiler._is_profiler_enabled:
            self._send(tensor, dst, tag)
        elif buffer[1] < EAGER:
            self.guarded("send", self.channel.comm.Send, (buffer, dst, OWN_TAGS + tag), dst)
            messages.wake(dst)
        elif buffer[1] < TESTED_FROM and monotonic() <= self.sends.due:
            messages.wake(dst)
            self.guarded("send", self.channel.comm.Send, (buffer, dst, OWN_TAGS + tag), dst)
        else:
            self._send(tensor, dst, tag)

    @spans.spanned("send")
    def _send(self, tensor: Tensor, dst: int, tag: int) -> None:
        self._check("send", "dst", dst, tag)
        memory = buffers.readable("send", tensor)
        if self.backend("send", memory) is not self.host:
            assert self.devices is not None
            pending(self, "send", self.devices.messages.send(memory, dst, tag), tensor, dst).wait()
        else:
            self.sends.looked()
            transfer = self.host.messages.isend(memory, dst, tag)
            self.guarded("send", self._carry_out, (MessageWork(self, "send", transfer, tensor, dst),), dst)

    def recv(self, tensor: Tensor, src: int | None, tag: int = 0) -> int:
        """Receives a message from ``src`` (None: any rank) into the front of the tensor. Returns the sender's group rank."""
        messages = self.host.messages
        buffer = messages.buffer(tensor, src, tag)
        if buffer is None or messages.unmatched is not None or self.line.broken is not None or profiler._is_profiler_enabled:
            return self._recv(tensor, src, tag)
        assert src is not None
        messages.wake(src)
        try:
            if monotonic() > self.receives.due:
                self.guarded("recv", self._recv_when_come, (tensor, src, tag), src)
            else:
                self.guarded("recv", self.channel.comm.Recv, (buffer, src, OWN_TAGS + tag), src)
        except TruncationError:
            raise too_long(self, "recv", tensor) from None
        return src

    @spans.spanned("recv")
    def _recv(self, tensor: Tensor, src: int | None, tag: int) -> int:
        self._check("recv", "src", 0 if src is None else src, tag)
        memory = buffers.writable("recv", tensor)
        backend = self.backend("recv", memory)
        if backend is self.host and self.checked:
            message = MessageWork(self, "recv", backend.messages.irecv(tensor, memory, src, tag), tensor, src)
            self.guarded("recv", self._carry_out, (message,), src)
            return message.transfer.source
        if backend is not self.host or self.host.messages.unmatched is not None:
            work = pending(self, "recv", backend.messages.irecv(tensor, memory, src, tag), tensor, src)
            work.wait()
            return work.source_rank()
        try:
            source = self.guarded("recv", self._recv_when_come, (memory, src, tag), src)
        except TruncationError:
            raise too_long(self, "recv", tensor) from None
        buffers.copy_back([tensor], [memory])
        return source

    def _recv_when_come(self, memory: Tensor, src: int | None, tag: int) -> int:
        """Calls MPI's receive when the message has come; see late_ranks.py. Returns the sender's rank."""
        pause = Backoff(None if src is None else self.channel.ranks[src]).pause
        if src is None:  # From now on a look is always due: MPI's receive, in another thread, could take the message of a look.
            self.receives = Looks(0)
        while (source := self.host.messages.receive_arrived(memory, src, tag)) is None:
            self.check_usable("recv")
            pause()
        self.receives.looked()
        return source

    def _carry_out(self, message: MessageWork) -> None:
        pause = Backoff(message.other_side(), moves=message.moves).pause
        try:
            with bell.Meeting(bell.bell, message.other_side()):
                while not message.test():
                    if self.broken is not None:
                        message.cancel()
                        self.check_usable(message.operation)
                    pause()
        except BaseException as error:
            message.failed(error)
            if not isinstance(error, MpicollError):  # of a signal's handler; MPI still uses the memory
                message.cancel()
            raise

    @spans.spanned("isend")
    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Work:
        """Starts a send. The tensor must not change until the Work has completed. The program may drop the Work."""
        messages = self.host.messages
        buffer = messages.buffer(tensor, dst, tag)
        if buffer is not None and self.line.broken is None:
            return pending(self, "isend", messages.isend(tensor, dst, tag, buffer), tensor, dst)
        self._check("isend", "dst", dst, tag)
        memory = buffers.readable("isend", tensor)
        return pending(self, "isend", self.backend("isend", memory).messages.isend(memory, dst, tag), tensor, dst)

    @spans.spanned("irecv")
    def irecv(self, tensor: Tensor, src: int | None, tag: int = 0) -> MessageWork:
        """Starts a receive from ``src`` (None: any rank) into the front of the tensor."""
        messages = self.host.messages
        buffer = messages.buffer(tensor, src, tag)
        if buffer is not None and self.line.broken is None:
            return pending(self, "irecv", messages.irecv(tensor, tensor, src, tag, buffer), tensor, src)
        self._check("irecv", "src", 0 if src is None else src, tag)
        memory = buffers.writable("irecv", tensor)
        backend = self.backend("irecv", memory)
        return pending(self, "irecv", backend.messages.irecv(tensor, memory, src, tag), tensor, src)

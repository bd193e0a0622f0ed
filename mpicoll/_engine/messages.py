"""Messages between two ranks: send, recv, isend, irecv."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING

from torch import Tensor
from torch.autograd import profiler

from mpicoll._base.errors import MpicollError
from mpicoll._base.torch_errors import TruncationError
from mpicoll._engine import spans
from mpicoll._engine.collectives import Collectives
from mpicoll._engine.poller import pending
from mpicoll._engine.requests import MessageWork, too_long
from mpicoll._engine.work import Work
from mpicoll._faults.attendance import Looks
from mpicoll._mpi import bell
from mpicoll._mpi.backoff import Backoff
from mpicoll._tensors import buffers, checks

if TYPE_CHECKING:
    from mpicoll._engine.collectives import Backend

# From EAGER bytes on, MPI's own send keeps a core busy while it waits for the receiver. So such a send is tested until it has
# ended. The tests make a ping-pong of 64 KiB 20 % slower, of 1 MiB 6 %: a quick succession is tested from TESTED_FROM bytes on.
EAGER, TESTED_FROM = 2 << 10, 1 << 20


class Messages(Collectives):
    """send, recv, isend, irecv. ``src`` and ``dst`` are group ranks; tags are 0 to this MPI's TAG_UB - 1040."""

    def _check(self, operation: str, what: str, rank: int, tag: int) -> None:
        if self.broken is not None:
            self.check_usable(operation)
        checks.group_rank(operation, what, rank, self.size)
        checks.tag(operation, tag, self.channel.runtime.tag_ub)

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        """Sends, and returns when the tensor may be changed again. The receiver may not have it yet."""
        messages = self.host.messages
        usual = messages.is_usual(tensor, dst, tag)
        if usual and tensor.nbytes >= EAGER:
            usual = tensor.nbytes < TESTED_FROM and monotonic() <= self.sends.due
        if usual and self.broken is None and not profiler._is_profiler_enabled:
            function, arguments = messages.send_call(tensor, dst, tag)
            self.guarded("send", function, arguments, dst)
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
            transfer = self.host.messages.isend(tensor, memory, dst, tag)
            self.guarded("send", self._carry_out, (MessageWork(self, "send", transfer, tensor, dst),), dst)

    def recv(self, tensor: Tensor, src: int | None, tag: int = 0) -> int:
        """Receives a message from ``src`` (None: any rank) into the front of the tensor. Returns the sender's group rank."""
        messages = self.host.messages
        usual = messages.unmatched is None and messages.is_usual(tensor, src, tag)
        if not usual or self.broken is not None or profiler._is_profiler_enabled:
            return self._recv(tensor, src, tag)
        assert src is not None
        function, arguments = messages.recv_call(tensor, src, tag)
        if monotonic() > self.receives.due:
            function, arguments = self._recv_when_come, (tensor, src, tag)
        try:
            self.guarded("recv", function, arguments, src)
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
        """Calls MPI's receive when the message has come; see attendance.py. Returns the sender's rank."""
        pause = Backoff(None if src is None else self.global_ranks[src]).pause
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
            with bell.bell.meeting(message.other_side()):
                while not message.test():
                    pause()
        except MpicollError:
            raise
        except BaseException:  # of a signal's handler; MPI still uses the memory
            message.cancel()
            raise

    @spans.spanned("isend")
    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Work:
        """Starts a send. The tensor must not change until the Work has completed. The program may drop the Work."""
        memory = tensor
        backend: Backend = self.host
        if self.broken is not None or not self.host.messages.is_usual(tensor, dst, tag):
            self._check("isend", "dst", dst, tag)
            memory = buffers.readable("isend", tensor)
            backend = self.backend("isend", memory)
        return pending(self, "isend", backend.messages.isend(tensor, memory, dst, tag), tensor, dst)

    @spans.spanned("irecv")
    def irecv(self, tensor: Tensor, src: int | None, tag: int = 0) -> MessageWork:
        """Starts a receive from ``src`` (None: any rank) into the front of the tensor."""
        memory = tensor
        backend: Backend = self.host
        if self.broken is not None or not self.host.messages.is_usual(tensor, src, tag):
            self._check("irecv", "src", 0 if src is None else src, tag)
            memory = buffers.writable("irecv", tensor)
            backend = self.backend("irecv", memory)
        return pending(self, "irecv", backend.messages.irecv(tensor, memory, src, tag), tensor, src)

"""Messages between two ranks: posted to MPI at once by the caller, so that MPI's own order of messages holds."""

from __future__ import annotations

from ctypes import memmove

import torch
from torch import Tensor
from torch.autograd import profiler

from mpicoll._device.messages import ANNOUNCEMENT, Parcels, Receiving, Sending
from mpicoll._engine.group import Group
from mpicoll._mpi.channel import ANY_SOURCE, Channel, Status
from mpicoll._mpi.datatypes import BYTE, fromaddress, spec
from mpicoll._progress import spans
from mpicoll._progress.matching import MatchedReceive
from mpicoll._progress.progress import Request, poller
from mpicoll._progress.requests import Posted, too_long
from mpicoll._progress.work import Work
from mpicoll._tensors import buffers, checks
from mpicoll._tensors.buffers import Message
from mpicoll.errors import CommunicationError, GroupDestroyed, TruncationError


class PointToPoint(Group):
    """send, recv, isend, irecv; ``src`` and ``dst`` are group ranks, tags 0 to this MPI's TAG_UB."""

    def _peer(self, operation: str, what: str, rank: int, tag: int) -> None:
        if self.broken is not None:
            self.check_usable(operation)
        checks.group_rank(operation, what, rank, self.size)
        checks.tag(operation, tag, self.tag_ub)

    def _usual(self, tensor: Tensor, rank: int | None, tag: int) -> bool:
        """Whether a blocking message can go the bare way: one MPI call, nothing to check or to pack."""
        return (
            buffers.is_bare(tensor)
            and type(rank) is int
            and 0 <= rank < self.size
            and type(tag) is int
            and 0 <= tag <= self.tag_ub
            and self.broken is None
            and not self.serialized
            and not profiler._is_profiler_enabled
            and tensor.nbytes <= self.longest_plain
        )

    def send(self, tensor: Tensor, dst: int, tag: int = 0) -> None:
        """Returns when the tensor may be changed again; the receiver may not have it yet."""
        if self._usual(tensor, dst, tag):
            nbytes = tensor.nbytes
            buffer = [fromaddress(tensor.data_ptr(), nbytes), nbytes, BYTE]
            self.guarded("send", self.channel.peer.Send, dst, (buffer, dst, tag))
        else:
            self._send_any(tensor, dst, tag)

    @spans.spanned("send")
    def _send_any(self, tensor: Tensor, dst: int, tag: int) -> None:
        self._peer("send", "dst", dst, tag)
        outgoing = buffers.outgoing("send", tensor)
        if self.host.parcels is None:
            self.guarded("send", lambda: self._send(self.channel, outgoing, dst, tag), dst)
        else:
            self._pending(Sending(self.host.parcels, self, "send", outgoing, dst, tag, now=True), tensor).wait()

    def _send(self, channel: Channel, outgoing: Message, dst: int, tag: int) -> None:
        buffer = spec(outgoing.address, outgoing.nbytes)
        if not channel.runtime.serialized:
            channel.peer.Send(buffer, dst, tag)
            return
        with channel.lock:
            request = channel.peer.Isend(buffer, dst, tag)
        channel.wait_all([request])

    def recv(self, tensor: Tensor, src: int | None, tag: int = 0) -> int:
        """Fills the front of the tensor with a message from ``src`` (None: from anybody); returns the sender's group rank.

        Raises: TruncationError: the message is longer than the tensor.
        """
        if self.unmatched is not None or not self._usual(tensor, src, tag):
            return self._recv_any(tensor, src, tag)
        assert src is not None
        if self.host.parcels is not None:
            return self._recv_told(self.host.parcels, tensor, src, tag)
        nbytes = tensor.nbytes
        buffer = [fromaddress(tensor.data_ptr(), nbytes), nbytes, BYTE]
        try:
            self.guarded("recv", self.channel.peer.Recv, src, (buffer, src, tag))
        except TruncationError as error:
            raise too_long(self, "recv", Message(tensor, tensor)) from error
        return src

    def _recv_told(self, parcels: Parcels, tensor: Tensor, src: int, tag: int) -> int:
        """A short message, or the announcement of one that is too long, or of a GPU's."""
        told, status = torch.empty(ANNOUNCEMENT, dtype=torch.uint8, device="cpu"), Status()
        buffer = [fromaddress(told.data_ptr(), ANNOUNCEMENT), ANNOUNCEMENT, BYTE]
        self.guarded("recv", self.channel.peer.Recv, src, (buffer, src, tag, status))
        if (nbytes := status.Get_count(BYTE)) <= tensor.nbytes:
            memmove(tensor.data_ptr(), told.data_ptr(), nbytes)
        else:
            receiving = Receiving(parcels, self, "recv", Message(tensor, tensor), src, tag, (told, status))
            self._pending(receiving, tensor).wait()
        return src

    @spans.spanned("recv")
    def _recv_any(self, tensor: Tensor, src: int | None, tag: int) -> int:
        self._peer("recv", "src", 0 if src is None else src, tag)
        incoming = buffers.incoming("recv", tensor)
        if self.host.parcels is not None:
            receiving = Receiving(self.host.parcels, self, "recv", incoming, ANY_SOURCE if src is None else src, tag)
            self._pending(receiving, tensor).wait()
            return receiving.source
        if self.unmatched is not None:
            matched = MatchedReceive(self.unmatched, self, "recv", incoming, ANY_SOURCE if src is None else src, tag)
            self._pending(matched, tensor).wait()
            return matched.source
        try:
            source = self.guarded("recv", lambda: self._recv(self.channel, incoming, src, tag), src)
        except TruncationError as error:
            raise too_long(self, "recv", incoming) from error
        incoming.deliver()
        return source

    def _recv(self, channel: Channel, incoming: Message, src: int | None, tag: int) -> int:
        buffer = spec(incoming.address, incoming.nbytes)
        peer = ANY_SOURCE if src is None else src
        status = Status()
        if not channel.runtime.serialized:
            channel.peer.Recv(buffer, peer, tag, status)
        else:
            with channel.lock:
                request = channel.peer.Irecv(buffer, peer, tag)
            pause = channel.pause()
            while not channel.test(request, status):
                pause()
        return int(status.Get_source())

    @spans.spanned("isend")
    def isend(self, tensor: Tensor, dst: int, tag: int = 0) -> Work:
        """Starts a send; the tensor must not change until the Work has completed. Dropping the Work is harmless."""
        self._peer("isend", "dst", dst, tag)
        outgoing = buffers.outgoing("isend", tensor)
        if self.host.parcels is not None:
            return self._pending(Sending(self.host.parcels, self, "isend", outgoing, dst, tag, now=False), tensor)
        with self.channel.lock:
            request = self.channel.peer.Isend(spec(outgoing.address, outgoing.nbytes), dst, tag)
        return self._pending(Posted(self, "isend", outgoing, request, receiving=False), tensor)

    @spans.spanned("irecv")
    def irecv(self, tensor: Tensor, src: int | None, tag: int = 0) -> Work:
        """Starts a receive from ``src`` (None: from anybody) into the front of the tensor."""
        self._peer("irecv", "src", 0 if src is None else src, tag)
        incoming = buffers.incoming("irecv", tensor)
        peer = ANY_SOURCE if src is None else src
        if self.host.parcels is not None:
            return self._pending(Receiving(self.host.parcels, self, "irecv", incoming, peer, tag), tensor)
        if self.unmatched is not None:
            return self._pending(MatchedReceive(self.unmatched, self, "irecv", incoming, peer, tag), tensor)
        with self.channel.lock:
            request = self.channel.peer.Irecv(spec(incoming.address, incoming.nbytes), peer, tag)
        return self._pending(Posted(self, "irecv", incoming, request, receiving=True), tensor)

    def _pending(self, posted: Posted, tensor: Tensor) -> Work:
        work = P2PWork(self.where(posted.operation), [tensor], self.timeout_s)
        work._on_timeout = self._timed_out
        work.posted = posted
        try:
            if not posted.test():
                return poller.add(work, posted)
        except CommunicationError as error:
            work._complete(error)
        else:  # a small message is often gone at once
            work._complete()
        return work


class P2PWork(Work):
    """The Work of a message; knows who sent it."""

    posted: Posted

    def source_rank(self) -> int:
        return self.posted.source

    _source_rank = source_rank


def cancel_all(group: Group) -> None:
    """Takes back what is pending on a group that is being closed."""

    def belongs(request: Request) -> bool:
        return isinstance(request, Posted) and request.group is group

    for work, request in poller.drop(belongs).items():
        assert isinstance(request, Posted)
        request.cancel()
        work._complete(GroupDestroyed(f"{work._where}: the group was destroyed before the message had arrived"))

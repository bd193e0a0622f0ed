"""Messages between two ranks. The thread of the caller posts them to MPI at once. So they keep MPI's order.

Note [Messages that are too long, unnoticed]: MPICH 5 raises no error for a small message that has come before a receive from any
rank. It writes nothing past the end, and its status has the size of the whole message. So we compare the sizes. Intel MPI 2021.18
raises no error after a probe (`receive_arrived`), and none in a receive of no bytes (`datatypes.room`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mpicoll._host.matching import MatchedReceive, Unmatched
from mpicoll._mpi import bell
from mpicoll._mpi.channel import ANY_SOURCE, FAULTY_ANY_SOURCE, Channel, Status
from mpicoll._mpi.datatypes import BYTE, INT_MAX, fromaddress, post, room, spec
from mpicoll._mpi.errors import truncated
from mpicoll._mpi.runtime import OWN_TAGS
from mpicoll._tensors import buffers, signatures
from mpicoll._tensors.calls import Transfer


class HostMessages:
    """The messages of one group, ``apart`` if it has several nodes. Ranks are group ranks; memory is contiguous."""

    def __init__(self, channel: Channel, checked: bool, apart: bool) -> None:
        self._channel = channel
        self._ranks, self._tags = range(channel.comm.Get_size()), range(channel.runtime.tag_ub + 1)
        self._serialized = channel.runtime.serialized
        self.checked = checked  # each message has a header
        self._usual = not self._serialized and not checked
        self._known = buffers.Known[list[Any]]()
        self._bell, self._asleep, self._places = bell.bell, bell.bell.words, bell.bell.places(channel.ranks)
        own = Unmatched(channel)
        # The receives that we match ourselves; None: MPI matches them.
        self.unmatched = own if channel.runtime.overruns else None
        # The same from the first `irecv` from any rank on, so that all keep their order; see Note [Receives from any rank].
        self._from_any = own if apart and FAULTY_ANY_SOURCE else self.unmatched

    def wake(self, peer: int) -> None:
        """Wakes a rank that may wait for a message of this one, or for a receive of it. See bell.py."""
        if self._asleep[place := self._places[peer]]:
            self._bell.ring(place)

    def buffer(self, tensor: Tensor, rank: int | None, tag: int) -> list[Any] | None:
        """Returns a tensor's memory for one call of MPI. None: the message needs checks, packing or another protocol."""
        if type(rank) is not int or type(tag) is not int or rank not in self._ranks or tag not in self._tags:
            return None
        known = self._known.find(tensor)
        if known is None and self._usual and buffers.is_dense_cpu(tensor) and 0 < tensor.nbytes <= INT_MAX:
            known = [fromaddress(tensor.data_ptr(), tensor.nbytes), tensor.nbytes, BYTE]
            self._known.keep(tensor, known)
        return known

    def receive_arrived(self, memory: Tensor, src: int | None, tag: int) -> int | None:
        """Receives a message that has come from ``src`` (None: any rank). Returns its sender's rank; None: none has come."""
        channel, peer = self._channel, ANY_SOURCE if src is None else src
        with channel.posting, channel.lock:
            if not channel.comm or (found := channel.arrived(peer, OWN_TAGS + tag)) is None:  # freed by another thread
                return None
            target = memory if found.nbytes <= memory.nbytes else torch.empty(found.nbytes, dtype=torch.uint8, device="cpu")
            request = channel.comm.Irecv(spec(target.data_ptr(), found.nbytes), found.source, found.tag)
        with bell.Meeting(self._bell, channel.ranks[found.source]):
            channel.wait_all([request])
        if target is not memory:
            raise truncated()
        return found.source

    def isend(self, memory: Tensor, dst: int, tag: int, buffer: list[Any] | None = None) -> Transfer:
        """Starts a send. ``buffer``: that of `buffer`."""
        header = bytearray(signatures.header(memory)) if self.checked else None
        with self._channel.lock:
            content = buffer or spec(memory.data_ptr(), memory.nbytes)
            request = post(self._channel.comm.Isend, header, content, dst, OWN_TAGS + tag)
        self.wake(dst)
        return _Send(self._channel, request, memory, header)

    def irecv(self, tensor: Tensor, memory: Tensor, src: int | None, tag: int, buffer: list[Any] | None = None) -> Transfer:
        """Starts a receive from ``src``; None: any rank. A packed copy is copied back into ``tensor`` when it has arrived."""
        peer = ANY_SOURCE if src is None else src
        header = bytearray(signatures.HEADER.size) if self.checked else None
        if src is None:
            self.unmatched = self._from_any
        if self.unmatched is not None:
            own = memory.data  # an alias: the message may come after the program has resized the tensor
            tensor = own if memory is tensor else tensor
            return MatchedReceive(self.unmatched, self.wake, tensor, own, peer, OWN_TAGS + tag, header)
        with self._channel.posting, self._channel.lock:
            content = buffer or room(memory.data_ptr(), memory.nbytes)
            request = post(self._channel.comm.Irecv, header, content, peer, OWN_TAGS + tag)
        if src is not None:
            self.wake(src)
        return _Receive(self._channel, request, tensor, memory, header)


class _Send:
    source, moved, nbytes, wrong = -1, False, 0, ""

    def __init__(self, channel: Channel, request: Any, memory: Tensor, header: bytearray | None) -> None:
        self._channel = channel
        self._request = request
        self._memory, self._header = memory, header  # MPI reads them until the request has ended

    def test(self) -> bool:
        return self._channel.test(self._request)

    def cancel(self) -> bool:
        return False


class _Receive:
    source, moved, wrong = -1, False, ""

    def __init__(self, channel: Channel, request: Any, tensor: Tensor, memory: Tensor, header: bytearray | None) -> None:
        self._channel = channel
        self._request = request
        self._tensor, self._memory, self._header = tensor, memory, header
        # Now: the memory may be resized meanwhile.
        self._room, self._expected = memory.nbytes, b"" if header is None else signatures.header(memory)
        self._status = Status()

    @property
    def nbytes(self) -> int:
        return int(self._status.Get_elements(BYTE)) - len(self._header or b"")

    def test(self) -> bool:
        if self._request and not self._channel.test(self._request, self._status):  # null: an exception has followed its end
            return False
        self.source = self._status.Get_source()
        if self.nbytes > self._room:
            raise truncated()  # Note [Messages that are too long, unnoticed]
        if self._header is not None:
            self.wrong = signatures.difference(self._header, self._expected)
        if self._memory is not self._tensor:
            buffers.copy_into(self._tensor, self._memory)
        return True

    def cancel(self) -> bool:
        return self._channel.cancel(self._request)

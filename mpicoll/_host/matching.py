"""Receives that we match to messages ourselves, before MPI gets their memory.

Used only if MPI would write a message that is too long past the end of its receive: Note [Messages that are too long] in
_mpi/open_mpi.py. Otherwise a receive is posted to MPI, which matches it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mpicoll._mpi.arrivals import Arrived
from mpicoll._mpi.channel import ANY_SOURCE, Channel
from mpicoll._mpi.datatypes import post, spec
from mpicoll._mpi.errors import truncated
from mpicoll._tensors import buffers, signatures


class Unmatched:
    """The receives of a group that have no message yet, in the order in which they were started.

    By MPI's rule a message goes to the first receive that fits it. The receive that finds a message may be a later one: a receive
    from any rank may find a message that belongs to an earlier receive from its sender.

    ``_guard``, the channel's ``posting``, guards ``_receives``. It is held from finding a message to handing it out.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._receives: list[MatchedReceive] = []
        self._guard = channel.posting

    def add(self, receive: MatchedReceive) -> None:
        with self._guard:
            self._receives.append(receive)

    def remove(self, receive: MatchedReceive) -> bool:
        """Removes a receive. Returns False if it has its message already."""
        with self._guard:
            if receive.matched:
                return False
            self._receives.remove(receive)
            return True

    def look(self, receive: MatchedReceive) -> bool:
        """Looks once for a message that fits ``receive``. Returns True if it has its message."""
        with self._guard:
            if not receive.matched:
                arrived = self.channel.arrived(receive.src, receive.tag)
                if arrived is not None:
                    first = next(other for other in self._receives if other.fits(arrived.source, receive.tag))
                    self._receives.remove(first)
                    first.start(arrived)
            return receive.matched


class MatchedReceive:
    """A receive from ``src``, a group rank or ANY_SOURCE."""

    moved, wrong = False, ""

    def __init__(
        self, unmatched: Unmatched, wake: Callable[[int], None], tensor: Tensor, memory: Tensor, src: int, tag: int,
        header: bytearray | None = None,
    ) -> None:  # fmt: skip
        self.source, self.nbytes = -1, 0
        self.src = src
        self.tag = tag
        self.matched = False
        self._unmatched, self._wake = unmatched, wake
        self._tensor, self._memory, self._header = tensor, memory, header
        self._request: Any = None
        # Memory for a message that is too long. It is still received, so that its sender ends.
        self._surplus: Tensor | None = None
        unmatched.add(self)

    def fits(self, source: int, tag: int) -> bool:
        return self.src in (source, ANY_SOURCE) and self.tag == tag

    def start(self, arrived: Arrived) -> None:
        """Receives the message into this receive's memory, or into ``_surplus`` if it is too long."""
        self.source, self.nbytes = arrived.source, arrived.nbytes - len(self._header or b"")
        channel, target = self._unmatched.channel, self._memory
        if self.nbytes > target.nbytes:
            target = self._surplus = torch.empty(self.nbytes, dtype=torch.uint8, device="cpu")
        with channel.lock:
            content = spec(target.data_ptr(), self.nbytes)
            self._request = post(channel.comm.Irecv, self._header, content, self.source, self.tag)
        self.matched = True
        self._wake(self.source)

    def test(self) -> bool:
        if not self._unmatched.look(self) or not self._unmatched.channel.test(self._request):
            return False
        if self._surplus is not None:
            self._surplus = None
            raise truncated()
        if self._header is not None:
            self.wrong = signatures.difference(self._header, signatures.header(self._memory))
        buffers.copy_back([self._tensor], [self._memory])
        return True

    def cancel(self) -> bool:
        """Returns False if the receive has its message: MPI may still write its memory."""
        return self._unmatched.remove(self)

"""A message that MPI has, with what must live until it has ended: its request and its memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpicoll._mpi.channel import Status
from mpicoll._mpi.errors import MPIException, translate
from mpicoll._tensors.buffers import Message
from mpicoll.errors import TruncationError

if TYPE_CHECKING:
    from mpicoll._engine.group import Group


class Posted:
    """``source``: of a receive that has ended, the sender's group rank."""

    def __init__(self, group: Group, operation: str, message_: Message, request: Any, receiving: bool) -> None:
        self.group = group
        self.receiving = receiving
        self.source = -1
        self.operation = operation
        self._message = message_
        self._request = request
        self._status = Status() if receiving else None

    def test(self) -> bool:
        """True once it has ended; a receive has then been delivered into the tensor.

        Raises: TruncationError: the message was longer than the tensor. CommunicationError: MPI's error.
        """
        try:
            return self._test()
        except MPIException as raw:
            error = translate(raw, self.group.where(self.operation))
            if isinstance(error, TruncationError):
                raise too_long(self.group, self.operation, self._message) from raw
            self.group.fail(error)
            raise error from raw

    def _test(self) -> bool:
        if not self.group.channel.test(self._request, self._status):
            return False
        if self._status is not None:
            self.source = self._status.Get_source()
            self._message.deliver()
        return True

    def cancel(self) -> None:
        """Takes back a receive; what has begun to move, and a send, stays with MPI, and its memory with us, for ever."""
        if not (self.receiving and self.group.channel.cancel(self._request)):
            left_with_mpi.append(self)


left_with_mpi: list[Posted] = []


def too_long(group: Group, operation: str, message_: Message) -> TruncationError:
    tensor = message_.tensor
    return TruncationError(
        f"{group.where(operation)}: the message is longer than the tensor that should receive it, of "
        f"{message_.nbytes} bytes (shape {tuple(tensor.shape)}, {tensor.dtype}); the tensor's content is undefined now"
    )

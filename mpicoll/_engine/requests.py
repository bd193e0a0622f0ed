"""The messages that have been posted: each is an object that lives until it has ended, and by which the program waits for it."""

from __future__ import annotations

import threading
from time import monotonic

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from mpicoll._base.errors import CollectiveMismatch, MpicollError
from mpicoll._base.group_errors import TruncationError
from mpicoll._engine.work import Work
from mpicoll._faults import culprits
from mpicoll._faults.group_state import GroupState
from mpicoll._mpi import bell, runtime
from mpicoll._mpi.backoff import looks
from mpicoll._mpi.errors import MPIException, translate
from mpicoll._tensors import storages
from mpicoll._tensors.calls import Transfer
from mpicoll._tensors.storages import Held


class MessageWork(Work):
    """A message under way in a group, and its Work. It knows the sender, and the size of what has been received.

    A receive may be posted long before its message is sent. So its limit counts from the moment somebody wants the result.

    Args:
        peer: The group rank on the other side; None: any rank.

    Attributes:
        held: The tensor, while MPI uses its memory and the program may change it.
        fatal: `test` has raised what makes the group unusable.
    """

    held: Held | None = None
    fatal = False
    _met = 0  # looks since the other side waits for this rank
    _mutex = threading.Lock()  # of all messages: it is held for moments

    def __init__(self, group: GroupState, operation: str, transfer: Transfer, tensor: Tensor, peer: int | None) -> None:
        dist.Work.__init__(self)  # half of the attributes of `Work` need no value, which takes 1 us less
        self._tensors, self._timeout_s, self._on_timeout = [tensor], group.timeout_s, group.fail
        self.group, self.operation, self.transfer, self.tensor, self.peer = group, operation, transfer, tensor, peer

    def where(self) -> str:
        return self.group.where(self.operation)

    def _named(self) -> str:
        return culprits.other_side(self.group, self.peer)

    def test(self) -> bool:
        """Works like `Transfer.test`, with mpicoll's errors. After one, call `failed` without a lock: the program's hooks run."""
        try:
            if not self.transfer.test():
                return False
        except MPIException as raw:
            error = translate(raw, self.where())
            if isinstance(error, TruncationError):
                raise too_long(self.group, self.operation, self.tensor) from None
            self.fatal = True
            raise error from raw
        except Exception:
            if not self.tensor.is_cpu:  # the peer waits for a message that does not come, and MPI may still write
                self.fatal = True
                runtime.process.kept.append(self)
            raise
        if self.transfer.wrong:
            raise CollectiveMismatch(f"{self.where()}: {self.transfer.wrong}")
        if self.held and (resized := storages.resized(self.held)):
            raise MpicollError(f"{self.where()}: {resized}")
        return True

    def failed(self, error: BaseException) -> None:
        """Makes the group unusable if this error of `test` is fatal."""
        if self.fatal and isinstance(error, Exception):
            self.group.fail(error)

    def other_side(self) -> int | None:
        """The rank of the world on the other side, for the bell; None: any rank."""
        return None if self.peer is None else self.group.channel.ranks[self.peer]

    def moves(self) -> bool:
        """Whether the message may move now: the other side waits for this rank, not for more looks than a message takes.

        In shared memory a message moves only while both sides call MPI.
        """
        if not bell.bell.meets(self.other_side()):
            self._met = 0
            return False
        self._met += 1
        return self._met < looks(self.tensor.nbytes)

    def cancel(self) -> None:
        """Cancels a receive. MPI keeps a send, and a message that has begun to move; we then keep its memory."""
        if not self.transfer.cancel():
            runtime.process.kept.append(self)

    def get_future(self) -> Future[list[Tensor]]:
        self.begun = min(self.begun, monotonic())
        return super().get_future()

    get_future_result = get_future

    def source_rank(self) -> int:
        return self.transfer.source

    _source_rank = source_rank

    def received_nbytes(self) -> int:
        """Returns the size of the message, which may be less than that of the tensor, once a receive has ended."""
        return self.transfer.nbytes


def too_long(group: GroupState, operation: str, tensor: Tensor) -> TruncationError:
    """Returns the error for a message that is longer than the tensor of its receive."""
    return TruncationError(
        f"{group.where(operation)}: the message is longer than the tensor that should receive it, of "
        f"{tensor.nbytes} bytes (shape {tuple(tensor.shape)}, {tensor.dtype}); the tensor's content is undefined now"
    )

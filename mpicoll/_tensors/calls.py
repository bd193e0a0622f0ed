"""Types that host and device operations share: a prepared collective (`Call`) and a posted message (`Transfer`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from mpicoll._tensors import buffers

# What must be alike on all ranks; signatures.py describes it, and _base/facts.py compares. Fields at the end may be missing.
#     (plan of a reduction or dtype, bytes or None, root or None, sizes)
# sizes: the size of each rank's block; or (sends, receives), blocks whose size only sender and receiver know
Signature: TypeAlias = "tuple[Any, ...]"

# A function and its arguments, to be called in the group's order, and the signature.
# A plain tuple: making an object with named fields takes 0.2 us longer, a tenth of a small operation.
Call: TypeAlias = "tuple[Callable[..., object], tuple[Any, ...], Signature]"


def run(call: Call) -> None:
    function, arguments, _ = call
    function(*arguments)


def in_turn(several: Sequence[Call]) -> Call:
    """Returns a Call that runs these one after the other."""
    return _run_all, (several,), (None, None, None, [signature for *_, signature in several])


def _run_all(several: Sequence[Call]) -> None:
    for function, arguments, _ in several:
        function(*arguments)


def run_and_copy_back(call: Call, tensors: Sequence[Tensor], memories: Sequence[Tensor]) -> None:
    """Runs a call that writes ``memories``, then copies their values into ``tensors``."""
    function, arguments, _ = call
    function(*arguments)
    buffers.copy_back(tensors, memories)


class DifferentCalls(Exception):
    """Another rank has called another collective, or with other sizes. A window cannot be used any more. May say what differs."""


class Transfer(Protocol):
    """One message that has been posted.

    Attributes:
        source: The sender's group rank, once a receive has ended.
        nbytes: The size of the message, once a receive has ended.
        wrong: What is wrong with the message for its tensor, once a receive of a checked group has ended; see signatures.py.
        moved: Set by `test` when the message has moved but not ended; cleared by the reader.
    """

    source: int
    wrong: str
    moved: bool

    @property
    def nbytes(self) -> int: ...

    def test(self) -> bool:
        """Moves the message forward. Returns True once it has ended; the tensor then holds a received message.

        Raises:
            MPIException: MPI's error. MPI_ERR_TRUNCATE means that the message was longer than the tensor.
        """

    def cancel(self) -> bool:
        """Cancels the message. Returns False if MPI may still use its memory."""

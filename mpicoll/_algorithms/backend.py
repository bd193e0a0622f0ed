"""What the backends for the kinds of memory have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from mpicoll._algorithms.plans import Plan
from mpicoll._tensors.calls import Call, Transfer
from mpicoll._tensors.reductions import Op


class Messages(Protocol):
    """The messages of one group. Memory must not change until the Transfer has ended."""

    def isend(self, memory: Tensor, dst: int, tag: int) -> Transfer: ...

    def irecv(self, tensor: Tensor, memory: Tensor, src: int | None, tag: int) -> Transfer:
        """Receives into ``memory``, the tensor's own or a packed copy. ``src``: None: from any rank."""


class Backend(Protocol):
    """The collectives of one group on one kind of memory, which is contiguous; results are written in place.

    Each returns a Call, which runs in the group's order, on all ranks alike.
    """

    @property
    def messages(self) -> Messages: ...

    def all_reduce(self, memory: Tensor, plan: Plan) -> Call:
        """Reduces in place on every rank."""

    def all_reduce_packed(self, memories: Sequence[Tensor], plan: Plan) -> Call:
        """Reduces several tensors of one dtype as one message, on the device of the first one."""

    def all_reduce_sparse(self, operation: str, tensor: Tensor, source: Tensor, op: Op) -> Call:
        """Reduces into a sparse tensor, from this rank's part as `sparse.coalesced` returns it; see _tensors/sparse.py."""

    def reduce(self, memory: Tensor, plan: Plan, root: int) -> Call:
        """Reduces in place on the root. The other ranks' memory is only read."""

    def scan(self, memory: Tensor, plan: Plan, exclusive: bool) -> Call:
        """Reduces in place over ranks 0 to this one. ``exclusive``: over those before it; rank 0 keeps its values."""

    def reduce_scatter(self, target: Tensor, source: Tensor, counts: Sequence[int], plan: Plan) -> Call:
        """Does `reduce_scatter_single` with blocks of ``counts`` elements. The Call keeps the memory."""

    def reduce_scatter_single(self, target: Tensor, source: Tensor, plan: Plan) -> Call:
        """Rank i gets the reduction of every rank's i-th block of ``source``. The target may overlap the source."""

    def broadcast(self, memory: Tensor, root: int) -> Call:
        """Overwrites the memory with the root's, on every other rank."""

    def all_gather(self, targets: Sequence[Tensor], source: Tensor) -> Call:
        """Gathers blocks of any sizes, which all ranks know. The source may overlap the targets."""

    def all_gather_single(self, target: Tensor, source: Tensor) -> Call:
        """Gathers equal blocks. The source may overlap the target; it may also be this rank's block of the target."""

    def gather(self, targets: Sequence[Tensor] | None, source: Tensor, root: int) -> Call:
        """Rank i's source arrives in the root's ``targets[i]``. ``targets`` is None on the other ranks."""

    def scatter(self, target: Tensor, sources: Sequence[Tensor] | None, root: int) -> Call:
        """The root's ``sources[i]`` arrives in rank i's target. ``sources`` is None on the other ranks."""

    def all_to_all(self, targets: Sequence[Tensor], sources: Sequence[Tensor], operation: str = "all_to_all") -> Call:
        """Rank i's ``sources[j]`` arrives in rank j's ``targets[i]``. Only the two ranks need to know the size.

        If they differ about it, all ranks raise CollectiveMismatch; checked only when a window is used.
        """

    def all_to_all_single(self, target: Tensor, source: Tensor, receives: Sequence[int], sends: Sequence[int]) -> Call:
        """Exchanges rows of dim 0: ``sends[j]`` rows go to rank j, ``receives[i]`` rows come from rank i."""

    def copying_back(self, call: Call, tensors: Sequence[Tensor], memories: Sequence[Tensor]) -> Call:
        """Returns a Call that runs ``call`` and then copies the packed copies among ``memories`` into their ``tensors``."""

    def close(self) -> None:
        """Frees windows and communicators. Called only when the program destroys the group, never by garbage collection."""

"""The storages of a program's tensors that all ranks of a node map. A large all_reduce of them needs no copy in and out.

A rank knows its own storages alone. So a large all_reduce begins with an exchange: each rank tells the number of its storage, and
the offset of its tensor there. It is in place if all ranks tell one number. A group that has shared nothing exchanges nothing.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from torch import UntypedStorage

from mpicoll._algorithms.windows import Windows
from mpicoll._mpi import remote_memory
from mpicoll._mpi.channel import Channel
from mpicoll._mpi.remote_memory import Shared

NOT_SHARED = 0  # instead of a storage's number


class SharedStorages:
    """The shared storages of one group. One leaves when the program drops it.

    Attributes:
        count: How many the group has shared, in its order: equal on all ranks.
    """

    def __init__(self, channel: Channel, windows: Windows) -> None:
        self.count = 0
        self._channel, self._windows = channel, windows
        self._mapped = WeakKeyDictionary[UntypedStorage, tuple[Shared, int]]()  # with its address

    def share(self, nbytes: int) -> Shared | None:
        """`remote_memory.share` for the ranks of the group (collective, in the group's order)."""
        self.count += 1
        return remote_memory.share(self._channel, self._windows.node, nbytes, self.count)

    def add(self, storage: UntypedStorage, shared: Shared) -> None:
        """Adds the storage over this rank's part of ``shared``."""
        self._mapped[storage] = shared, storage.data_ptr()

    def number(self, storage: UntypedStorage) -> int:
        """The number of a storage, or NOT_SHARED."""
        shared, address = self._mapped.get(storage, (None, 0))
        return shared.number if shared is not None and storage.data_ptr() == address else NOT_SHARED  # it may have been moved

    def get(self, storage: UntypedStorage) -> Shared:
        """The memory of all ranks."""
        return self._mapped[storage][0]

"""The storages of a program's tensors that all ranks of a node map. A large all_reduce of them needs no copy in and out.

A storage comes here in two ways. `SharedStorages.share` makes new memory, for ``empty_shared``. `SharedStorages.move` moves a
storage of torch into a file, for the gradients of DDP; the next all_reduce maps the files of all ranks.

A rank knows its own storages alone. So a large all_reduce begins with an exchange: each rank tells the number of its storage, and
the offset of its tensor there. It is in place if all ranks tell one number. A group that has shared nothing exchanges nothing.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from torch import UntypedStorage

from mpicoll._host.algorithms.windows import Windows
from mpicoll._mpi import remote_memory
from mpicoll._mpi.channel import Channel
from mpicoll._mpi.remote_memory import Shared

NOT_SHARED, IN_FILE = 0, -1  # instead of a storage's number; IN_FILE: no other rank maps it yet
SEEN, ALONE = -1, -2  # instead of a storage's file; ALONE: it cannot be moved or mapped


class SharedStorages:
    """The shared storages of one group. One leaves when the program drops it.

    Attributes:
        count: How many the group has shared, in its order: equal on all ranks.
    """

    def __init__(self, channel: Channel, windows: Windows) -> None:
        self.count = 0
        self._channel, self._windows = channel, windows
        self._mapped = WeakKeyDictionary[UntypedStorage, tuple[Shared, int]]()  # with its address
        self._files = WeakKeyDictionary[UntypedStorage, int]()  # file descriptors

    def share(self, nbytes: int) -> Shared | None:
        """`remote_memory.share` for the ranks of the group (collective, in the group's order)."""
        self.count += 1
        return remote_memory.share(self._channel, self._windows.node, nbytes, self.count)

    def add(self, storage: UntypedStorage, shared: Shared) -> None:
        """Adds the storage over this rank's part of ``shared``."""
        self._mapped[storage] = shared, storage.data_ptr()

    def move(self, storage: UntypedStorage) -> None:
        """Moves a storage into a file of /dev/shm when it comes here for the second time, if there is room.

        Tensors follow it. Addresses that are kept elsewhere, by NumPy for example, do not.
        """
        if storage not in self._files:
            self._files[storage] = SEEN
        elif self._files[storage] == SEEN:
            try:
                self._files[storage] = storage._share_fd_cpu_()[0]
            except RuntimeError:  # there is no room
                self._files[storage] = ALONE

    def number(self, storage: UntypedStorage) -> int:
        """The number of a storage, or NOT_SHARED, or IN_FILE."""
        shared, address = self._mapped.get(storage, (None, 0))
        if shared is None:
            return IN_FILE if self._files.get(storage, ALONE) >= 0 else NOT_SHARED
        return shared.number if storage.data_ptr() == address else NOT_SHARED  # the program may have moved it

    def get(self, storage: UntypedStorage) -> Shared | None:
        """The memory of all ranks. If their storages are IN_FILE, maps them first; None if a rank cannot (collective then)."""
        if storage not in self._mapped:
            self.count += 1
            file, self._files[storage] = self._files[storage], ALONE
            shared = remote_memory.share_file(self._channel, self._windows.node, file, storage.nbytes(), self.count)
            if shared is None:
                return None
            self.add(storage, shared)
        return self._mapped[storage][0]

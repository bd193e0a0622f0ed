"""Settings of Open MPI: those that keep it from writing a message past the end of its receive, and a check whether they are in
force; one that makes it start faster; and one that keeps it from a faulty transport.

# Note [Messages that are too long]
ob1, Open MPI's transport for shared memory and TCP, has two protocols for a message: the sender sends it piece by piece, or one
side reads or writes the memory of the other (get, put). The first checks the length of the receive. The second does not: it
moves the whole message past the end of a shorter receive, and reports MPI_ERR_TRUNCATE after it has overwritten the memory
there. Seen with Open MPI 4.1.4 and 5.0.11, in receives and in collectives: from messages of 4 KiB on between processes of
a host (CMA) and to the process itself, from 64 KiB on over TCP. UCX and libfabric have transports of their own.

The settings leave only the first protocol. They take effect if they are in the environment when MPI starts. mpicoll puts them
there before it starts MPI, at ``import torch`` in a rank, and at the start of a rank of `mpicoll.run`. It does not change a
variable that the user has set.
On 2 cores 1 MB took 55 us with the first protocol and 104 us with CMA. Over TCP (loopback) 16 MB took 15 to 17 ms with the
first protocol and 11 to 14 ms with the second.

If MPI was started without the settings (the program imported mpi4py.MPI before torch, and mpirun started it), `overruns`
is true. Receives then match the message first, compare its length, and only then give MPI the memory.

# Note [The provider net]
Where there is no fast network, Open MPI 4.1.4 of Debian 12 takes the provider "net" of libfabric 1.17: TCP, between ranks of one
host, too. Messages get lost there (open-mpi/ompi issue 11295): random operations waited for ever in 5 of 6 runs, and so did what
came after a message that was longer than its receive. Without it, ob1 and shared memory carry the messages: 8 bytes took 2.5 us,
not 45 us. The setting is libfabric's: Open MPI refuses a list of its own beside the user's OMPI_MCA_mtl_ofi_provider_include.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from functools import cache

from mpicoll._base import inherited, open_mpi_settings, probe
from mpicoll._base.launcher import Launch

# Bits of a transport's flags (opal/mca/btl/btl.h), alike in Open MPI 4 and 5.
_SEND, _PUT, _GET = 1, 2, 4
_TRANSPORTS = ("sm", "vader", "self", "tcp", "smcuda", "openib", "ugni", "usnic", "portals4", "uct", "ofi")


def before_start(version: tuple[int, ...], environ: MutableMapping[str, str], launch: Launch | None) -> None:
    """Chooses transports in the environment, before MPI starts. What the user or the site has set stays.

    Args:
        version: Of the Open MPI that has been loaded.
    """
    one_host = launch is not None and launch.launcher in open_mpi_settings.LAUNCHERS and launch.local_size == launch.size
    settings = open_mpi_settings.of_version(version, one_host)
    if settings.keys() <= environ.keys():  # no file is read
        return
    decided = environ.keys() | open_mpi_settings.decided(environ, probe.loaded_library() or "")
    for name, value in settings.items():
        if name not in decided:
            inherited.provide_here(name, value, environ)


@cache
def overruns() -> bool:
    """True if MPI in this process may write a message past the end of its receive. MPI must have been started.

    If the environment does not tell, asks MPI for the settings in force, through its tool interface (MPI_T, 1 ms).
    """
    if all(os.environ.get(name) == value for name, value in open_mpi_settings.ALWAYS.items()):
        return False
    file = probe.loaded_library()
    if file is None:
        return False
    library = ctypes.CDLL(file)
    if not hasattr(library, "ompi_mpi_comm_world"):  # neither Open MPI nor derived from it
        return False
    with _tool_interface(library) as usable:
        return not usable or _moves_whole_messages(library)  # unknown: the slower receives are right in either case


def _moves_whole_messages(library: ctypes.CDLL) -> bool:
    if not _number(library, "pml_ob1_max_rdma_per_request"):  # no ob1, or it uses neither get nor put
        return False
    everything = _number(library, "pml_ob1_use_all_rdma")
    flags = [_number(library, f"btl_{name}_flags") or 0 for name in _TRANSPORTS]
    return any(bits & (_PUT | _GET) and (bits & _SEND or everything) for bits in flags)


@contextmanager
def _tool_interface(library: ctypes.CDLL) -> Iterator[bool]:
    """Starts MPI_T and ends it. Yields False if MPI refuses."""
    level = ctypes.c_int()
    library.MPI_Query_thread(ctypes.byref(level))
    # Asks for the thread level of MPI itself: in Open MPI 4 and 5, MPI_Query_thread afterwards returns the level asked for here.
    started = library.MPI_T_init_thread(level, ctypes.byref(level)) == 0
    try:
        yield started
    finally:
        if started:
            library.MPI_T_finalize()


def _number(library: ctypes.CDLL, name: str) -> int | None:
    """The value of an integer setting; None if MPI does not have it."""
    index, count, handle = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
    if library.MPI_T_cvar_get_index(name.encode(), ctypes.byref(index)) != 0:
        return None
    if library.MPI_T_cvar_handle_alloc(index, None, ctypes.byref(handle), ctypes.byref(count)) != 0:
        return None
    value = (ctypes.c_uint32 * (2 * count.value))()  # zeros, and room for any type of integer
    read = library.MPI_T_cvar_read(handle, value)
    library.MPI_T_cvar_handle_free(ctypes.byref(handle))
    return value[0] if read == 0 and count.value == 1 else None

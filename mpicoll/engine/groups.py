"""The groups of this process: made, found by name, closed. Nothing collective ever happens in garbage collection."""

from __future__ import annotations

import atexit
import os
import sys
import time
import zlib
from collections.abc import Sequence

from mpicoll.engine import watchdog
from mpicoll.engine.communicator import Communicator
from mpicoll.engine.point_to_point import cancel_all
from mpicoll.engine.progress import Backoff, poller
from mpicoll.mpi import abort, runtime
from mpicoll.mpi.channel import Channel

_groups: dict[str, Communicator] = {}

EXIT_S = 10.0  # seconds that a rank that leaves waits for what it has started


def create(name: str, ranks: Sequence[int] | None, timeout_s: float) -> Communicator:
    """Makes a group's communicator (collective over its members; nobody else calls).

    Args:   ranks: ranks of the world in the group's order, this rank among them; None: the whole world.
            timeout_s: seconds; the default limit of the group's operations.
    """
    there = runtime.start()
    if ranks is None:
        with there.lock:
            comm = there.comm.Dup()
        global_ranks = tuple(range(there.size))
    else:
        global_ranks = tuple(ranks)
        with there.lock:
            world = there.base.Get_group()
            members = world.Incl(list(global_ranks))
            # Members only: the tag, which all of them derive from the name, keeps apart groups that are made at the same
            # time by overlapping sets of ranks.
            comm = there.base.Create_group(members, zlib.crc32(name.encode()) % there.tag_ub)
            members.Free()
            world.Free()
    communicator = Communicator(name, Channel(there, comm, lambda: Backoff().pause), global_ranks, timeout_s)
    if not _groups:
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)
    communicator.closer = lambda: close(communicator)
    _groups[name] = communicator
    return communicator


def find(name: str) -> Communicator | None:
    """The open group of this name, if this rank is a member."""
    return _groups.get(name)


def close(communicator: Communicator) -> None:
    """Lets queued collectives end, takes back what is pending, and frees the communicators; later calls do nothing.

    Every member should call it; freeing is local in Open MPI and MPICH, so that one that does not holds up nobody.
    """
    if _groups.get(communicator.name) is not communicator:
        return
    del _groups[communicator.name]
    ended = communicator.end(communicator.timeout_s)
    cancel_all(communicator)
    if ended and not runtime.finalized():
        communicator.channel.free()
    if not _groups:
        poller.close()
        watchdog.stop()
        if ended:
            runtime.stop()


def close_all() -> None:
    """Closes every group, the newest first."""
    for communicator in reversed(list(_groups.values())):
        close(communicator)


def _at_exit() -> None:
    """Before MPI_Finalize: no thread of ours may be inside MPI then."""
    if not _groups or runtime.finalized():
        return
    deadline = time.monotonic() + EXIT_S
    for communicator in _groups.values():
        if communicator.broken is None and not communicator.lane.close(max(0.0, deadline - time.monotonic())):
            print(
                f"mpicoll: rank {communicator.rank} leaves while a collective that it has started on group "
                f"{communicator.name!r} has not ended after {EXIT_S:g} s: not every rank has called it",
                file=sys.stderr,
            )
            abort.abort("exit with a collective under way")
    for communicator in _groups.values():
        cancel_all(communicator)
    poller.close()
    watchdog.stop()


def _after_fork_in_child() -> None:
    watchdog.forget()
    for communicator in _groups.values():
        communicator.broken = runtime.forked_error()
    atexit.unregister(_at_exit)


os.register_at_fork(after_in_child=_after_fork_in_child)

"""The groups of this process: made, found by name, closed. Nothing collective ever happens in garbage collection."""

from __future__ import annotations

import atexit
import os
import sys
import time
import zlib
from collections import Counter
from collections.abc import Sequence
from functools import cache

import mpicoll._log as log
from mpicoll._engine import report
from mpicoll._engine.communicator import Communicator
from mpicoll._engine.consensus import agree
from mpicoll._engine.point_to_point import cancel_all
from mpicoll._host.thresholds import Choices
from mpicoll._mpi import abort, exit_handshake, library, runtime
from mpicoll._mpi.backoff import Backoff
from mpicoll._mpi.channel import Channel
from mpicoll._mpi.topology import Topology, discover
from mpicoll._progress import watchdog
from mpicoll._progress.progress import poller
from mpicoll.errors import GroupDestroyed

_groups: dict[str, Communicator] = {}
_made: Counter[tuple[int, ...]] = Counter()  # how many groups of these ranks this world has had
_begun: dict[str, int] = {}  # of groups that were closed: how many collectives this rank had begun
_stuck: list[Communicator] = []  # closed while a collective was under way that has not ended

_world: tuple[Topology, Choices] | None = None  # of a group of all ranks, as long as there are groups

EXIT_S = 10.0  # seconds that a rank that leaves waits for what it has started


def create(name: str, ranks: Sequence[int] | None, timeout_s: float) -> Communicator:
    """Makes a group's communicator (collective over its members; nobody else calls).

    Args:   ranks: ranks of the world in the group's order, this rank among them; None: the whole world.
            timeout_s: seconds; the default limit of the group's operations.
    """
    log.start()
    there = runtime.start()
    if ranks is None:
        with there.lock:
            comm = there.comm.Dup()
        if there.base == library.MPI.COMM_WORLD:
            exit_handshake.expect_all()
        global_ranks = tuple(range(there.size))
    else:
        global_ranks = tuple(ranks)
        with there.lock:
            world = there.base.Get_group()
            members = world.Incl(list(global_ranks))
            comm = there.base.Create_group(members, _tag(global_ranks) % there.tag_ub)
            members.Free()
            world.Free()
    channel = Channel(there, comm, lambda: Backoff().pause)
    topology, choices = _circumstances(channel, ranks)
    communicator = Communicator(name, channel, global_ranks, timeout_s, topology, choices)
    communicator.host.connect()
    _log(communicator, topology, choices)
    if not _groups:
        atexit.unregister(_at_exit)
        atexit.register(_at_exit)
        _watch_for_finalize()
    communicator.closer = lambda: close(communicator)
    _groups[name] = communicator
    return communicator


def _log(communicator: Communicator, topology: Topology, choices: Choices) -> None:
    if not _groups and communicator.rank == 0:
        report.world(communicator.channel.runtime, topology, choices)
    report.group(communicator.name, communicator.rank, topology, communicator.host.bare)


def _circumstances(channel: Channel, ranks: Sequence[int] | None) -> tuple[Topology, Choices]:
    """Which of a group's ranks share memory, and what they have agreed upon: the world's, or, where there is no world (it is
    another backend's, say), found out among themselves (collective then)."""
    global _world
    if _world is not None:
        topology, choices = _world
        return (topology if ranks is None else topology.of(ranks)), choices
    choices = agree(channel)
    with channel.lock:
        topology = discover(channel.comm, choices.node_size)
    if ranks is None:
        _world = topology, choices
    return topology, choices


def _tag(ranks: tuple[int, ...]) -> int:
    """What all members derive alike, and what keeps apart groups that overlapping sets of ranks make at the same time.

    Not from torch's name for the group: with use_local_synchronization that counts the groups that the rank has made
    before, which differs between the members.
    """
    _made[ranks] += 1
    return zlib.crc32(repr((ranks, _made[ranks])).encode())


def find(name: str) -> Communicator | None:
    """The open group of this name, if this rank is a member."""
    return _groups.get(name)


def close(communicator: Communicator) -> None:
    """Lets queued collectives end, takes back what is pending, and frees the communicators; later calls do nothing.

    Every member should call it; freeing is local in Open MPI and MPICH, so that one that does not holds up nobody.
    """
    global _world
    if _groups.get(communicator.name) is not communicator:
        return
    del _groups[communicator.name]
    _begun[communicator.name] = communicator.lane.begun
    ended = communicator.end(communicator.timeout_s)
    if not communicator.lane.idle():
        _stuck.append(communicator)
    cancel_all(communicator)
    if ended:
        communicator.host.close()
    if ended and not runtime.finalized():
        communicator.channel.free()
    if not _groups:
        _made.clear()
        poller.close()
        watchdog.stop()
        runtime.stop(free=ended)
        _world = None


def _at_exit() -> None:
    """Before MPI_Finalize: no thread of ours may be inside MPI then."""
    if runtime.finalized():
        return
    deadline = time.monotonic() + EXIT_S
    for communicator in [*_groups.values(), *_stuck]:
        if not communicator.lane.close(max(0.0, deadline - time.monotonic())):
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
    exit_handshake.leave(_collectives_begun, Backoff().pause)


def _collectives_begun(name: str) -> int:
    communicator = _groups.get(name)
    return _begun.get(name, 0) if communicator is None else communicator.lane.begun


@cache
def _watch_for_finalize() -> None:
    library.before_finalize(_at_finalize)


def _at_finalize() -> None:
    """The user calls MPI_Finalize and has left groups open: they end with MPI."""
    for communicator in _groups.values():
        communicator.lane.close(EXIT_S)
        cancel_all(communicator)
        communicator.broken = GroupDestroyed("MPI has been finalised, and the group with it")
    poller.close()
    watchdog.stop()


def _after_fork_in_child() -> None:
    watchdog.forget()
    _stuck.clear()
    for communicator in _groups.values():
        communicator.broken = runtime.forked_error()
    _groups.clear()  # the child may destroy its copies as it likes: locks may be held by threads that are not here
    atexit.unregister(_at_exit)


os.register_at_fork(after_in_child=_after_fork_in_child)

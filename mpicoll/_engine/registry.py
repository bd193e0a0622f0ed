"""Makes the groups of this process, finds them by name and closes them. Garbage collection never starts a collective."""

from __future__ import annotations

import atexit
import os
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any

import mpicoll._base.log as log
from mpicoll._algorithms.windows import Windows
from mpicoll._base import config, processes
from mpicoll._base.group_errors import GroupDestroyed, GroupFailed
from mpicoll._base.log import Algorithms
from mpicoll._base.waits import EXIT_S
from mpicoll._device import consensus as devices
from mpicoll._engine import torch_threads
from mpicoll._engine.communicator import Communicator
from mpicoll._engine.consensus import Agreed, agree
from mpicoll._engine.poller import poller
from mpicoll._engine.queue import CollectiveQueue
from mpicoll._faults import inquiries, late_ranks, program_end, questions, roll_call
from mpicoll._faults.call_comparison import PROGRAM_ENDED, WORLD_ENDED, Ledger
from mpicoll._faults.flight_recorder import recorder
from mpicoll._faults.late_ranks import Nobody
from mpicoll._faults.under_way import table
from mpicoll._faults.watch import end_job_after, watch
from mpicoll._faults.watchdog import watchdog
from mpicoll._host import algorithm_choice
from mpicoll._host.algorithm_choice import HIERARCHICAL
from mpicoll._host.collectives import HostCollectives
from mpicoll._mpi import bell, boards, library, runtime
from mpicoll._mpi.channel import Channel
from mpicoll._mpi.errors import MPIException, not_made
from mpicoll._mpi.runtime import Runtime
from mpicoll._mpi.topology import Topology, report
from mpicoll._tensors import checks

ELSEWHERE = 1 << 30  # no rank of a world, none with a bell: members of a group of several worlds have numbers from here on

World = tuple[Topology, Agreed, Ledger | None]  # of the ranks


class Registry:
    """All groups of this process. The only instance is ``registry``."""

    def __init__(self) -> None:
        self._groups: dict[str, Communicator] = {}
        self._made: Counter[tuple[int, ...]] = Counter()  # number of groups of these ranks that this world has had
        self._stuck: list[Communicator] = []  # closed groups with a collective that has not ended
        self._provided: dict[tuple[int, ...], Any] = {}  # communicators for the next group of these ranks
        self.looks: list[Callable[[], object]] = [watch.look]  # taken by a rank that waits for the others at the end
        self._world: World | None = None  # set by a group of all ranks, until the last group is closed
        self._ledger: Ledger | None = None  # of the last world

    def create(
        self, name: str, ranks: Sequence[int] | None, timeout_s: float, own: Mapping[str, str] = {}, comm: Any = None
    ) -> Communicator:
        """Makes a group's communicator (collective over its members; the other ranks do not call it).

        ``ranks``: ranks of the world in the group's order, with this one; None: all. ``own``: settings before the environment's.
        ``comm``: a communicator of mpi4py, of which all ranks are the group, of this and other worlds.

        Raises:
            OperationTimeout: A member did not come in time; names it. If all have come and one then stops, the job ends.
            CommunicationError: MPI has no communicator left, or another error of MPI. Groups made before stay usable.
        """
        checks.timeout("new_group", timeout_s)
        raises = config.get("MPICOLL_ON_TIMEOUT", own or os.environ) == "raise"
        made = ExitStack()  # frees what has been made
        try:
            with end_job_after("new_group", timeout_s):
                return self._create(name, ranks, timeout_s, raises, made, comm)
        except MPIException as raw:
            made.close()
            raise not_made(raw, f"new_group {name!r}", len(self._groups)) from raw

    def begin(self) -> None:
        """Called before the ranks meet to make their first group: questions about the groups before are not answered any more.

        The names of groups come again in the next world.
        """
        if not self._groups:
            watchdog.ended.clear()

    def _create(
        self, name: str, ranks: Sequence[int] | None, timeout_s: float, raises: bool, made: ExitStack, comm: Any
    ) -> Communicator:
        log.start()
        self.begin()
        runtime_ = runtime.start()
        recorder.start(runtime_.rank, runtime_.size)
        if spans := comm is not None:
            runtime_ = Runtime(comm)
            roll_call.everyone(runtime_, "new_group", timeout_s)
            ranks = range(ELSEWHERE, ELSEWHERE + runtime_.size)
        global_ranks = tuple(range(runtime_.size) if ranks is None or spans else ranks)
        tag = self._tag(tuple(ranks or global_ranks))
        if ranks is not None and not spans and runtime_.connected:
            roll_call.members(runtime_, ranks, "new_group", timeout_s, gone=self._gone)
        channel = self._channel(runtime_, ranks, tag)
        made.callback(channel.free)
        topology, agreed, ledger = self._circumstances(channel, ranks)
        queue, took = CollectiveQueue(name), Algorithms(name, channel.comm.Get_rank(), channel.comm.Get_size()).took
        host = host_collectives(channel, topology, agreed, queue, took)
        made.callback(host.close)
        above = None
        if agreed.devices is not None:
            from mpicoll._device.collectives import DeviceCollectives

            runtime.prepare_threads_with(devices.settle_in)
            with runtime_.lock:
                own = channel.comm.Dup()
            own_channel = Channel(runtime_, own, ranks)
            made.callback(own_channel.free)
            staging = host_collectives(own_channel, topology, agreed, queue, took)
            made.callback(staging.close)
            windows = None if staging.thresholds.large is None else staging.windows
            above = DeviceCollectives(own_channel, staging, windows, agreed.devices, topology, took, agreed.checks)
        attending, seen = Nobody(), {*global_ranks} if spans else {runtime_.rank} if ledger is None else {*ledger.boards.ranks}
        if ledger is not None and not agreed.checks:
            key = tag << 31 | zlib.adler32(repr(global_ranks).encode()) & 0x7FFFFFFF
            attending = late_ranks.of_group(ledger.boards, key, global_ranks, host.rank)
        kind = Communicator
        if agreed.checks:
            from mpicoll._engine.checked import CheckedCommunicator as kind
        communicator = kind(
            name=name, channel=channel, global_ranks=global_ranks, timeout_s=timeout_s, queue=queue, host=host, devices=above,
            closer=self.close, expired=recorder.expired, key=str(tag), ledger=ledger, attendance=attending,
            unseen=tuple(rank for rank in global_ranks if rank not in seen), raises=raises, spans=spans,
        )  # fmt: skip
        if not self._groups and communicator.rank == 0:
            report(runtime_, topology, devices.describe(agreed.devices))
        if not self._groups:
            atexit.unregister(self._at_exit)
            atexit.register(self._at_exit)
            _watch_for_end()
        self._groups[name] = communicator
        return communicator

    def _gone(self, ranks: Sequence[int]) -> tuple[int, str] | None:
        """One of these ranks of the world that makes no group of it any more, as its board or its answer says, and why."""
        world = None if self._world is None else next(iter(self._groups.values()), None)
        if world is None:
            return None
        for rank in ranks:
            known = None if self._ledger is None else self._ledger.read(rank)
            if known is not None and known.over:
                return rank, known.over
        elsewhere = [rank for rank in ranks if rank in world.unseen]
        return inquiries.gone(world, elsewhere) if elsewhere and questions.possible() else None

    def _channel(self, runtime_: Runtime, ranks: Sequence[int] | None, tag: int) -> Channel:
        """Returns the communicators of a new group."""
        with runtime_.lock:
            if ranks is None or runtime_ is not runtime.current():
                comm = runtime_.base if runtime_.own else runtime_.comm.Dup()
                if ranks is None and runtime_.base == library.MPI.COMM_WORLD:
                    program_end.expect_all()
            else:
                made = self._provided.pop(tuple(ranks), None)
                comm = made or runtime.create_group(runtime_.base, tuple(ranks), tag % runtime_.tag_ub)
        return Channel(runtime_, comm, ranks)

    def _circumstances(self, channel: Channel, ranks: Sequence[int] | None) -> World:
        """Returns which ranks of a group share memory, the settings that they agreed on, and the ledger of this node.

        Taken from the world if there is one. Otherwise (another backend may have made the world) the group's ranks find them
        (then collective).
        """
        if self._world is not None and channel.runtime is runtime.current():
            topology, agreed, ledger = self._world
            return (topology if ranks is None else topology.of(ranks)), agreed, ledger
        agreed = agree(channel)
        topology = agreed.topology
        if ranks is not None:
            return topology, agreed, None
        with channel.lock:
            shared = boards.make(channel.comm, topology.nodes)
        torch_threads.provide(channel.comm.Get_rank(), topology)
        bell.hang(shared, channel.comm.Get_rank(), apart=not topology.single)
        self._ledger = None if shared is None else Ledger(shared, agreed.compares)
        self._world = topology, agreed, self._ledger
        return self._world

    def provide(self, ranks: Sequence[int], comm: Any) -> None:
        """Hands over the communicator of the next group of these ranks."""
        self._provided[tuple(ranks)] = comm

    def abandon(self, reason: str) -> None:
        """Makes the groups with operations under way unusable: nobody waits any more until these end."""
        for communicator in self._groups.values():
            if communicator.line.pending or communicator.under_way() is not None:
                communicator.fail(GroupFailed(reason))

    def fail(self, reason: str) -> None:
        """Makes all groups unusable, and ends what waits. All ranks call it, and make other groups afterwards."""
        for communicator in list(self._groups.values()):
            communicator.reconfigurable = True
            communicator.fail(GroupFailed(reason))
        for work in poller.under_way():
            work._complete(GroupFailed(f"{work.where()}: {reason}"))

    def revoke(self) -> None:
        """Ends all operations of all groups, also on other ranks. Called after a rank has died."""
        for communicator in self._groups.values():
            communicator.channel.revoke()

    def _tag(self, ranks: tuple[int, ...]) -> int:
        """Returns a number that is equal on all members, for overlapping sets of ranks that make groups at the same time.

        It does not depend on torch's name for the group: with use_local_synchronization that name counts the groups that the
        rank has made before, and the members' counts may differ.
        """
        self._made[ranks] += 1
        return zlib.crc32(repr((ranks, self._made[ranks])).encode())

    def find(self, name: str) -> Communicator | None:
        """Returns the open group of this name; None if this rank is not a member."""
        return self._groups.get(name)

    def close(self, communicator: Communicator) -> None:
        """Waits for queued collectives, cancels pending messages, and frees the communicators. Later calls do nothing.

        Every member should call it. Freeing is local in Open MPI and MPICH, so a member that does not call it blocks no other.
        """
        if self._groups.get(communicator.name) is not communicator:
            return
        del self._groups[communicator.name]
        ended = False
        try:
            ended = communicator.end(communicator.timeout_s)
        finally:  # also after an exception of a signal's handler: what follows returns soon
            watchdog.leave(communicator)  # the other ranks may wait for this one in what follows
            if communicator.queue.idle():
                table.groups.pop(communicator, None)
            else:
                self._stuck.append(communicator)
                if communicator.failure is not None:
                    log.say(f"a group is closed while an operation is under way: {communicator.failure}")
            poller.cancel_all(communicator)
            if ended:
                communicator.accesses.withdraw_all()
                communicator.host.close()
                if communicator.devices is not None:
                    communicator.devices.close()
            communicator.attendance.close()
            if ended and not runtime.finalized():
                communicator.channel.free()
            if not self._groups:
                if self._ledger is not None:
                    self._ledger.over = WORLD_ENDED
                    watchdog.write(self._ledger)
                self._made.clear()
                bell.hang()
                poller.close()
                watchdog.stop(answers=bool(communicator.unseen) and not communicator.channel.serialized and questions.possible())
                table.groups.clear()
                recorder.stop()
                runtime.stop(free=ended)
                self._world = None

    def _at_exit(self) -> None:
        """Ends what is under way. Functions of atexit that were registered before may still use the groups."""
        if runtime.finalized():
            return
        program_end.end_collectives([*self._groups.values(), *self._stuck])
        for communicator in self._groups.values():
            poller.cancel_all(communicator)
        poller.close()
        watchdog.stop()

    def at_end(self) -> None:
        """Waits for the other ranks, before MPI_Finalize and after all functions of atexit."""
        if self._ledger is not None:
            self._ledger.over = PROGRAM_ENDED
            self._ledger.write(each for each in self._groups.values() if each.ledger is self._ledger)
        program_end.leave(self._collectives_started, lambda: [look() for look in self.looks], self._process)
        for communicator in self._groups.values():
            if communicator.broken is None:
                communicator.accesses.withdraw_all()

    def _process(self, rank: int) -> str:
        """What the last world knows of a rank's process, as a clause; empty: nothing."""
        known = None if self._ledger is None else self._ledger.read(rank)
        return "" if known is None else f", whose process {known.pid} {processes.state(known.pid)}"

    def _collectives_started(self, name: str) -> int:
        communicator = self._groups.get(name)
        return watchdog.ended.get(name, (0, ""))[0] if communicator is None else communicator.line.started

    def at_finalize(self) -> None:
        """Ends the open groups when the program calls MPI_Finalize. Later, at the end of Python, nothing can use them."""
        if sys.is_finalizing():
            return
        for communicator in self._groups.values():
            communicator.queue.close(EXIT_S)
            poller.cancel_all(communicator)
            communicator.broken = GroupDestroyed("MPI has been finalised, and the group with it")
        poller.close()
        watchdog.stop()
        recorder.stop()

    def after_fork_in_child(self) -> None:
        """Makes the groups unusable in a forked child."""
        table.groups.clear()
        table.inside.clear()
        self._stuck.clear()
        for communicator in self._groups.values():
            communicator.broken = runtime.forked_error()
        self._groups.clear()  # the child may destroy its copies at any time; threads of the parent may hold their locks
        atexit.unregister(self._at_exit)


def host_collectives(
    channel: Channel, topology: Topology, agreed: Agreed, queue: CollectiveQueue, took: log.Took
) -> HostCollectives:
    """Returns the collectives on host memory over a channel (collective)."""
    sizes = list(Counter(topology.nodes).values())
    known = algorithm_choice.of_group(agreed.host, sizes, possible=not channel.serialized)
    channel.in_background = queue.runs_here
    windows = Windows(channel, topology, agreed.host.chunk, queue.runs_here, queue.current)
    if known.large == HIERARCHICAL:
        windows.connect()
    return HostCollectives(channel, windows, known, took, agreed.checks)


registry = Registry()


@cache
def _watch_for_end() -> None:
    library.before_finalize(registry.at_finalize)
    library.at_end(registry.at_end)


os.register_at_fork(after_in_child=registry.after_fork_in_child)

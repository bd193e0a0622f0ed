"""Which ranks are lost, and communicators of the others, in a job that goes on when a rank dies.

Open MPI can do so: ULFM, ``mpirun --with-ft ulfm``. A dead rank is noticed within 0.1 s. From then on every collective on a
communicator with that rank fails, and so do messages to it and from it. Messages between others go on; `revoke` ends them too.

# Note [Who takes part]
Communicators of the survivors need every rank that lives, also one whose program has ended meanwhile. `meet` brings all of them
together: ranks that go on come from shrink or init_process_group, ranks that have ended come from `leave`.

    [1] all agree: have all of them ended? Then they leave                  MPI_Comm_iagree
    [2] otherwise they make a communicator without the dead ranks           MPI_Comm_shrink
    [3] if some have ended, they split it                                   MPI_Comm_split
    [4] if a rank has died in [3], they begin again with [1], on the communicator of [2]

# Note [A death while communicators are made]
If a rank dies in the millisecond in which the others make a communicator, Open MPI 5.0.11 may crash on them, also in
MPI_Comm_shrink: ompi_comm_revoke_local reads the table of collectives of every communicator, and a new one has none yet. So as
few communicators as possible are made, and `settle` waits until deaths at the same moment are known. Once in 400 deaths it
crashed in MPI_Comm_iagree (coll/ftagree).

# Note [Calls without an error]
If a rank dies in MPI_Allgatherv of small blocks, Open MPI 5.0.11 may return without an error, and without data. So `Channel`
looks for dead ranks after it. The other collectives have been tried (allgather, allreduce, reduce, both reduce_scatters,
broadcast, and with and without "v" gather, scatter and alltoall): they return an error.

# Note [One thread in MPI_Comm_create_from_group]
If another thread calls MPI_Iprobe meanwhile, Open MPI 5.0.11 may never return from it, although no rank has died: after some 20
calls of mpi4py alone on 4 ranks; 200 calls without such a thread returned. So `failed` waits, and the watchdog tries again later.
"""

from __future__ import annotations

import array
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

from mpicoll._base.waits import DEATHS_S
from mpicoll._mpi import library, runtime
from mpicoll._mpi.backoff import Backoff
from mpicoll._mpi.library import MPI
from mpicoll._mpi.runtime import Runtime

SETTING = "OMPI_MCA_mpi_ft_enable"  # set by mpirun --with-ft ulfm
LOOKS = 8  # Open MPI looks at its events in one of some calls only; 4 were needed
GOES_ON, ENDS = 1, 2  # bits for `agree`

_given = False  # see `world_given`
_root = MPI.COMM_WORLD  # or what `meet` has made of it; a world of a communicator of the user leaves it alone


@cache
def possible() -> bool:
    """True if the job goes on when a rank dies."""
    return os.environ.get(SETTING) in ("1", "true") and MPI.get_vendor()[0] == "Open MPI"


def lost(within_s: float = 0.0, world: Runtime | None = None) -> tuple[int, ...]:
    """The ranks of the world (None: the current one) that have died. Looks for ``within_s`` seconds until there is one."""
    world = world or runtime.current()
    if not possible() or world is None or runtime.finalized():
        return ()
    deadline = time.monotonic() + within_s
    while True:
        with world.lock:
            ranks = failed(world.base)
        if ranks:
            library.dead_processes = True  # see Note [After a process has died]
        if ranks or time.monotonic() >= deadline:
            return ranks
        time.sleep(1e-3)


def create_among_dead(base: MPI.Intracomm, ranks: Sequence[int], tag: int) -> MPI.Intracomm:
    """Makes a communicator of ranks that live and have met, even if other ranks of ``base`` have died (collective over them).

    MPI_Comm_create_group of Open MPI 5.0.11 then fails, so MPI_Comm_create_from_group takes its place, which older MPIs lack.
    All communicators that it makes are one to MPI_Comm_agree (coll/ftagree looks at cid_sub alone). Their duplicates are not.
    """
    if not possible():
        return runtime.create_group(base, ranks, tag)
    group = base.Get_group()
    members = group.Incl(list(ranks))
    try:
        with runtime.LOCK:  # see Note [One thread in MPI_Comm_create_from_group]
            made = MPI.Intracomm.Create_from_group(members, f"mpicoll.{tag}")
        try:
            return made.Dup()
        finally:
            made.Free()
    finally:
        members.Free()
        group.Free()


def revoke_base() -> None:
    """Ends the making of groups in this world, which can no longer succeed."""
    world = runtime.current()
    if world is not None and not world.base.Is_revoked():
        with world.lock:
            world.base.Revoke()


def settle() -> None:
    """Waits until ranks that have died at the same moment are known. See Note [A death while communicators are made]."""
    time.sleep(DEATHS_S)
    lost()


def root() -> MPI.Intracomm:
    """The communicator of all ranks that live: MPI.COMM_WORLD, or what `meet` has made of it last."""
    return _root


class Tolerated:
    """Drops an MPI error inside if a rank has died. For messages that help, but that nothing depends on.

    A class, so that type checkers know that what stands behind is reached, and find a function that would return nothing.
    """

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        """Returns whether the error is dropped."""
        if kind is None or not issubclass(kind, MPI.Exception) or not possible():
            return False
        library.dead_processes = True  # see Note [After a process has died]
        return True


def failed(comm: MPI.Intracomm) -> tuple[int, ...]:
    """Returns the ranks of this communicator that have died, as far as this rank knows. The caller holds the lock."""
    with runtime.LOCK:
        for _ in range(LOOKS):
            MPI.COMM_SELF.Iprobe()
        dead = comm.Get_failed()
    try:
        if dead.Get_size() == 0:
            return ()
        group = comm.Get_group()
        ranks = MPI.Group.Translate_ranks(dead, None, group)
        group.Free()
        return tuple(sorted(ranks))
    finally:
        dead.Free()


@contextmanager
def world_given() -> Iterator[None]:
    """Inside, `start` takes the current world, even if a rank of it has died meanwhile: all ranks agree about that later."""
    global _given
    _given = True
    try:
        yield
    finally:
        _given = False


def start() -> Runtime:
    """Starts MPI like `runtime.start`.

    If the ranks of a fault-tolerant job have had a world before, the new world is of those that live (collective over them).
    """
    if not _given and possible() and runtime.process.last_base is not None and (runtime.current() is None or lost()):
        return runtime.start(meet(_root, goes_on=True), own=True)
    return runtime.start()


def meet(base: MPI.Intracomm, goes_on: bool, meanwhile: Callable[[], None] = lambda: None) -> MPI.Intracomm | None:
    """Makes a communicator of the ranks that go on (collective over all ranks of ``base`` that live).

    Returns None if this rank does not go on. See Note [Who takes part]. Calls ``meanwhile`` while it waits in [1].
    """
    global _root
    of_all = base == _root
    while True:
        common, _ = agree(base, GOES_ON if goes_on else ENDS, meanwhile)  # [1]
        if common == ENDS:
            return None
        base = base.Shrink()  # type: ignore[assignment]  # [2]; mpi4py's stub says Comm
        if common == GOES_ON:
            _root = base if of_all else _root
            return base
        part = None
        try:
            part = base.Split(0 if goes_on else MPI.UNDEFINED, base.Get_rank())  # [3]
        except MPI.Exception:
            part = None
        made, died = agree(base, int(part is not None))
        if made and not died:  # [4]
            _root = part if of_all and goes_on else _root  # type: ignore[assignment]
            return part if goes_on else None  # type: ignore[return-value]


def agree(comm: MPI.Intracomm, word: int, meanwhile: Callable[[], None] = lambda: None) -> tuple[int, bool]:
    """Returns the bits that all ranks that live have in ``word``, and whether any rank has died (collective).

    Both are alike on all ranks.
    """
    bits, died, backoff = array.array("i", [word]), False, Backoff()
    request = comm.Iagree(bits)
    try:
        while not request.Test():
            meanwhile()
            backoff.pause()
    except MPI.Exception:  # raised on all ranks, after they have agreed
        died = library.dead_processes = True
    return bits[0], died

"""A world without an MPI launcher: processes that know rank and world size meet at a store of torch, as those of Gloo do.

    init_process_group ──► [1] the store: the one that is given, or torch's for init_method
                           [2] rank 0 says there where it listens, and all others connect to it (rank_connections.py). Those that
                               do not come in time are named, and MPI has not been started; later, all learn when a process ends
    import of MPI      ──► [3] MPICH and others of PMI-1: a thread answers MPI from the store (pmi.py)
                               Open MPI: the variables of a process under an mpirun that rank 0 starts (placeholders.py)
    end of the program ──► [4] MPI_Finalize, while threads still run; rank 0 ends last

The world is then like one of mpirun, and a world that is destroyed and made again is MPI's.
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import socket
import sys
import time
from datetime import timedelta
from multiprocessing import parent_process, util
from typing import Any, NoReturn
from urllib.parse import urlsplit

from torch._C._distributed_c10d import PrefixStore
from torch.distributed import DistError
from torch.distributed.rendezvous import rendezvous

from mpicoll._base import inherited, last_words, launcher, log, processes
from mpicoll._base.group_errors import OperationTimeout
from mpicoll._base.waits import AFTER_LIMIT_S, PARENT_S, SHORT_LOOK_S, STOP_S
from mpicoll._c10d import wrapping
from mpicoll._c10d.requested_ranks import ENV
from mpicoll._launch.placeholders import Placeholder
from mpicoll._launch.pmi import Server
from mpicoll._launch.rank_connections import Liveness
from mpicoll._mpi import runtime

PLACE = "mpicoll"  # the key in the store: where rank 0 listens
LONGEST = timedelta(days=1)  # MPI ends the wait, or the death of a rank does


def meet(rank: int, size: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """Meets the other ranks of a world that no launcher has started (collective over them).

    Returns what changes in the arguments of init_process_group: the store of the meeting is the store of the world.

    Raises:
        OperationTimeout: A rank did not come within the timeout; names it.
    """
    for name in [name for name in os.environ if inherited.names_job(name)]:  # of an outer step: `srun torchrun`
        del os.environ[name]
    limit_s, store, method = wrapping.limit(arguments), arguments.get("store"), str(arguments.get("init_method") or ENV)
    host = os.environ["MASTER_ADDR"] if store is None and method.startswith("env:") else urlsplit(method).hostname or ""
    if store is None:
        store = _store(method, rank, size, limit_s)
    launcher.store_world = StoreWorld(store, host, rank, size, limit_s)
    return {"store": store, "init_method": None, "rank": rank, "world_size": size}


def _store(method: str, rank: int, size: int, limit_s: float) -> Any:
    """The store of torch for this init_method. A TCPStore does not wait for the ranks: torch would not name the missing ones."""
    size = 1 if method.startswith(("env:", "tcp:")) else size
    try:
        return next(rendezvous(method, rank, size, timeout=timedelta(seconds=limit_s)))[0]
    except DistError as error:
        if rank == 0:
            raise
        raise _late([0], limit_s, f" ({error})") from error


def _late(ranks: list[int], limit_s: float, why: str = "") -> OperationTimeout:
    return OperationTimeout(f"init_process_group: Timed out: {last_words.late(ranks, limit_s)}{why}")


class Gather:
    """Hands a text of each rank to all ranks, through a store (collective). One key and four requests for each rank."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store, self._rank, self._size, self._calls = store, rank, size, 0

    def __call__(self, text: str) -> list[str]:
        self._calls += 1
        keys = [f"{self._calls}/{rank}" for rank in range(self._size)]
        together = f"{self._calls}/all"
        self._store.set(keys[self._rank], text)
        if self._store.add(f"{self._calls}/count", 1) == self._size:
            self._store.set(together, json.dumps([value.decode() for value in self._store.multi_get(keys)]))
        self._store.wait([together], LONGEST)
        found: list[str] = json.loads(self._store.get(together))
        return found


class StoreWorld:
    """This process as a rank; see `launcher.StoreWorld`. ``host``: of rank 0, as this rank names it; empty: unknown."""

    def __init__(self, store: Any, host: str, rank: int, size: int, limit_s: float) -> None:
        self.rank, self.size, self._pid, self._over = rank, size, os.getpid(), False
        self._mpi: Server | Placeholder | None = None
        self._liveness = Liveness(rank, self._lost)
        self._key, hosts = self._meet(store, host, limit_s)
        missing = sorted(set(range(size)) - hosts.keys())
        if missing:
            raise _late(missing, limit_s)
        self._hosts = [hosts[rank] for rank in range(size)]
        self._gather: Any = Gather(PrefixStore(self._key, store), rank, size)
        self._liveness.start()
        if parent_process() is not None:  # of multiprocessing, which ends a forked process without the functions of atexit
            util.Finalize(None, self.end, exitpriority=-1000)

    def _meet(self, store: Any, host: str, limit_s: float) -> tuple[str, dict[int, str]]:
        """[2] Returns the key of this world, and the hosts of the ranks that have come."""
        own, deadline, address = " ".join(processes.network()), time.monotonic() + limit_s, ("the store", 0)
        if self.rank == 0:
            key, listener = secrets.token_hex(16), socket.create_server(("", 0), backlog=self.size)
            store.set(PLACE, json.dumps((key, listener.getsockname()[1], socket.gethostname(), own)))
            return key, self._liveness.accept(listener, key, own, self.size, limit_s)
        while (remaining_s := deadline - time.monotonic()) > 0:
            try:
                store.wait([PLACE], timedelta(seconds=remaining_s))
                key, port, name, network = json.loads(store.get(PLACE))
                address = "127.0.0.1" if network == own else host or name, port
                return key, self._liveness.connect(address, key, own, remaining_s + AFTER_LIMIT_S)
            except (OSError, ValueError, RuntimeError) as error:  # of an earlier start of this job; RuntimeError: of the store
                reason = f"{address[0]}: {error}"
                time.sleep(SHORT_LOOK_S)
        raise _late([0], limit_s, f" ({reason})")

    def connect(self, vendor: str) -> None:
        """[3]"""
        if vendor == "Open MPI":
            self._mpi = Placeholder(self.rank, self._hosts, self._gather)
        else:
            self._mpi = Server(self.rank, self._key, self._hosts, self._gather, self.fail)

    def fail(self, why: str, status: int = 1) -> NoReturn:
        self._liveness.say(why)
        self._leave(status)

    def end(self) -> None:
        """[4] A process of multiprocessing calls this before it prints the error that it ends with."""
        library = sys.modules.get("mpicoll._mpi.library")
        if self._over or self._pid != os.getpid() or library is None:  # None: it could not be loaded
            return
        error = sys.exc_info()[1]
        status = error.code if isinstance(error, SystemExit) else error and 1
        if status:
            cause = error.__context__ if isinstance(error, SystemExit) else error  # mp.spawn makes exit status 1 of any error
            self._liveness.say(f"exit status {status}" if cause is None else last_words.of_error(cause)[0])
            atexit.register(self._leave, status if isinstance(status, int) else 1)
            return
        library.end()
        self._over = True
        self._liveness.stop(STOP_S)
        if self._mpi is not None:
            self._mpi.stop()
        self._gather = None  # the last FileStore removes its file

    def _leave(self, status: int) -> NoReturn:
        """Ends a failed process: MPI_Finalize would wait for the others."""
        processes.unlink_mapped()  # MPI may have been about to start
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    def _lost(self, rank: int, why: str) -> None:
        """Ends this process too, as a launcher would; not while it has no group, as a worker of Dask between two of its tasks."""
        if self._over:
            return
        if runtime.process.last_base is not None and runtime.current() is None:
            from mpicoll._mpi import library

            library.dead_processes = True
            return
        if self.rank == (rank == 0):  # the lowest rank that is left
            log.say(f"rank {rank} of {self.size} {why}; the other ranks end, too")
        time.sleep(PARENT_S)
        self._leave(1)

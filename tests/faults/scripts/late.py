"""``late.py CASE [DOOR]``: rank 1 comes late, stops, or never comes, where the ranks make groups. Limits are 1 second."""

import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

CASE, DOOR = [*sys.argv[1:], "mpicoll"][:2]
RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
LIMIT = timedelta(seconds=1)
LATE = RANK == 1

if CASE == "MPI is not started" and LATE:
    time.sleep(100)
if CASE == "stopped inside, under the lock":
    import mpi4py

    mpi4py.rc.thread_level = "serialized"

import torch  # noqa: E402

import mpicoll  # noqa: E402
from mpicoll import rpc  # noqa: E402

api: Any = mpicoll if DOOR == "mpicoll" else torch.distributed


def init_rpc() -> None:
    rpc.init_rpc(f"worker{RANK}", rpc_backend_options=rpc.MPIRpcBackendOptions(rpc_timeout=1))


def split() -> Any:
    return mpicoll.split_group(split_ranks=[list(range(mpicoll.get_world_size()))], timeout=LIMIT)


def attempt(call: Callable[[], Any]) -> None:
    """Prints the error and how long it took. Rank 1 comes when the others have given up."""
    next_one = time.monotonic() + 3
    if LATE:
        time.sleep(2.5)
    began = time.monotonic()
    try:
        call()
    except mpicoll.OperationTimeout as error:
        print(f"rank {RANK} after {time.monotonic() - began:.2f} s: {error}", flush=True)
    else:
        print(f"rank {RANK}: no error", flush=True)
    time.sleep(max(0.0, next_one - time.monotonic()))


if CASE == "all in one job":
    # They start MPI, which all ranks do together, and take a second on a busy machine.
    import mpicoll._c10d.init
    import mpicoll._mpi.mailbox

    doors: tuple[Any, ...] = (mpicoll, torch.distributed)
    for door in doors:
        attempt(lambda door=door: door.init_process_group("mpi", timeout=LIMIT))
    attempt(init_rpc)
    mpicoll.init_process_group(timeout=timedelta(seconds=20))
    for door in doors:
        attempt(lambda door=door: door.new_group(timeout=LIMIT))
    attempt(split)
    for door in doors:
        total = torch.ones(1)
        door.all_reduce(total, group=door.new_group())
        print(f"rank {RANK}: {door.__name__} {total.item():g}", flush=True)
    init_rpc()
    print(f"rank {RANK}: {rpc.rpc_sync(f'worker{1 - RANK}', str.upper, ('done',))}", flush=True)
    rpc.shutdown()
elif CASE == "MPI is not started":
    print(f"began {time.time()}", flush=True)
    api.init_process_group("mpi", timeout=LIMIT)
else:
    api.init_process_group("mpi", timeout=timedelta(seconds=60))
    if CASE == "stopped before":
        if LATE:
            os.kill(os.getpid(), signal.SIGSTOP)
    else:  # stopped inside
        if "lock" in CASE and not LATE:  # the watchdog calls MPI while an operation waits
            under_way = api.all_reduce(torch.ones(1), async_op=True)
        from mpicoll._engine.registry import Registry

        make = Registry._channel

        def stop(*arguments: Any) -> Any:
            os.kill(os.getpid(), signal.SIGSTOP)
            return make(*arguments)

        if LATE:
            Registry._channel = stop  # type: ignore[method-assign]
    print(f"began {time.time()}", flush=True)
    api.new_group(timeout=LIMIT)

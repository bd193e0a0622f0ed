"""python claims.py CASE METHOD API on 2 ranks: processes that a rank starts before it has started MPI, and that join the job.

CASE     two: two children at once; one: a child takes the rank's place; parent: the rank itself joins after its child;
         sequence: a second child, after one that ended without MPI_Finalize
METHOD   multiprocessing's start method
API      mpicoll, torch or rpc: what starts MPI
"""

import importlib
import multiprocessing
import os
import sys
import time
from typing import Any

import torch.multiprocessing


def join(api: str, rank: int | None = None) -> None:
    """Joins the job; as `rank` of 2, as programs under mp.spawn do."""
    if api == "rpc":
        rpc = importlib.import_module("mpicoll.rpc")
        rpc.init_rpc(f"worker{os.environ['RANK']}")
        print("joined: 2 ranks", flush=True)
        return
    dist: Any = importlib.import_module("mpicoll" if api == "mpicoll" else "torch.distributed")
    arguments = {} if rank is None else {"rank": rank, "world_size": 2}
    dist.init_process_group("mpi", **arguments)
    dist.all_reduce(ones := torch.ones(1))
    print(f"joined: {ones.item():.0f} ranks", flush=True)


def end(api: str) -> None:
    """multiprocessing ends a forked child without Python's own exit."""
    from mpi4py import MPI

    importlib.import_module("mpicoll.rpc" if api == "rpc" else "torch.distributed").__dict__[
        "shutdown" if api == "rpc" else "destroy_process_group"
    ]()
    MPI.Finalize()


def two(rank: int, api: str) -> None:
    join(api, rank)
    time.sleep(1)


def one(api: str, joined: Any, then: str) -> None:
    join(api)
    joined.set()
    if then == "stays":
        time.sleep(100)
    elif then == "finalises":
        end(api)
    else:
        os._exit(0)


def main(case: str, method: str, api: str) -> None:
    if case == "two":
        torch.multiprocessing.start_processes(two, (api,), nprocs=2, start_method=method)
        return
    context: Any = multiprocessing.get_context(method)
    for i in range(2 if case == "sequence" else 1):
        joined = context.Event()
        then = {"parent": "stays", "sequence": "ends"}.get(case, "finalises")
        child = context.Process(target=one, args=(api, joined, then), daemon=True)
        child.start()
        if case != "parent":
            child.join()
            print(f"child {i}: {child.exitcode}", flush=True)
            if child.exitcode:
                sys.exit(child.exitcode)
        else:
            joined.wait()
            join(api)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A worker that goes while another waits for its answer: leaving.py HOW. Rank 1 goes, rank 0 says what it learns.

Other ranks are at their shutdown meanwhile, and are called afterwards.
"""

import os
import signal
import sys
import threading
import time

import mpicoll
from mpicoll import rpc


def go(how: str) -> None:
    """Called on the worker: its program ends a moment later, while this call is under way."""
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Timer(0.3, _gone.set).start()
    time.sleep(30)


_gone = threading.Event()


def ask_back() -> str:
    return str(rpc.rpc_sync("teacher", str, ("and back",)))


def main() -> None:
    how, rank = sys.argv[1], int(os.environ["RANK"])
    rpc.init_rpc("teacher" if rank == 0 else "pupil" if rank == 1 else f"other{rank}")
    if rank > 1:
        rpc.shutdown()
        print(f"other{rank}: through its shutdown")
        return
    if rank == 1:
        _gone.wait(20)
        if how == "raises":
            raise LookupError("the pupil is lost")
        sys.exit(0)
    try:
        rpc.rpc_sync("pupil", go, (how,))
    except mpicoll.WorkerLeft as error:
        print("learned:", error)
    try:
        rpc.rpc_sync("pupil", time.time)
    except mpicoll.WorkerLeft as error:
        print("afterwards:", error)
    time.sleep(0.3)
    for name in [f"other{rank}" for rank in range(2, int(os.environ["WORLD_SIZE"]))]:
        print(f"there {rpc.rpc_sync(name, ask_back)}: {name}", flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    main()

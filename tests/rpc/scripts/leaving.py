"""A worker that goes while another waits for its answer: leaving.py HOW. Ranks above 0 go, rank 0 says what it learns."""

from __future__ import annotations

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


def main() -> None:
    how = sys.argv[1]
    rpc.init_rpc("teacher" if int(os.environ["RANK"]) == 0 else "pupil")
    if rpc.get_worker_info().name == "pupil":
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
    rpc.shutdown()


if __name__ == "__main__":
    main()

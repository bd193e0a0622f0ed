"""Rank 0 waits for worker "slow" in all the ways there are, and says what it learns: waiting.py busy | stopped."""

import os
import signal
import sys
import time
from collections.abc import Callable

from mpicoll import rpc

TIMEOUT_S = 0.5


class Slow:
    def nap(self) -> None:
        time.sleep(1.2)


def nap() -> None:
    time.sleep(1.2)


def main() -> None:
    how, rank = sys.argv[1], int(os.environ["RANK"])
    rpc.init_rpc("caller" if rank == 0 else "slow")
    if rank == 0:
        other = rpc.rpc_sync("slow", os.getpid)
        rref = rpc.remote("slow", Slow)
        rref.to_here()
        if how == "stopped":
            os.kill(other, signal.SIGSTOP)
        learn("rpc_sync", lambda: rpc.rpc_sync("slow", nap, timeout=TIMEOUT_S))
        learn("rpc_async", lambda: rpc.rpc_async("slow", nap, timeout=TIMEOUT_S).wait())
        learn("remote", lambda: rpc.remote("slow", nap).to_here(timeout=TIMEOUT_S))
        learn("creation", lambda: rpc.remote("slow", nap, timeout=TIMEOUT_S)._get_future().wait())
        learn("method", lambda: rref.rpc_sync(timeout=TIMEOUT_S).nap())
        learn("remote method", lambda: rref.remote(timeout=TIMEOUT_S).nap()._get_future().wait())
        if how == "stopped":
            learn("shutdown", lambda: rpc.shutdown(timeout=TIMEOUT_S))
            os.kill(other, signal.SIGCONT)
            return
    rpc.shutdown()


def learn(name: str, call: Callable[[], object]) -> None:
    try:
        call()
    except RuntimeError as error:
        print(f"{name}: {type(error).__name__}: {error}", flush=True)


if __name__ == "__main__":
    main()

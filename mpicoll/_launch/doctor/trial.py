"""A trial for ``python -m mpicoll.doctor --run``: all_reduce on two ranks, checked and timed. `COMMAND` starts it alone.

`trial_on_hosts` starts the same program on several hosts.
"""

from __future__ import annotations

import json
import socket
import statistics
import sys
import time
from collections.abc import Mapping
from typing import Any

from mpicoll._base import config
from mpicoll._base.launcher import without_job
from mpicoll._base.probe import MARK
from mpicoll._launch.doctor.report import Finding
from mpicoll._launch.find.ask import ask

RANKS = 2
SIZES = {8: 200, 16 << 20: 5}  # bytes: number of calls
COMMAND = ("-m", "mpicoll.run", "--quiet", "-n", str(RANKS), "-m", "mpicoll._launch.doctor.trial")


def main() -> int:
    """The program of each rank; rank 0 prints the result."""
    import torch

    import mpicoll as dist

    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    wrong = 0
    median_s: dict[int, float] = {}
    for nbytes, times in SIZES.items():
        tensor = torch.empty(nbytes // 4)
        seconds = []
        for i in range(times + 1):  # the first call makes connections and is not counted
            tensor.fill_(rank + i)
            dist.barrier()
            begin = time.perf_counter()
            dist.all_reduce(tensor)
            seconds.append(time.perf_counter() - begin)
            wrong += int((tensor != sum(range(size)) + size * i).sum())
        median_s[nbytes] = statistics.median(seconds[1:])
    counts = torch.tensor([wrong])
    dist.all_reduce(counts)
    hosts: list[str | None] = [None] * size
    dist.all_gather_object(hosts, socket.gethostname())
    if rank == 0:
        print(MARK + json.dumps({"ranks": size, "wrong": int(counts), "median_s": median_s, "ran_on": hosts}), flush=True)
    dist.destroy_process_group()
    return 0


def run(environ: Mapping[str, str]) -> dict[str, Any]:
    """The result of the trial, or the entry "error"; takes some seconds."""
    result = ask([sys.executable, *COMMAND], without_job(environ), 2 * config.get("MPICOLL_PROBE_TIMEOUT", environ))
    return {"error": result["error"]} if "error" in result else result


def check(result: Mapping[str, Any]) -> Finding:
    remedy = f"python {' '.join(COMMAND)} shows everything"
    if "error" in result:
        return Finding("fail", "trial", f"{RANKS} ranks on this host did not do an all_reduce: {result['error']}", remedy=remedy)
    if result["ranks"] != RANKS or result["wrong"]:
        text = f"all_reduce of {result['ranks']} ranks gave {result['wrong']} wrong numbers; {RANKS} ranks were started"
        return Finding("fail", "trial", text, remedy=remedy)
    return Finding("ok", "trial", f"{RANKS} ranks on this host: all_reduce is right; {times(result['median_s'])}")


def times(median_s: Mapping[str, float]) -> str:
    return ", ".join(f"{_size(int(nbytes))} in {_time(seconds)}" for nbytes, seconds in median_s.items()) + " (median)"


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes} bytes"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


if __name__ == "__main__":
    sys.exit(main())

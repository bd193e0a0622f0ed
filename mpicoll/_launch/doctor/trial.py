"""The trials of the doctor: all_reduce, checked and timed. This file is also the program of their ranks.

run, check                --run: on two ranks here; `COMMAND` starts it alone
run_on_hosts, check_hosts --run --hostfile FILE: on one rank on each host of the file. If it fails, a rank is started on each
                          host alone, to name the hosts that cannot be reached
"""

from __future__ import annotations

import json
import socket
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mpicoll._base import config
from mpicoll._base.probe import MARK
from mpicoll._launch.doctor.report import Finding, size_in_words
from mpicoll._launch.find import hostfile
from mpicoll._launch.find.ask import ask

RANKS = 2
SIZES = {8: 200, 16 << 20: 5}  # bytes: number of calls
HOSTS = "trial on hosts"
AT_ONCE = 8  # hosts that are tried alone at the same time
LINES = 20  # of a job on hosts that failed; the one of ssh is among them
MOST_NAMED, MOST_SHOWN = 4, 6  # hosts in a sentence, lines of evidence


def command(*ranks: str) -> tuple[str, ...]:
    """The words after ``python`` that start the trial. ranks: options of mpicoll.run, how many and where."""
    return ("-m", "mpicoll.run", "--quiet", *ranks, "-m", "mpicoll._launch.doctor.trial")


COMMAND = command("-n", str(RANKS))


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


def run(environ: Mapping[str, str], words: Sequence[str] | None = None, lines: int = 1) -> dict[str, Any]:
    """The result of the trial that ``words`` start (None: `COMMAND`), or the entry "error"; takes some seconds."""
    limit_s = 2 * config.get("MPICOLL_PROBE_TIMEOUT", environ)
    result = ask([sys.executable, *(words or COMMAND)], environ, limit_s, lines=lines)
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
    return ", ".join(f"{size_in_words(int(nbytes))} in {_time(seconds)}" for nbytes, seconds in median_s.items()) + " (median)"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


# --- on the hosts of a file -------------------------------------------------------------------------------------------


def on_hosts(option: str, value: str) -> tuple[str, ...]:
    """`command`, on one rank for each host."""
    return command(option, value, "--nproc-per-node", "1")


def run_on_hosts(path: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """The result of the trial on the hosts of the file at ``path``, and "hosts", their names. Takes some seconds.

    In case of a failure it has the entries "error" and "alone", the error of each host on which not even one rank starts.

    Raises:
        ValueError, OSError: The file cannot be read.
    """
    hosts = [host.name for host in hostfile.read(path)]
    result = {"hosts": hosts, **run(environ, on_hosts("--hostfile", path), LINES)}
    if "error" in result:
        with ThreadPoolExecutor(AT_ONCE) as threads:
            results = threads.map(lambda host: run(environ, on_hosts("--host", host), LINES), hosts)
            result["alone"] = {host: said["error"] for host, said in zip(hosts, results, strict=True) if "error" in said}
    return result


def check_hosts(path: str, result: Mapping[str, Any]) -> Finding:
    hosts: list[str] = result["hosts"]
    everything = f"python {' '.join(on_hosts('--hostfile', path))} shows everything"
    if "error" in result:
        alone: dict[str, str] = result["alone"]
        if not alone:
            text = f"each of the {len(hosts)} hosts of {path} starts a rank alone, but they do no all_reduce together"
            remedy = f"hosts must reach each other by TCP on all ports, and know each other's names; {everything}"
            return Finding("fail", HOSTS, text, tuple(result["error"].splitlines()[-MOST_SHOWN:]), remedy)
        text = f"{len(alone)} of the {len(hosts)} hosts of {path} start{'s' * (len(alone) == 1)} no rank: {named(alone)}"
        evidence = tuple(f"{host}: {said(error)}" for host, error in alone.items())
        remedy = (
            f"`ssh {next(iter(alone))} true` must work without a password, and Python be at the same path there; {everything}"
        )
        return Finding("fail", HOSTS, text, evidence, remedy)
    started: list[str] = result["ran_on"]
    if result["wrong"]:
        text = f"all_reduce between {named(started)} gave {result['wrong']} wrong numbers"
        return Finding("fail", HOSTS, text, remedy=everything)
    if len(set(started)) < len(hosts):
        text = f"{path} names {len(hosts)} hosts, but the ranks ran on {named(dict.fromkeys(started))}"
        return Finding("fail", HOSTS, text, remedy=f"every host needs a host name of its own; {everything}")
    ranks = f"one rank on each of {len(hosts)} hosts ({named(started)})" if len(hosts) > 1 else f"one rank on {started[0]}"
    return Finding("ok", HOSTS, f"{ranks}: all_reduce is right; {times(result['median_s'])}")


def said(error: str) -> str:
    """The line of ssh, which says why, or the last line."""
    lines = error.splitlines()
    return next((line for line in lines if line.startswith("ssh: ")), lines[-1])


def named(hosts: Mapping[str, Any] | Sequence[str]) -> str:
    names = list(hosts)
    return ", ".join(names[:MOST_NAMED]) + ", ..." * (len(names) > MOST_NAMED)


if __name__ == "__main__":
    sys.exit(main())

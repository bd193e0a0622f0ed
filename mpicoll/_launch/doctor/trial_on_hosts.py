"""A trial for ``python -m mpicoll.doctor --run --hostfile FILE``: all_reduce between one rank on each host of the file.

If it fails, a rank is started on each host alone, to name the hosts that cannot be reached.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mpicoll._base import config
from mpicoll._base.launcher import without_job
from mpicoll._launch.doctor import trial
from mpicoll._launch.doctor.report import Finding
from mpicoll._launch.find import hostfile
from mpicoll._launch.find.ask import ask

TOPIC = "trial on hosts"
AT_ONCE = 8  # hosts that are tried alone at the same time
LINES = 20  # of a job that failed; the one of ssh is among them
MOST_NAMED, MOST_SHOWN = 4, 6  # hosts in a sentence, lines of evidence


def command(option: str, value: str) -> list[str]:
    """The words after ``python``: the program of `trial`, on one rank for each host."""
    return ["-m", "mpicoll.run", "--quiet", option, value, "--nproc-per-node", "1", "-m", "mpicoll._launch.doctor.trial"]


def run(path: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """The result of the trial on the hosts of the file at ``path``, and "hosts", their names. Takes some seconds.

    In case of a failure it has the entries "error" and "alone", the error of each host on which not even one rank starts.

    Raises:
        ValueError, OSError: The file cannot be read.
    """
    hosts = [host.name for host in hostfile.read(path)]
    result = {"hosts": hosts, **_ask(command("--hostfile", path), environ)}
    if "error" in result:
        with ThreadPoolExecutor(AT_ONCE) as threads:
            results = threads.map(lambda host: _ask(command("--host", host), environ), hosts)
            result["alone"] = {host: said["error"] for host, said in zip(hosts, results, strict=True) if "error" in said}
    return result


def _ask(words: Sequence[str], environ: Mapping[str, str]) -> dict[str, Any]:
    limit_s = 2 * config.get("MPICOLL_PROBE_TIMEOUT", environ)
    return ask([sys.executable, *words], without_job(environ), limit_s, lines=LINES)


def check(path: str, result: Mapping[str, Any]) -> Finding:
    hosts: list[str] = result["hosts"]
    everything = f"python {' '.join(command('--hostfile', path))} shows everything"
    if "error" in result:
        alone: dict[str, str] = result["alone"]
        if not alone:
            text = f"each of the {len(hosts)} hosts of {path} starts a rank alone, but they do no all_reduce together"
            remedy = f"hosts must reach each other by TCP on all ports, and know each other's names; {everything}"
            return Finding("fail", TOPIC, text, tuple(result["error"].splitlines()[-MOST_SHOWN:]), remedy)
        text = f"{len(alone)} of the {len(hosts)} hosts of {path} start{'s' * (len(alone) == 1)} no rank: {named(alone)}"
        evidence = tuple(f"{host}: {said(error)}" for host, error in alone.items())
        remedy = (
            f"`ssh {next(iter(alone))} true` must work without a password, and Python be at the same path there; {everything}"
        )
        return Finding("fail", TOPIC, text, evidence, remedy)
    started: list[str] = result["ran_on"]
    if result["wrong"]:
        text = f"all_reduce between {named(started)} gave {result['wrong']} wrong numbers"
        return Finding("fail", TOPIC, text, remedy=everything)
    if len(set(started)) < len(hosts):
        text = f"{path} names {len(hosts)} hosts, but the ranks ran on {named(dict.fromkeys(started))}"
        return Finding("fail", TOPIC, text, remedy=f"every host needs a host name of its own; {everything}")
    ranks = f"one rank on each of {len(hosts)} hosts ({named(started)})" if len(hosts) > 1 else f"one rank on {started[0]}"
    return Finding("ok", TOPIC, f"{ranks}: all_reduce is right; {trial.times(result['median_s'])}")


def said(error: str) -> str:
    """The line of ssh, which says why, or the last line."""
    lines = error.splitlines()
    return next((line for line in lines if line.startswith("ssh: ")), lines[-1])


def named(hosts: Mapping[str, Any] | Sequence[str]) -> str:
    names = list(hosts)
    return ", ".join(names[:MOST_NAMED]) + ", ..." * (len(names) > MOST_NAMED)

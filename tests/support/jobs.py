"""Jobs of two ranks by several launchers, and the lines of JSON that their ranks print. For tests marked ``launch``."""

import functools
import json
import subprocess
import sys
from typing import Any

import pytest

from tests.support import LAUNCH_ENVIRONMENT, mpiexec, run

# A thread of Gloo may still hold a tensor when Python ends, and then now and then aborts, with or without mpicoll
# (https://github.com/pytorch/pytorch/issues/190489). What the ranks have reported before counts.
ABORT = "terminate called without an active exception"
OVER_MPI = ("mpirun", "mpicoll.run")


def command(by: str, program: str, *arguments: str, ranks: int = 2) -> list[str]:
    """The command that starts ``program`` by one of ``OVER_MPI``, or by torchrun."""
    python = {
        "mpirun": [mpiexec(), "-n", str(ranks), sys.executable],
        "mpicoll.run": [sys.executable, "-m", "mpicoll.run", "-n", str(ranks)],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)],
    }[by]
    return [*python, program, *arguments]


def attempt(line: list[str], timeout_s: float, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs the job. Its status is 0 if only a thread of Gloo has aborted it."""
    done = run(line, timeout_s, env={**LAUNCH_ENVIRONMENT, "GLOO_SOCKET_IFNAME": "lo", **env})
    if ABORT in done.stderr and mpiexec() not in line and "mpicoll.run" not in line:
        done.returncode = 0
    return done


def reports(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """The lines of JSON that the ranks of a job have printed, by rank.

    Unbuffered, print writes a line and its end apart, and under MPICH's mpirun a line of another rank may come between.
    """
    said = f"{done.args}\nstatus {done.returncode}\nstdout:\n{done.stdout}\nstderr:\n{done.stderr}"
    assert done.returncode == 0, said
    texts = [line[line.index('{"') :] for line in done.stdout.splitlines() if '{"' in line]
    lines = [json.JSONDecoder().raw_decode(text)[0] for text in texts]
    assert lines, said
    return sorted(lines, key=lambda line: line["rank"])


@functools.cache
def trained(
    by: str, program: str, *arguments: str, timeout_s: float, env: tuple[tuple[str, str], ...] = ()
) -> list[dict[str, Any]]:
    """What the ranks of a training job report. A job that several tests compare with runs once."""
    return reports(attempt(command(by, program, *arguments), timeout_s, **dict(env)))


def same_training(found: list[dict[str, Any]], expected: list[dict[str, Any]], backend: str, rel: float = 1e-5) -> None:
    """Checks a job against another: every number that its ranks report, its backend, and that it learned something."""
    assert [report["rank"] for report in found] == [report["rank"] for report in expected] == [0, 1], found
    losses = found[0]["losses"]
    assert losses[-1] < losses[0], losses
    assert found[0]["weights"] == pytest.approx(found[1]["weights"], rel=rel), "the ranks have different weights"
    for report, other in zip(found, expected, strict=True):
        assert report["backend"] == backend, report
        assert report.keys() == other.keys(), (report, other)
        for name in report.keys() - {"backend"}:
            assert report[name] == pytest.approx(other[name], rel=rel), (name, report, other)

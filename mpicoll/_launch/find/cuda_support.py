"""Whether this MPI accepts GPU memory. A wrong yes is a segmentation fault, so the answer rests on evidence.

    claims   answers of the library, and whether a CUDA driver is here
    prove    if the library claims support, or has no function that says so (Intel MPI): a job of its own
             (_launch/find/probe_cuda.py) in which two ranks send GPU memory
    decide   both, and MPICOLL_CUDA_AWARE, which has the last word

Imports neither torch nor MPI, because the doctor uses it too.
"""

from __future__ import annotations

import ctypes
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpicoll._base import config
from mpicoll._base.inherited import without_job
from mpicoll._launch.find.ask import Ended, run
from mpicoll._launch.find.probe_cuda import BEGUN, PASSED, WRONG

PROBE = Path(__file__).parent / "probe_cuda.py"
LAST = "all_gather of uneven sizes"  # of the trials of probe_cuda.py


@dataclass(frozen=True)
class Verdict:
    """Whether MPI takes GPU memory: in messages, and in collectives that do not reduce. evidence: sentences."""

    moves: bool
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True)
class Proof:
    """The trials that passed, by name, and why the next one did not."""

    passed: tuple[str, ...] = ()
    failed: str = ""

    @property
    def moves(self) -> bool:
        return self.passed[-1:] == (LAST,)

    def __str__(self) -> str:
        words = f"two ranks sent GPU memory here: {', '.join(self.passed)}" if self.passed else "no trial passed"
        return f"{words}; {self.failed}" if self.failed else words


def driver_loads() -> bool:
    """Whether the library of the CUDA driver can be loaded (which touches no GPU)."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def decide(started: Mapping[str, Any], environ: Mapping[str, str], driver: bool) -> Verdict:
    """The verdict with its evidence; calls `prove` if the library claims support and the user has not decided.

    Args:
        started: Report of a started MPI, with its cuda_query.
        driver: `driver_loads`.
    """
    claim = claims(started, driver)
    override = config.get("MPICOLL_CUDA_AWARE", environ)
    if override is not None:
        return Verdict(bool(override), (f"MPICOLL_CUDA_AWARE={int(override)} decides", *claim.evidence))
    if not claim.moves:
        return claim
    proof = prove(environ)
    return Verdict(proof.moves, (*claim.evidence, str(proof)))


# -- the claim of a library --------------------------------------------------------------------------------------------


def claims(started: Mapping[str, Any], driver: bool) -> Verdict:
    """What the library says of itself. It is never enough: Open MPI 4 always answers 1, and settings of the user count, too."""
    answers: Mapping[str, int] = started.get("cuda_query") or {}
    evidence = [f"{name}() answers {answer}" for name, answer in answers.items()] or ["this MPI has no function that says it"]
    evidence.append(
        "the CUDA driver's library (libcuda.so.1) loads" if driver else "no CUDA driver here (libcuda.so.1 does not load)"
    )
    return Verdict(driver and (not answers or max(answers.values()) > 0), tuple(evidence))


# -- the trial ---------------------------------------------------------------------------------------------------------


def prove(environ: Mapping[str, str], program: Path = PROBE) -> Proof:
    """Runs ``program`` as a new job of two ranks on this host, for at most MPICOLL_PROBE_TIMEOUT; takes a few seconds."""
    limit = config.get("MPICOLL_PROBE_TIMEOUT", environ)
    command = [sys.executable, "-m", "mpicoll.run", "--quiet", "-n", "2", str(program)]
    fresh = {name: value for name, value in without_job(environ).items() if not name.startswith("SLURM_")}  # on this host
    try:
        ended = run(command, fresh, limit)
    except OSError as error:
        return Proof(failed=f"the trial could not be started: {error}")
    return read(ended, limit)


def read(trial: Ended, limit_s: float) -> Proof:
    lines, status = trial.output.splitlines(), trial.status
    passed = tuple(line.removeprefix(PASSED) for line in lines if line.startswith(PASSED))
    wrong = [line.removeprefix(WRONG) for line in lines if line.startswith(WRONG)]
    if wrong:
        return Proof(passed, f"what arrived was wrong: {', '.join(wrong)}")
    if status == 0:
        return Proof(passed)
    begun = [line.removeprefix(BEGUN) for line in lines if line.startswith(BEGUN)]
    where = begun[-1] if begun else "its start"
    if status is None:
        return Proof(passed, f"the trial had not ended after {limit_s:g} s, in {where} (MPICOLL_PROBE_TIMEOUT)")
    last = [line for line in trial.errors.splitlines() if "Error: " in line][-1:] or trial.errors.strip().splitlines()[-1:]
    crash = " (a segmentation fault)" if status in (139, -signal.SIGSEGV) else ""
    return Proof(passed, f"the trial ended with status {status}{crash} in {where}{': ' + last[0] if last and not begun else ''}")

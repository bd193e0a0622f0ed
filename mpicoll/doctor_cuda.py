"""The doctor's look at torch and at GPUs: which torch, which GPU, and whether MPI may be handed GPU memory. Imports no
torch itself.

A wrong "yes" is a crash, so `aware` says yes only where the library was built for it, says so when it is started, and a
GPU driver is there. The query alone (MPIX_Query_cuda_support) is not trusted: Open MPI 4 answers 1 whatever is there.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mpicoll.config as config
from mpicoll.launch_mpi import Mpi
from mpicoll.launchers import without_job

MARK = "MPICOLL_TORCH "
TORCH_CODE = f"""
import json, torch, importlib.metadata
import torch.distributed
found = dict(version=torch.__version__, cuda=torch.version.cuda, hip=torch.version.hip, threads=torch.get_num_threads())
c10d = getattr(torch._C, "_distributed_c10d", None)
found["built_with_mpi"] = hasattr(c10d, "ProcessGroupMPI")
found["entry_point"] = any(point.name == "mpicoll" for point in importlib.metadata.entry_points(group="torch.backends"))
available = torch.accelerator.is_available()
found["accelerator"] = str(torch.accelerator.current_accelerator()) if available else None
found["accelerators"] = torch.accelerator.device_count() if available else 0
print({MARK!r} + json.dumps(found))
"""

# Variables by which an MPI is told to expect GPU memory; each vendor's own
SWITCHES = ("MPICH_GPU_SUPPORT_ENABLED", "MPIR_CVAR_ENABLE_GPU", "MV2_USE_CUDA", "MVP_USE_CUDA", "I_MPI_OFFLOAD")


@dataclass(frozen=True)
class Finding:
    """One sentence of the report. state: "ok", "note" (works, but look) or "fail" (something will not work; ``remedy``
    or ``text`` says what to do).
    """

    state: str
    topic: str
    text: str
    evidence: tuple[str, ...] = ()
    remedy: str = ""


def torch_facts(environ: Mapping[str, str]) -> dict[str, Any]:
    """What torch says about itself, asked in a process of its own: version, cuda, hip, threads, built_with_mpi,
    accelerator(s); or "error".
    """
    limit = config.get("MPICOLL_PROBE_TIMEOUT")
    # mpicoll.run's choice of threads is dropped for a new job, but this is a look at the present one
    threads = {name: environ[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name in environ}
    try:
        done = subprocess.run(
            [sys.executable, "-c", TORCH_CODE],
            env={**without_job(environ), **threads},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {limit:g} s (MPICOLL_PROBE_TIMEOUT)"}
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(MARK):
            found: dict[str, Any] = json.loads(line[len(MARK) :])
            return found
    words = done.stderr.strip().splitlines()
    return {"error": words[-1] if words else f"python ended with status {done.returncode}"}


def check(torch: Mapping[str, Any], started: Mapping[str, Any], mpi: Mpi | None, environ: Mapping[str, str]) -> list[Finding]:
    """GPUs, and whether this MPI could take their memory; mpicoll copies it through host memory in either case."""
    findings = [_gpus(torch)]
    if mpi is None:
        return findings
    answer, evidence = aware(mpi, started, environ, driver_loads())
    text = (
        "this MPI takes GPU memory; mpicoll does not use that yet: tensors on a GPU travel through host memory"
        if answer
        else "no evidence that MPI takes GPU memory: tensors on a GPU travel through host memory"
    )
    findings.append(Finding("ok", "CUDA-aware MPI", text, evidence))
    return findings


def _gpus(torch: Mapping[str, Any]) -> Finding:
    if "error" in torch:
        return Finding("note", "GPU", "unknown, as torch cannot be imported")
    built = (
        f"torch is built for CUDA {torch['cuda']}"
        if torch["cuda"]
        else f"torch is built for ROCm {torch['hip']}"
        if torch["hip"]
        else "torch is a CPU build"
    )
    if torch["accelerators"]:
        return Finding("ok", "GPU", f"{torch['accelerators']} x {torch['accelerator']}; {built}")
    if torch["cuda"] and _gpu_files():
        return Finding(
            "note",
            "GPU",
            f"{built} and a GPU is here ({_gpu_files()[0]}), but torch cannot use it",
            remedy="compare `nvidia-smi` with torch's CUDA version",
        )
    return Finding("ok", "GPU", f"none in use; {built}")


def _gpu_files() -> list[str]:
    return sorted(str(path) for path in Path("/dev").glob("nvidia[0-9]*"))


def driver_loads() -> bool:
    """Whether the CUDA driver's library can be loaded here (which touches no GPU)."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def aware(mpi: Mpi, started: Mapping[str, Any], environ: Mapping[str, str], driver: bool) -> tuple[bool, tuple[str, ...]]:
    """Whether there is positive evidence that ``mpi`` takes GPU memory, and that evidence, one sentence each."""
    evidence = [f"{name}() answers {answer}" for name, answer in dict(started.get("cuda_query") or {}).items()]
    asked = any(answer > 0 for answer in dict(started.get("cuda_query") or {}).values())
    evidence.append(
        "the CUDA driver's library (libcuda.so.1) loads" if driver else "no CUDA driver here (libcuda.so.1 does not load)"
    )
    switched = {name: environ[name] for name in SWITCHES if name in environ}
    evidence += [f"{name}={value}" for name, value in switched.items()]
    if mpi.family == "openmpi":
        built, words = _openmpi_build(mpi, environ)
        evidence.append(words)
        answer = built and asked and driver
    else:
        answer = driver and asked and any(value not in ("0", "") for value in switched.values())
    override = config.get("MPICOLL_CUDA_AWARE", environ)
    if override is not None:
        return bool(override), (f"MPICOLL_CUDA_AWARE={int(override)} decides", *evidence)
    return answer, tuple(evidence)


def _openmpi_build(mpi: Mpi, environ: Mapping[str, str]) -> tuple[bool, str]:
    """What ompi_info, which reads the library's configuration, says about CUDA."""
    ompi_info = _beside(mpi, "ompi_info")
    if ompi_info is None:
        return False, "no ompi_info beside the library to tell how it was built"
    own = {} if "OPAL_PREFIX" in environ else {"OPAL_PREFIX": str(ompi_info.parent.parent)}
    try:
        done = subprocess.run(
            [str(ompi_info), "--parsable", "--all"],
            env={**without_job(environ), **own},
            capture_output=True,
            text=True,
            errors="replace",
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False, f"{ompi_info} does not run"
    lines = [line for line in done.stdout.splitlines() if "built_with_cuda_support:value:" in line]
    if not lines:
        return False, f"{ompi_info} says nothing about CUDA"
    return any(line.endswith(":true") for line in lines), f"{ompi_info.name}: {lines[0]}"


def _beside(mpi: Mpi, program: str) -> Path | None:
    for parent in Path(mpi.library_file or "/nowhere/lib/libmpi.so").parents[1:4]:
        if os.access(parent / "bin" / program, os.X_OK):
            return parent / "bin" / program
    return None

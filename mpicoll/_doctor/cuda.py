"""The doctor's look at torch and at GPUs: which torch, which GPU, and whether MPI may be handed GPU memory, as
`mpicoll._launch.cuda_support` finds. Imports no torch itself.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpicoll import _config
from mpicoll._launch import cuda_support
from mpicoll._launch.detect import without_job

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
    limit = _config.get("MPICOLL_PROBE_TIMEOUT")
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


def check(torch: Mapping[str, Any], verdict: cuda_support.Verdict | None, environ: Mapping[str, str]) -> list[Finding]:
    """GPUs, and by which way their memory would travel. verdict: of the MPI; None: there is none."""
    findings = [_gpus(torch)]
    if verdict is None:
        return findings
    near = ", or, between ranks of one node, from GPU to GPU (CUDA IPC)" if _config.get("MPICOLL_CUDA_IPC", environ) else ""
    text = (
        "this MPI takes GPU memory: tensors on a GPU are handed to it, if that holds on every rank"
        if verdict.moves
        else f"no evidence that MPI takes GPU memory: tensors on a GPU travel through pinned host memory{near}"
    )
    return [*findings, Finding("ok", "CUDA-aware MPI", text, verdict.evidence)]


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

"""The doctor's checks of GPUs: which ones torch sees, and whether MPI accepts GPU memory. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpicoll._base import config
from mpicoll._launch.doctor.report import Finding
from mpicoll._launch.find import cuda_support


def check(torch: Mapping[str, Any], verdict: cuda_support.Verdict | None, environ: Mapping[str, str]) -> list[Finding]:
    """The GPUs, and the path that GPU tensors would take. verdict: of the MPI; None: there is no MPI."""
    findings = [_gpus(torch)]
    if verdict is None:
        return findings
    near = ", or, between ranks of one node, from GPU to GPU (CUDA IPC)" if config.get("MPICOLL_CUDA_IPC", environ) else ""
    text = (
        "this MPI takes GPU memory: it gets tensors on a GPU directly, if that holds on every rank"
        if verdict.moves
        else f"no evidence that MPI takes GPU memory: tensors on a GPU travel through pinned host memory{near}"
    )
    return [*findings, Finding("ok", "CUDA-aware MPI", text, verdict.evidence)]


def _gpus(torch: Mapping[str, Any]) -> Finding:
    if "error" in torch:
        return Finding("note", "GPU", "unknown, as torch cannot be imported")
    kinds = [f"built for {name} {torch[key]}" for name, key in (("CUDA", "cuda"), ("ROCm", "hip")) if torch[key]]
    built = f"torch is {(*kinds, 'a CPU build')[0]}"
    if torch["accelerators"]:
        return Finding("ok", "GPU", f"{torch['accelerators']} x {torch['accelerator']}; {built}")
    files = sorted(str(path) for path in Path("/dev").glob("nvidia[0-9]*"))
    if torch["cuda"] and files:
        text = f"{built} and a GPU is here ({files[0]}), but torch cannot use it"
        return Finding("note", "GPU", text, remedy="compare `nvidia-smi` with torch's CUDA version")
    return Finding("ok", "GPU", f"none in use; {built}")

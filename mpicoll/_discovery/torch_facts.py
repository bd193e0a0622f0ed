"""What torch says about itself, asked in a process of its own: mpicoll.run and the doctor import no torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from mpicoll import _config
from mpicoll._discovery.detect import without_job

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

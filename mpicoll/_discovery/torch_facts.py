"""Facts about the installed torch, asked in a process of its own: mpicoll.run and the doctor import no torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from mpicoll import _config
from mpicoll._discovery.ask import ask
from mpicoll._discovery.detect import without_job
from mpicoll._discovery.probe import MARK

TORCH_CODE = f"""
import json, torch, importlib.metadata
import torch.distributed
facts = dict(version=torch.__version__, cuda=torch.version.cuda, hip=torch.version.hip, threads=torch.get_num_threads())
c10d = getattr(torch._C, "_distributed_c10d", None)
facts["built_with_mpi"] = hasattr(c10d, "ProcessGroupMPI")
facts["entry_point"] = any(point.name == "mpicoll" for point in importlib.metadata.entry_points(group="torch.backends"))
available = torch.accelerator.is_available()
facts["accelerator"] = str(torch.accelerator.current_accelerator()) if available else None
facts["accelerators"] = torch.accelerator.device_count() if available else 0
print({MARK!r} + json.dumps(facts))
"""


def torch_facts(environ: Mapping[str, str]) -> dict[str, Any]:
    """version, cuda, hip, threads, built_with_mpi, entry_point, accelerator, accelerators; or "error"."""
    # without_job drops the number of threads that mpicoll.run has chosen; here it is a fact about the present job
    threads = {name: environ[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name in environ}
    limit_s = _config.get("MPICOLL_PROBE_TIMEOUT")
    return ask([sys.executable, "-c", TORCH_CODE], {**without_job(environ), **threads}, limit_s)

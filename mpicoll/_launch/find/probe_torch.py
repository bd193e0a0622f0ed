"""Reports on the installed torch. As a script, run by path, it prints a line as probe.py does. Imports nothing of mpicoll."""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from typing import Any


def facts() -> dict[str, Any]:
    """version, cuda, hip, threads, built_with_mpi, entry_point, accelerator, accelerators."""
    import torch
    import torch.distributed

    available = torch.accelerator.is_available()
    return {
        "version": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "threads": torch.get_num_threads(),
        "built_with_mpi": hasattr(getattr(torch._C, "_distributed_c10d", None), "ProcessGroupMPI"),
        "entry_point": any(point.name == "mpicoll" for point in importlib.metadata.entry_points(group="torch.backends")),
        "accelerator": str(torch.accelerator.current_accelerator()) if available else None,
        "accelerators": torch.accelerator.device_count() if available else 0,
    }


if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder or ".") != here]
    print(sys.argv[1] + json.dumps(facts()))

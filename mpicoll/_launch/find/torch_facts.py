"""Facts about the installed torch, asked in a process of its own: mpicoll.run and the doctor import no torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mpicoll._base import config
from mpicoll._base.launcher import without_job
from mpicoll._base.probe import MARK
from mpicoll._launch.find.ask import ask

PROBE = Path(__file__).parent / "probe_torch.py"


def torch_facts(environ: Mapping[str, str]) -> dict[str, Any]:
    """What `probe_torch.facts` returns; or "error"."""
    # without_job drops the number of threads that mpicoll.run has chosen; here it is a fact about the present job
    threads = {name: environ[name] for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") if name in environ}
    limit_s = config.get("MPICOLL_PROBE_TIMEOUT")
    return ask([sys.executable, str(PROBE), MARK], {**without_job(environ), **threads}, limit_s)

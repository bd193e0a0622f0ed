"""How an operation is carried out, given addresses, counts and MPI's types; no choice between algorithms is made here.

What is asked for and is not here is torch.distributed.algorithms': ``from mpicoll.algorithms import Join``.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if not name.startswith("__"):
        import torch.distributed.algorithms

        if hasattr(torch.distributed.algorithms, name):
            return getattr(torch.distributed.algorithms, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

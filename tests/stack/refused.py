"""What torch cannot do on the CPU, whatever the backend."""

import re
from collections.abc import Callable
from typing import Any

import torch.distributed as dist


def refused_alike(call: Callable[[Any], Any], error: type[Exception] = Exception) -> str:
    """Calls ``call(group)`` with the MPI world and with a Gloo group of the same ranks; both must raise the same (collective).

    Args:   error: the type that both must raise.
    Returns: the error's first line. Raises: AssertionError: one of them works, or they say different things.
    """
    said = {}
    for backend, group in (("mpi", dist.group.WORLD), ("gloo", dist.new_group(backend="gloo"))):
        try:
            call(group)
        except error as refusal:
            said[backend] = ": ".join([type(refusal).__name__, *str(refusal).strip().splitlines()[:1]])
        else:
            said[backend] = "no error"
    assert "no error" not in said.values(), said
    plain = {re.sub(r"\bmpicoll\b|\bmpi\b|\bgloo\b", "<backend>", text, flags=re.IGNORECASE) for text in said.values()}
    assert len(plain) == 1, said
    return said["mpi"]

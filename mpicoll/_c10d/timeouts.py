"""The timeout of a call of init_process_group or new_group. Imports nothing that starts MPI."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

from torch.distributed.constants import default_pg_timeout

from mpicoll._base import config
from mpicoll._faults import time_limit


def complete(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments with MPICOLL_TIMEOUT as the timeout, if it is set and they have none.

    Raises:
        ValueError: MPICOLL_TIMEOUT has a value that is not allowed.
    """
    seconds = None if arguments.get("timeout") is not None else config.get("MPICOLL_TIMEOUT")
    return dict(arguments) if seconds is None else {**arguments, "timeout": timedelta(seconds=seconds)}


def limit(arguments: Mapping[str, Any]) -> float:
    """The timeout in seconds. One of another type is left to torch, which refuses it."""
    timeout = arguments.get("timeout")
    return (timeout if isinstance(timeout, timedelta) else default_pg_timeout).total_seconds()


def end_job_after(operation: str, arguments: Mapping[str, Any]) -> AbstractContextManager[None]:
    """See `mpicoll._faults.time_limit.end_job_after`."""
    return time_limit.end_job_after(operation, limit(arguments))

"""dump_flight_record, which torch.distributed does not have."""

from __future__ import annotations

import os

from mpicoll._base.errors import MpicollError
from mpicoll._mpi import runtime


def dump_flight_record(folder: str | os.PathLike[str] | None = None) -> str:
    """Writes which collectives and messages this rank has called last, and where its threads are, as JSON (not collective).

    ``mpicoll doctor dump FOLDER`` compares the ranks' files. Each group keeps its last 2000 collectives. torch.distributed has no
    such function.

    Args:
        folder: Receives ``rank-R.json``, which is overwritten. None: MPICOLL_DUMP_DIR, or ``mpicoll-dump`` in the current
            directory.

    Returns:
        The path of the file.

    Raises:
        MpicollError: There is no process group, or this is a forked child.
        OSError: The file cannot be written.

    Example:
        >>> path = dist.dump_flight_record("flight")
        >>> path.endswith(f"rank-{dist.get_rank()}.json")
        True
    """
    if runtime.in_forked_child():
        raise runtime.forked_error()
    if runtime.current() is None:
        raise MpicollError("dump_flight_record: there is no process group; call init_process_group first")
    from mpicoll._faults.flight_recorder import recorder  # it needs MPI, which `from mpicoll import ...` does not start

    return recorder.dump("dump_flight_record", None if folder is None else os.fspath(folder))

"""The full check (MPICOLL_CHECK=1, TORCH_DISTRIBUTED_DEBUG=DETAIL): ranks compare their calls before a collective moves a byte.

    a collective, in the group's order:
    [1] each other rank sends its call to rank 0, and waits for the answer
    [2] rank 0 collects the calls until all have come or the time is up, and compares them
    [3] rank 0 answers: empty, what differs, or who has not come; all ranks then go on, or raise the same error

A rank that refuses its arguments takes part in [1] to [3], so that the others learn of it and do not wait. Costs some 50 us for
each collective, and no time where the check is off: the methods of a checked group are replaced.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch._C._distributed_c10d import DebugLevel, get_debug_level

from mpicoll._base import config
from mpicoll._base.errors import CollectiveMismatch
from mpicoll._base.facts import Facts, difference
from mpicoll._base.torch_errors import OperationTimeout
from mpicoll._base.waits import ANSWER_OF_FIRST_S
from mpicoll._engine.work import Work
from mpicoll._faults.attendance import Nobody
from mpicoll._mpi.backoff import Backoff
from mpicoll._mpi.datatypes import BYTE
from mpicoll._tensors import calls, signatures
from mpicoll._tensors.calls import Call

if TYPE_CHECKING:
    from mpicoll._engine.communicator import Communicator

CALL, ANSWER = 3, 4  # tags on the group's own communicator; monitored_barrier.py has 1 and 2


def wanted() -> bool:
    """True if this rank's environment asks for the check. Raises ValueError: MPICOLL_CHECK has a value that is not allowed."""
    check: bool | None = config.get("MPICOLL_CHECK")
    return get_debug_level() == DebugLevel.DETAIL if check is None else check


def compares() -> bool:
    """True if this rank's environment lets the watchdogs compare calls once a second."""
    return config.get("MPICOLL_CHECK") is not False


def enable(group: Communicator) -> None:
    """Checks every collective of this group from now on (collective)."""
    run = group.run

    def checked(
        operation: str, call: Call, tensors: list[Tensor], async_op: bool = False, reads: Sequence[Tensor] | None = None
    ) -> Work | None:
        limit_s = call[1][0] if operation == "barrier" else group.timeout_s
        kind = next((tensor.device.type for tensor in [*tensors, *(reads or [])]), "cpu")
        own = signatures.facts(operation, call[2])._replace(device=kind)
        return run(operation, (_checked, (group, own, call, limit_s), call[2]), tensors, async_op, reads)

    def refused(operation: str, error: Exception) -> None:
        call = Facts(operation, refusal=f"{type(error).__name__}: {error}")
        run(operation, (_agree, (group, call, group.timeout_s), ()), [])

    group.checked = True
    group.host.messages.checked = True
    if group.devices is not None:
        group.devices.messages.checked = True
    group.attendance.close()  # rank 0 waits for the calls, and raises at the timeout
    group.attendance = Nobody()
    group.run = checked  # type: ignore[method-assign]
    group.refused = refused  # type: ignore[method-assign]


def _checked(group: Communicator, own: Facts, call: Call, limit_s: float) -> None:
    _agree(group, own, limit_s)
    calls.run(call)


def _agree(group: Communicator, call: Facts, limit_s: float) -> None:
    """Compares the ranks' calls (collective).

    Raises:
        CollectiveMismatch: They differ. Raised on every rank, except on one that has refused its call.
        OperationTimeout: A rank did not come. Raised on every rank that came.
    """
    missing, wrong = _collect(group, call, limit_s) if group.rank == 0 else _report(group, call, limit_s + ANSWER_OF_FIRST_S)
    where = group.where(call.operation)
    if missing:
        ranks = ", ".join(str(group.global_ranks[rank]) for rank in missing)
        error = OperationTimeout(f"{where}: Timed out: rank {ranks} did not come within the timeout of {limit_s:g} s")
        group.fail(error)
        raise error
    if wrong and not call.refusal:
        raise CollectiveMismatch(f"{where}: the ranks do not call the same collective. {wrong}")


def _collect(group: Communicator, call: Facts, limit_s: float) -> tuple[list[int], str]:
    channel, deadline, backoff = group.channel, time.monotonic() + limit_s, Backoff()
    known, waiting = {0: call}, set(range(1, group.size))
    while waiting and time.monotonic() < deadline:
        for rank in list(waiting):
            if (content := _receive(group, rank, CALL)) is not None:
                known[rank] = content
                waiting.remove(rank)
                backoff.reset()
        backoff.pause()
    missing = sorted(waiting)
    wrong = "" if missing else difference(known)
    content = pickle.dumps((missing, wrong))
    with channel.lock:
        sent = [channel.comm.Isend([content, len(content), BYTE], rank, ANSWER) for rank in known if rank != 0]
    channel.wait_all(sent)
    return missing, wrong


def _report(group: Communicator, call: Facts, limit_s: float) -> tuple[list[int], str]:
    channel, deadline, backoff, content = group.channel, time.monotonic() + limit_s, Backoff(), pickle.dumps(call)
    with channel.lock:
        sent = channel.comm.Isend([content, len(content), BYTE], 0, CALL)
    while (answer := _receive(group, 0, ANSWER)) is None:
        if time.monotonic() > deadline:
            return [0], ""
        backoff.pause()
    channel.wait_all([sent])
    missing, wrong = answer
    return missing, wrong


def _receive(group: Communicator, rank: int, tag: int) -> Any:
    """Returns the object that this rank has sent; None if it has not come."""
    arrived = group.channel.arrived(group.channel.comm, rank, tag)
    if arrived is None:
        return None
    content = bytearray(arrived.nbytes)
    with group.channel.lock:
        request = arrived.message.Irecv([content, arrived.nbytes, BYTE])
    group.channel.wait_all([request])
    return pickle.loads(content)

"""send, recv, isend, irecv, batch_isend_irecv."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as torchs
from torch import Tensor
from torch.distributed import GroupMember, ProcessGroup, distributed_c10d

from mpicoll._api import groups
from mpicoll._c10d import dynamo
from mpicoll._tensors import checks
from mpicoll._tensors.versions import count_write

if TYPE_CHECKING:
    from mpicoll._engine.communicator import Communicator
    from mpicoll._progress.work import Work


def send(
    tensor: Tensor,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    """Sends a tensor to one rank; returns when the tensor may be changed again.

    Args:   tensor: any strides; the receiver sees it in row-major order. dst: global rank, not this one. tag: 0 to the MPI's
                TAG_UB. group_dst: group rank, in the place of dst.
    Raises: ValueError: dst is this rank, or not in the group.
    """
    communicator = groups.of(group, tensor)
    if communicator is None:
        if group is not None and group == GroupMember.NON_GROUP_MEMBER:  # type: ignore[comparison-overlap]
            raise ValueError("send: Invalid process group specified: this rank is not in the group")
        torchs.send(tensor, dst, group, tag, group_dst)
        return
    to = groups.peer(communicator, "send", "dst", dst, group_dst)
    _not_self(communicator, "send", "isend", to)
    communicator.send(tensor, to, tag)


def recv(
    tensor: Tensor,
    src: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """Receives into the front of a tensor; returns the sender's global rank, -1 on a rank outside the group.

    Args:   src: global rank, not this one; None, without group_src: from anybody.
    Raises: TruncationError: the message is longer than the tensor.
    """
    communicator = groups.of(group, tensor)
    if communicator is None:
        return torchs.recv(tensor, src, group, tag, group_src)
    origin = None
    if src is not None or group_src is not None:
        origin = groups.peer(communicator, "recv", "src", src, group_src)
        _not_self(communicator, "recv", "irecv", origin)
    sender = communicator.recv(tensor, origin, tag)
    count_write(tensor)
    return communicator.global_ranks[sender]


def isend(
    tensor: Tensor,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> Work | None:
    """Starts a send, to this rank itself too; the tensor must not change until the Work has completed."""
    communicator = groups.of(group, tensor)
    if communicator is None:
        return torchs.isend(tensor, dst, group, tag, **_given(group_dst=group_dst))  # type: ignore[return-value]
    return communicator.isend(tensor, groups.peer(communicator, "isend", "dst", dst, group_dst), tag)


def irecv(
    tensor: Tensor,
    src: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> Work | None:
    """Starts a receive into the front of a tensor, from this rank itself too; src None, without group_src: from anybody."""
    communicator = groups.of(group, tensor)
    if communicator is None:
        return torchs.irecv(tensor, src, group, tag, **_given(group_src=group_src))  # type: ignore[return-value]
    anybody = src is None and group_src is None
    origin = None if anybody else groups.peer(communicator, "irecv", "src", src, group_src)
    work = communicator.irecv(tensor, origin, tag)
    count_write(tensor)
    return work


def _given(**peer: int | None) -> dict[str, int]:
    """What is not None: torch's isend and irecv under torch.compile take a None for a rank."""
    return {name: rank for name, rank in peer.items() if rank is not None}


def _not_self(communicator: Communicator, operation: str, other: str, rank: int) -> None:
    if checks.group_rank(operation, "dst" if operation == "send" else "src", rank, communicator.size) == communicator.rank:
        raise ValueError(f"{operation}: this rank ({rank}) cannot be its own peer in a blocking call; use {other}")


_TORCHS = {isend: torchs.isend, irecv: torchs.irecv}
_OURS = {torchs.isend: isend, torchs.irecv: irecv}


class P2POp(torchs.P2POp):
    """torch's P2POp, which takes the isend and irecv of either door."""

    def __init__(
        self,
        op: Any,
        tensor: Tensor,
        peer: int | None = None,
        group: ProcessGroup | None = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        super().__init__(_TORCHS.get(op, op), tensor, peer, group, tag, group_peer)

    def __new__(
        cls,
        op: Any,
        tensor: Tensor,
        peer: int | None = None,
        group: ProcessGroup | None = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> P2POp:
        made = super().__new__(cls, _TORCHS.get(op, op), tensor, peer, group, tag, group_peer)
        assert isinstance(made, cls)
        return made


def batch_isend_irecv(p2p_op_list: list[P2POp]) -> list[Work]:
    """Starts all the sends and receives of a list, in any order, and returns their Works in the list's order.

    Args:   p2p_op_list: P2POps of one group.
    Raises: TypeError: not a list of P2POps. ValueError: empty, or of several groups.
    """
    if not isinstance(p2p_op_list, list) or not all(isinstance(op, torchs.P2POp) for op in p2p_op_list):
        raise TypeError("batch_isend_irecv: p2p_op_list must be a list of P2POp")
    if not p2p_op_list:
        raise ValueError("batch_isend_irecv: p2p_op_list is empty")
    if any(op.group is not p2p_op_list[0].group for op in p2p_op_list):
        raise ValueError("batch_isend_irecv: all operations must use the same group")
    if any(groups.of(op.group, op.tensor) is None for op in p2p_op_list):
        return torchs.batch_isend_irecv(p2p_op_list)  # type: ignore[arg-type,return-value]
    works = [_OURS[op.op](op.tensor, group=op.group, tag=op.tag, **{_peer_name(op): op.group_peer}) for op in p2p_op_list]
    return [work for work in works if work is not None]


def _peer_name(op: torchs.P2POp) -> str:
    return "group_dst" if op.op is distributed_c10d.isend else "group_src"


dynamo.skip_frames(__name__)
dynamo.close(batch_isend_irecv)  # torch.compile traces torch's only, and takes a P2POp of ours for an error

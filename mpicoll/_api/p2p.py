"""Messages between two ranks: send, recv, isend, irecv, batch_isend_irecv, recv_object_list.

Messages of one sender, one receiver and one tag arrive in the order in which they were sent. torch's own functions for objects
work on our groups; recv_object_list does what torch documents and refuses: it receives from any rank.
"""

from __future__ import annotations

import io
import pickle
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.distributed import GroupMember, ProcessGroup

from mpicoll._api import groups
from mpicoll._c10d import dynamo
from mpicoll._tensors.buffers import count_write

if TYPE_CHECKING:
    from mpicoll._engine.requests import MessageWork
    from mpicoll._engine.work import Work


def send(
    tensor: Tensor, dst: int | None = None, group: ProcessGroup | None = None, tag: int = 0, group_dst: int | None = None
) -> None:
    """Sends a tensor to one rank, which must call `recv` or `irecv`; returns when the tensor may be changed again.

    Not collective. Unlike torch's, it takes any strides.

    Args:
        tensor: Any dtype, shape and strides; the elements travel in row-major order.
        dst: Global rank, not this one. Give this or ``group_dst``.
        group: None means the default group.
        tag: Only a receive with the same tag gets the message; 0 to the MPI library's TAG_UB - 1040.
        group_dst: Rank within the group.

    Raises:
        ValueError: The destination is this rank or is not in the group, this rank is not in the group, or the tag is too large.
        OperationTimeout: The receiver has not come in time (a small message may leave without it).

    Example:
        >>> rank = dist.get_rank()  # 0 or 1
        >>> tensor = torch.tensor([1.5, 2.5]) if rank == 0 else torch.empty(2)
        >>> if rank == 0:
        ...     dist.send(tensor, dst=1)
        ... else:
        ...     sender = dist.recv(tensor, src=0)
        >>> tensor
        tensor([1.5000, 2.5000])
    """
    communicator = groups.of(group, tensor)
    if communicator is None:
        if group is not None and group == GroupMember.NON_GROUP_MEMBER:  # type: ignore[comparison-overlap]
            raise ValueError("send: Invalid process group specified: this rank is not in the group")
        groups.elsewhere(torch_dist.send, tensor, dst, group, tag, group_dst)
        return
    to = groups.peer(communicator, "send", "dst", dst, group_dst)
    if to == communicator.rank:
        raise _own_peer("send", to)
    communicator.send(tensor, to, tag)


def recv(
    tensor: Tensor, src: int | None = None, group: ProcessGroup | None = None, tag: int = 0, group_src: int | None = None
) -> int:
    """Receives a tensor from one rank, which must call `send` or `isend`; returns when the tensor is here.

    Not collective. Messages of one sender with one tag arrive in the order in which they were sent. Unlike Gloo's, which ends the
    process, it raises an error if the message is longer than the tensor.

    Args:
        tensor: Overwritten from its first element on; any strides. Of the sender's dtype.
            A shorter message leaves the rest as it was.
        src: Global rank, not this one. If neither this nor ``group_src`` is given: any rank.
        group: None means the default group.
        tag: That of the message.
        group_src: Rank within the group.

    Returns:
        The sender's global rank, or -1 on a rank outside the group.

    Raises:
        ValueError: The source is this rank or is not in the group.
        TruncationError: The message is longer than the tensor. The group can still be used.
        OperationTimeout: Nothing came in time; the message names the source.

    Example:
        >>> tensor = torch.empty(3)
        >>> if dist.get_rank() == 0:
        ...     sender = dist.recv(tensor)  # from any rank
        ...     assert sender == 1
        ... else:
        ...     dist.send(tensor.fill_(2.0), dst=0)
        >>> tensor
        tensor([2., 2., 2.])
    """
    communicator = groups.of(group, tensor)
    if communicator is None:
        return groups.elsewhere(torch_dist.recv, tensor, src, group, tag, group_src)  # type: ignore[no-any-return]
    origin = None
    if src is not None or group_src is not None:
        origin = groups.peer(communicator, "recv", "src", src, group_src)
        if origin == communicator.rank:
            raise _own_peer("recv", origin)
    sender = communicator.recv(tensor, origin, tag)
    count_write(tensor)
    return communicator.global_ranks[sender]


def isend(
    tensor: Tensor, dst: int | None = None, group: ProcessGroup | None = None, tag: int = 0, group_dst: int | None = None
) -> Work:
    """Starts a send; do not change the tensor before the Work's ``wait()`` has returned (not collective).

    The Work may be dropped: the message arrives. Unlike Gloo's, it can send to its own rank.

    Args:
        tensor: Any dtype, shape and strides; the elements travel in row-major order.
        dst: Global rank, this one allowed. Give this or ``group_dst``.
        group: None means the default group.
        tag: As for `send`.
        group_dst: Rank within the group.

    Returns:
        A Work. On a rank outside the group None with a warning, which the type leaves out.

    Raises:
        ValueError: The destination is not in the group.
        OperationTimeout: From ``wait()``: the receiver has not come in time.

    Example:
        >>> rank = dist.get_rank()  # 0 or 1
        >>> result = torch.empty(1)
        >>> works = [dist.isend(torch.tensor([rank + 0.5]), dst=1 - rank), dist.irecv(result, src=1 - rank)]
        >>> all(work.wait() for work in works)
        True
        >>> result.item() == 1 - rank + 0.5
        True
    """
    communicator = groups.of(group, tensor)
    if communicator is None:
        return groups.elsewhere(torch_dist.isend, tensor, dst, group, tag, **_given(group_dst=group_dst))  # type: ignore[no-any-return]
    return communicator.isend(tensor, groups.peer(communicator, "isend", "dst", dst, group_dst), tag)


def irecv(
    tensor: Tensor, src: int | None = None, group: ProcessGroup | None = None, tag: int = 0, group_src: int | None = None
) -> MessageWork:
    """Starts a receive; use the tensor after the Work's ``wait()`` has returned (not collective).

    Unlike Gloo's, it can receive from its own rank.

    Args:
        tensor: Overwritten from its first element on; any strides. A shorter message leaves the rest as it was.
        src: Global rank, this one allowed. If neither this nor ``group_src`` is given: any rank.
        group: None means the default group.
        tag: That of the message.
        group_src: Rank within the group.

    Returns:
        A Work. After ``wait()``, its ``received_nbytes()`` is the size of the message, and its ``source_rank()`` the sender's
        rank within the group. On a rank outside the group None with a warning, which the type leaves out.

    Raises:
        ValueError: The source is not in the group.
        TruncationError: From ``wait()``: the message is longer than the tensor.
        CollectiveMismatch: From ``wait()``, only with MPICOLL_CHECK=1: another dtype or a shorter message.
        OperationTimeout: From ``wait()``: nothing came in time.

    Example:
        >>> rank = dist.get_rank()  # 0 or 1
        >>> result = torch.empty(2)
        >>> work = dist.irecv(result, src=rank)
        >>> dist.isend(torch.ones(2), dst=rank).wait()
        True
        >>> work.wait()
        True
        >>> result
        tensor([1., 1.])
    """
    communicator = groups.of(group, tensor)
    if communicator is None:
        return groups.elsewhere(torch_dist.irecv, tensor, src, group, tag, **_given(group_src=group_src))  # type: ignore[no-any-return]
    anybody = src is None and group_src is None
    origin = None if anybody else groups.peer(communicator, "irecv", "src", src, group_src)
    work = communicator.irecv(tensor, origin, tag)
    count_write(tensor)
    return work


def _given(**peer: int | None) -> dict[str, int]:
    """Drops None: under torch.compile, torch's isend and irecv take a None for a rank."""
    return {name: rank for name, rank in peer.items() if rank is not None}


def _own_peer(operation: str, rank: int) -> ValueError:
    return ValueError(f"{operation}: this rank ({rank}) cannot be its own peer in a blocking call; use i{operation}")


_TO_TORCH = {isend: torch_dist.isend, irecv: torch_dist.irecv}
_FROM_TORCH: dict[Any, Any] = {torch_dist.isend: (isend, "group_dst"), torch_dist.irecv: (irecv, "group_src")}


class P2POp(torch_dist.P2POp):
    """One send or receive of `batch_isend_irecv`. It is torch's P2POp, and takes isend and irecv of mpicoll as well as torch's.

    Making one sends nothing (not collective).

    Args:
        op: isend or irecv.
        tensor: To send, or to receive into.
        peer: Global rank. Give this or ``group_peer``.
        group: None means the default group.
        tag: As for `send`.
        group_peer: Rank within the group.

    Raises:
        ValueError: ``op`` is neither isend nor irecv, or both or none of ``peer`` and ``group_peer`` are given.

    Example:
        >>> dist.P2POp(dist.isend, torch.ones(2), peer=1).peer
        1
    """

    def __init__(
        self,
        op: Any,
        tensor: Tensor,
        peer: int | None = None,
        group: ProcessGroup | None = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> None:
        super().__init__(_TO_TORCH.get(op, op), groups.as_tensors(tensor), peer, group, tag, group_peer)

    def __new__(
        cls,
        op: Any,
        tensor: Tensor,
        peer: int | None = None,
        group: ProcessGroup | None = None,
        tag: int = 0,
        group_peer: int | None = None,
    ) -> P2POp:
        made = super().__new__(cls, _TO_TORCH.get(op, op), groups.as_tensors(tensor), peer, group, tag, group_peer)
        assert isinstance(made, cls)
        return made


P = TypeVar("P", bound=torch_dist.P2POp)  # a list of torch's, or of ours


def batch_isend_irecv(p2p_op_list: list[P]) -> list[torch_dist.Work]:
    """Starts all sends and receives of a list and returns their Works, in the list's order (not collective).

    Every message needs its counterpart on the other rank, in whatever order: none waits for another.

    Args:
        p2p_op_list: P2POps of one group, in any order.

    Returns:
        A Work for each operation; call ``wait()`` on all of them before you use the tensors.

    Raises:
        TypeError: This is no list of P2POps.
        ValueError: The list is empty, or its groups differ.

    Example:
        >>> rank = dist.get_rank()  # 0 or 1
        >>> result = torch.empty(1)
        >>> send = dist.P2POp(dist.isend, torch.tensor([rank + 0.5]), 1 - rank)
        >>> receive = dist.P2POp(dist.irecv, result, 1 - rank)
        >>> all(work.wait() for work in dist.batch_isend_irecv([send, receive]))
        True
        >>> result.item() == 1 - rank + 0.5
        True
    """
    if not isinstance(p2p_op_list, list) or not all(isinstance(op, torch_dist.P2POp) for op in p2p_op_list):
        raise TypeError("batch_isend_irecv: p2p_op_list must be a list of P2POp")
    if not p2p_op_list:
        raise ValueError("batch_isend_irecv: p2p_op_list is empty")
    if any(op.group is not p2p_op_list[0].group for op in p2p_op_list):
        raise ValueError("batch_isend_irecv: all operations must use the same group")
    if any(groups.of(op.group, op.tensor) is None for op in p2p_op_list):
        return torch_dist.batch_isend_irecv(p2p_op_list)  # type: ignore[arg-type]
    works = []
    for op in p2p_op_list:
        start, peer = _FROM_TORCH[op.op]
        works.append(start(op.tensor, group=op.group, tag=op.tag, **{peer: op.group_peer}))
    return [work for work in works if work is not None]


def recv_object_list(
    object_list: list[Any],
    src: int | None = None,
    group: ProcessGroup | None = None,
    device: torch.device | None = None,
    group_src: int | None = None,
    use_batch: bool = False,
    **more: Any,
) -> int:
    """Receives a list of objects from one rank, which must call ``send_object_list`` (not collective).

    Returns when the objects are here. Unlike torch's, it can receive from any rank. Objects are pickled: unpickling runs
    code that the sender chose, so every rank must trust every other.

    Args:
        object_list: Overwritten. As long as the sender's.
        src: Global rank. If neither this nor ``group_src`` is given: any rank.
        group: None means the default group.
        device: As in torch; without effect if the sender is any rank.
        group_src: Rank within the group.
        use_batch: As in torch; without effect if the sender is any rank.
        more: Arguments that only some versions of torch have, such as ``weights_only``; passed on.

    Returns:
        The sender's global rank; -1 on a rank outside the group.

    Raises:
        ValueError: Both of ``src`` and ``group_src`` are given, or the group has no such rank.
        OperationTimeout: Nothing came in time.

    Example:
        >>> objects = [{"loss": 0.5}] if dist.get_rank() == 0 else [None]
        >>> if dist.get_rank() == 0:
        ...     dist.send_object_list(objects, dst=1)
        ... else:
        ...     sender = dist.recv_object_list(objects)
        >>> objects
        [{'loss': 0.5}]
    """
    communicator = groups.of(group)
    if communicator is None or src is not None or group_src is not None or more.get("weights_only"):
        return torch_dist.recv_object_list(object_list, src, group, device, group_src, use_batch, **more)  # type: ignore[no-any-return]
    sizes = torch.empty(len(object_list), dtype=torch.int64, device="cpu")
    with communicator.channel.receiving_list:
        sender = communicator.recv(sizes, None)
        content = torch.empty(int(sizes.sum()), dtype=torch.uint8, device="cpu")
        communicator.recv(content, sender)
    for index, part in enumerate(content.split(sizes.tolist())):
        object_list[index] = pickle.Unpickler(io.BytesIO(part.numpy().tobytes())).load()
    return communicator.global_ranks[sender]


dynamo.skip_frames(__name__)
dynamo.disable(batch_isend_irecv)  # torch.compile traces torch's only, and raises on a P2POp of ours

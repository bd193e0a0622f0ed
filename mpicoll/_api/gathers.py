"""broadcast, scatter, gather, and the forms of all_gather, one of which has a newer and an older name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as torch_dist
from torch import Tensor

# For a list of tensors; mpicoll/_tensors/buffers.py says why. A function of ours around it would cost 2 % of a small operation.
from torch._C import _increment_version as count_writes
from torch.distributed import ProcessGroup
from torch.futures import Future

from mpicoll._api import groups
from mpicoll._c10d import dynamo, names

if TYPE_CHECKING:
    from mpicoll._engine.work import Work


def broadcast(
    tensor: Tensor,
    src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Copies the tensor of rank ``src`` into the tensor of every other rank (collective).

    Returns when this rank has done its part: the tensor has arrived, or may be changed again on ``src``. Unlike Gloo's, it takes
    any strides.

    Args:
        tensor: Read on ``src``, overwritten elsewhere. Same number of elements and same dtype on all ranks; any shape; on a
            device that the group serves.
        src: Global rank. Give this or ``group_src``.
        group: None means the default group.
        async_op: Return a Work at once instead of waiting.
        group_src: Rank within the group.

    Returns:
        A Work with ``async_op=True``: leave ``tensor`` alone until its ``wait()`` has returned. Otherwise None.

    Raises:
        ValueError: Neither or both of ``src`` and ``group_src`` are given, or the group has no such rank.
        OperationTimeout: A rank has not called in time; the message names it. The group cannot be used any more.
        GroupFailed: An earlier operation of the group has failed.

    Example:
        >>> rank = dist.get_rank()  # 0 or 1
        >>> tensor = torch.tensor([rank, 7])
        >>> dist.broadcast(tensor, src=1)
        >>> tensor
        tensor([1, 7])
    """
    communicator = groups.of(group, tensor)
    if communicator is None:
        return groups.elsewhere(torch_dist.broadcast, tensor, src, group, async_op, group_src)  # type: ignore[no-any-return]
    origin = groups.peer(communicator, "broadcast", "src", src, group_src)
    work = communicator.broadcast(tensor, origin, async_op)
    if communicator.rank != origin:
        count_writes((tensor,))
    return work


def all_gather(
    tensor_list: list[Tensor], tensor: Tensor, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """Gathers the tensors of all ranks into a list, on all ranks (collective).

    Returns when the list is filled. Unlike Gloo's, it takes tensors whose shapes differ from rank to rank.

    Args:
        tensor_list: One tensor per rank. ``tensor_list[i]`` gets rank i's tensor and has as many elements and the same dtype. Any
            strides; parts of one large tensor are allowed.
        tensor: This rank's. Its shape may differ from rank to rank.
        group: None means the default group.
        async_op: Return a Work at once instead of waiting.

    Returns:
        A Work with ``async_op=True``: leave all tensors alone until its ``wait()`` has returned. Otherwise None.

    Raises:
        ValueError: The list does not have one tensor per rank, or this rank's entry does not fit ``tensor``.
        OperationTimeout, GroupFailed: As for `broadcast`.

    Example:
        >>> rank = dist.get_rank()  # 0 or 1
        >>> results = [torch.empty(1), torch.empty(2)]
        >>> dist.all_gather(results, torch.ones(rank + 1))
        >>> results
        [tensor([1.]), tensor([1., 1.])]
    """
    communicator = groups.of(group, tensor)
    if communicator is None:
        return groups.elsewhere(torch_dist.all_gather, tensor_list, tensor, group, async_op)  # type: ignore[no-any-return]
    work = communicator.all_gather(tensor_list, tensor, async_op)
    count_writes(tensor_list)
    return work


def all_gather_single(
    output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """Gathers the tensors of all ranks into one tensor, on all ranks (collective). ``all_gather_into_tensor`` does the same.

    Returns when the output is filled. Unlike torch's, which is there since 2.13, it works with every version of torch.

    Args:
        output_tensor: Has (number of ranks) x (elements of the input): concatenated, (n * k, ...), or stacked, (n, k, ...).
        input_tensor: This rank's. Same shape and dtype on all ranks. May be this rank's part of the output.
        group: None means the default group.
        async_op: Return a Work at once instead of waiting.

    Returns:
        A Work with ``async_op=True``: leave both tensors alone until its ``wait()`` has returned. Otherwise None.

    Raises:
        ValueError: ``output_tensor`` does not have as many elements.
        OperationTimeout, GroupFailed: As for `broadcast`.

    Example:
        >>> rank = dist.get_rank()  # 0 or 1
        >>> output = torch.empty(2, dtype=torch.int64)
        >>> dist.all_gather_single(output, torch.tensor([rank]))
        >>> output
        tensor([0, 1])
    """
    communicator = groups.of(group, input_tensor)
    if communicator is None:
        return groups.elsewhere(_all_gather_single, output_tensor, input_tensor, group, async_op)  # type: ignore[no-any-return]
    work = communicator.all_gather_single(output_tensor, input_tensor, async_op)
    count_writes((output_tensor,))
    return work


def all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """Gathers the tensors of all ranks into one tensor, on all ranks (collective). `all_gather_single` is the newer name.

    Returns when the output is filled.

    Args:
        output_tensor, input_tensor, group, async_op: As for `all_gather_single`.

    Returns:
        A Work with ``async_op=True``: leave both tensors alone until its ``wait()`` has returned. Otherwise None.

    Raises:
        ValueError, OperationTimeout, GroupFailed: As for `all_gather_single`.

    Example:
        >>> output = torch.empty(2, 3)
        >>> dist.all_gather_into_tensor(output, torch.full((3,), 0.5))
        >>> output
        tensor([[0.5000, 0.5000, 0.5000],
                [0.5000, 0.5000, 0.5000]])
    """
    try:
        return all_gather_single(output_tensor, input_tensor, group, async_op)
    except Exception as error:
        names.name_as_called(error, "all_gather_into_tensor")
        raise


_all_gather_single: Any = getattr(torch_dist, "all_gather_single", torch_dist.all_gather_into_tensor)


def all_gather_coalesced(
    output_tensor_lists: list[list[Tensor]],
    input_tensor_list: list[Tensor],
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Future[list[Tensor]] | None:
    """Gathers each tensor of a list on all ranks, in one operation (collective). See `all_gather`.

    Returns when all outputs are filled. As in torch, ``async_op=True`` gives a Future here, not a Work.

    Args:
        output_tensor_lists: One list per rank; ``output_tensor_lists[i][k]`` gets rank i's ``input_tensor_list[k]``.
        input_tensor_list: This rank's tensors.
        group: None means the default group.
        async_op: Return a Future of the tensors at once instead of waiting.

    Returns:
        A Future with ``async_op=True``: leave the tensors alone until its ``wait()`` has returned. Otherwise None.

    Raises:
        ValueError: There is not one list per rank, or not one output per input.
        OperationTimeout, GroupFailed: As for `all_gather`.

    Example:
        >>> rank = dist.get_rank()  # 0 or 1
        >>> outputs = [[torch.empty(1), torch.empty(2)] for _ in range(2)]  # on 2 ranks
        >>> dist.all_gather_coalesced(outputs, [torch.full((1,), 1.0 + rank), torch.full((2,), 3.0 + rank)])
        >>> outputs
        [[tensor([1.]), tensor([3., 3.])], [tensor([2.]), tensor([4., 4.])]]
    """
    communicator = groups.of_all(group, input_tensor_list)
    if communicator is None:
        return groups.elsewhere(torch_dist.all_gather_coalesced, output_tensor_lists, input_tensor_list, group, async_op)  # type: ignore[no-any-return]
    per_rank = [list(tensors) for tensors in output_tensor_lists]
    if len(per_rank) != communicator.size or any(len(tensors) != len(input_tensor_list) for tensors in per_rank):
        raise ValueError(
            f"all_gather_coalesced: output_tensor_lists must be {communicator.size} lists, one per rank, of "
            f"{len(input_tensor_list)} tensors each, one per input; got lists of {[len(tensors) for tensors in per_rank]}"
        )
    per_input = [list(tensors) for tensors in zip(*per_rank, strict=True)]
    work = communicator.all_gather_coalesced(per_input, input_tensor_list, async_op)
    count_writes([tensor for tensors in per_input for tensor in tensors])
    return None if work is None else work.get_future()


def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = None,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Gathers the tensors of all ranks into a list, on rank ``dst`` (collective).

    Returns when this rank has done its part. Unlike Gloo's, it takes tensors whose shapes differ from rank to rank.

    Args:
        tensor: This rank's. Its shape may differ from rank to rank; one dtype; any strides.
        gather_list: On ``dst`` one tensor per rank, with the size and dtype of that rank's tensor; None elsewhere.
        dst: Global rank; 0 if neither this nor ``group_dst`` is given.
        group: None means the default group.
        async_op: Return a Work at once instead of waiting.
        group_dst: Rank within the group.

    Returns:
        A Work with ``async_op=True``: leave all tensors alone until its ``wait()`` has returned. Otherwise None.

    Raises:
        ValueError: ``gather_list`` is missing on ``dst``, given elsewhere, or does not fit; or the group has no rank ``dst``.
        TruncationError: A rank sends more than its entry of the list holds.
        OperationTimeout: A rank has not called in time; the message names it. The group cannot be used any more.
        GroupFailed: An earlier operation of the group has failed.

    Example:
        >>> rank = dist.get_rank()  # 0 or 1
        >>> results = [torch.empty(1), torch.empty(1)] if rank == 0 else None
        >>> dist.gather(torch.tensor([rank + 0.5]), results, dst=0)
        >>> [result.item() for result in results or []] == [[0.5, 1.5], []][rank]
        True
    """
    communicator = groups.of(group, tensor)
    if communicator is None:
        return groups.elsewhere(torch_dist.gather, tensor, gather_list, dst, group, async_op, group_dst)  # type: ignore[no-any-return]
    if dst is None and group_dst is None:
        dst = 0
    to = groups.peer(communicator, "gather", "dst", dst, group_dst)
    work = communicator.gather(tensor, gather_list, to, async_op)
    if gather_list:
        count_writes(gather_list)
    return work


def scatter(
    tensor: Tensor,
    scatter_list: list[Tensor] | None = None,
    src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Gives each rank one tensor of a list that rank ``src`` has (collective).

    Returns when this rank has done its part. Unlike Gloo's, the tensors may differ in shape and have any strides.

    Args:
        tensor: Overwritten with ``scatter_list[i]`` on rank i. Its shape may differ from rank to rank; any strides.
        scatter_list: On ``src`` one tensor per rank, with the size and dtype of that rank's tensor; None elsewhere.
        src: Global rank; 0 if neither this nor ``group_src`` is given.
        group: None means the default group.
        async_op: Return a Work at once instead of waiting.
        group_src: Rank within the group.

    Returns:
        A Work with ``async_op=True``: leave all tensors alone until its ``wait()`` has returned. Otherwise None.

    Raises:
        ValueError: ``scatter_list`` is missing on ``src``, given elsewhere, or does not fit; or the group has no rank ``src``.
        TruncationError: ``src`` has more for this rank than ``tensor`` holds.
        OperationTimeout, GroupFailed: As for `gather`.

    Example:
        >>> rank = dist.get_rank()  # 0 or 1
        >>> tensor = torch.empty(1)
        >>> dist.scatter(tensor, [torch.tensor([5.0]), torch.tensor([6.0])] if rank == 0 else None, src=0)
        >>> tensor.item() == 5 + rank
        True
    """
    communicator = groups.of(group, tensor)
    if communicator is None:
        return groups.elsewhere(torch_dist.scatter, tensor, scatter_list, src, group, async_op, group_src)  # type: ignore[no-any-return]
    if src is None and group_src is None:
        src = 0
    origin = groups.peer(communicator, "scatter", "src", src, group_src)
    work = communicator.scatter(tensor, scatter_list, origin, async_op)
    count_writes((tensor,))
    return work


dynamo.skip_frames(__name__)

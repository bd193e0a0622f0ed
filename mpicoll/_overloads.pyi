# pyright: reportOverlappingOverload=false
"""The functions with ``async_op`` as type checkers see them. Made by ``python -m benchmarks.overloads``; do not edit.

A call without ``async_op`` fits the first two forms, which therefore overlap; checkers take the first one that fits. On a rank
outside the group the result is None, with a warning, whatever ``async_op`` is.
"""

from datetime import timedelta
from typing import Any, Literal, overload
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Work
from torch.futures import Future
from mpicoll._api.reductions import SUM
from mpicoll._tensors.reductions import Op

@overload
def all_gather(
    tensor_list: list[Tensor], tensor: Tensor, group: ProcessGroup | None = None, async_op: Literal[False] = False
) -> None:
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

@overload
def all_gather(
    tensor_list: list[Tensor], tensor: Tensor, group: ProcessGroup | None = None, async_op: Literal[True] = ...
) -> Work: ...
@overload
def all_gather(
    tensor_list: list[Tensor], tensor: Tensor, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None: ...
@overload
def all_gather_coalesced(
    output_tensor_lists: list[list[Tensor]],
    input_tensor_list: list[Tensor],
    group: ProcessGroup | None = None,
    async_op: Literal[False] = False,
) -> None:
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

@overload
def all_gather_coalesced(
    output_tensor_lists: list[list[Tensor]],
    input_tensor_list: list[Tensor],
    group: ProcessGroup | None = None,
    async_op: Literal[True] = ...,
) -> Future[list[Tensor]]: ...
@overload
def all_gather_coalesced(
    output_tensor_lists: list[list[Tensor]],
    input_tensor_list: list[Tensor],
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Future[list[Tensor]] | None: ...
@overload
def all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup | None = None, async_op: Literal[False] = False
) -> None:
    """Gathers the tensors of all ranks into one tensor, on all ranks (collective). `all_gather_single` is the newer name.

    Returns when the output is filled.

    Args:
        output_tensor: Has (number of ranks) x (elements of the input): concatenated, (n * k, ...), or stacked, (n, k, ...).
        input_tensor: This rank's. Same shape and dtype on all ranks. May be this rank's part of the output.
        group: None means the default group.
        async_op: Return a Work at once instead of waiting.

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

@overload
def all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup | None = None, async_op: Literal[True] = ...
) -> Work: ...
@overload
def all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None: ...
@overload
def all_gather_single(
    output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup | None = None, async_op: Literal[False] = False
) -> None:
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

@overload
def all_gather_single(
    output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup | None = None, async_op: Literal[True] = ...
) -> Work: ...
@overload
def all_gather_single(
    output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None: ...
@overload
def all_reduce(tensor: Tensor, op: Op = SUM, group: ProcessGroup | None = None, async_op: Literal[False] = False) -> None:
    """Reduces the tensors of all ranks element by element; every rank gets the result, with the same bits (collective).

    Returns when ``tensor`` holds the result. Unlike Gloo's, it takes any strides and more dtypes (the page "Reductions").

    Args:
        tensor: Overwritten. Same number of elements and same dtype on all ranks; any shape and strides; on a device that the
            group serves. fp16 and bf16 are accumulated in fp32 and rounded once. MIN and MAX propagate NaN.
        op: SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR, BXOR of ``dist.ReduceOp``, or a PREMUL_SUM.
        group: None means the default group.
        async_op: Return a Work at once instead of waiting.

    Returns:
        A Work with ``async_op=True``: leave ``tensor`` alone until its ``wait()`` has returned. Otherwise None.

    Raises:
        UnsupportedReduction: This ``op`` of this dtype has no right answer, such as AVG of bool. It is a TypeError and a
            ValueError. The page "Reductions" has the table.
        OperationTimeout: A rank has not called in time; the message names it. The group cannot be used any more.
        GroupFailed: An earlier operation of the group has failed.

    Example:
        >>> rank = dist.get_rank()  # 0 or 1
        >>> tensor = torch.tensor([1, 2]) * (rank + 1)  # [1, 2] and [2, 4]
        >>> dist.all_reduce(tensor)
        >>> tensor
        tensor([3, 6])
    """

@overload
def all_reduce(tensor: Tensor, op: Op = SUM, group: ProcessGroup | None = None, async_op: Literal[True] = ...) -> Work: ...
@overload
def all_reduce(tensor: Tensor, op: Op = SUM, group: ProcessGroup | None = None, async_op: bool = False) -> Work | None: ...
@overload
def all_reduce_coalesced(
    tensors: list[Tensor], op: Op = ReduceOp.SUM, group: ProcessGroup | None = None, async_op: Literal[False] = False
) -> None:
    """Reduces each tensor of a list over all ranks, in one operation (collective). See `all_reduce`.

    Returns when all tensors hold their results. As in torch, ``async_op=True`` gives a Future here, not a Work.

    Args:
        tensors: Overwritten. Lists of the same length on all ranks, of one dtype; shapes may differ within the list.
        op: As for `all_reduce`.
        group: None means the default group.
        async_op: Return a Future of the tensors at once instead of waiting.

    Returns:
        A Future with ``async_op=True``: leave the tensors alone until its ``wait()`` has returned. Otherwise None.

    Raises:
        UnsupportedReduction, OperationTimeout, GroupFailed: As for `all_reduce`.

    Example:
        >>> tensors = [torch.ones(1), torch.full((2,), 2.0)]
        >>> dist.all_reduce_coalesced(tensors)  # on 2 ranks
        >>> tensors
        [tensor([2.]), tensor([4., 4.])]
    """

@overload
def all_reduce_coalesced(
    tensors: list[Tensor], op: Op = ReduceOp.SUM, group: ProcessGroup | None = None, async_op: Literal[True] = ...
) -> Future[list[Tensor]]: ...
@overload
def all_reduce_coalesced(
    tensors: list[Tensor], op: Op = ReduceOp.SUM, group: ProcessGroup | None = None, async_op: bool = False
) -> Future[list[Tensor]] | None: ...
@overload
def all_to_all(
    output_tensor_list: list[Tensor],
    input_tensor_list: list[Tensor],
    group: ProcessGroup | None = None,
    async_op: Literal[False] = False,
) -> None:
    """Sends one tensor to each rank and receives one from each: a transposed list of lists (collective).

    Returns when all outputs are filled. Unlike Gloo's, it takes tensors whose shapes differ.

    Args:
        output_tensor_list: One tensor per rank. ``output_tensor_list[i]`` gets what rank i has for this rank.
        input_tensor_list: One tensor per rank. ``input_tensor_list[j]`` goes to rank j. All may differ in shape; one dtype.
        group: None means the default group.
        async_op: Return a Work at once instead of waiting.

    Returns:
        A Work with ``async_op=True``: leave all tensors alone until its ``wait()`` has returned. Otherwise None.

    Raises:
        ValueError: A list does not have one tensor per rank, or this rank's output does not fit its input.
        TruncationError: A rank sends more than the output for it holds.
        OperationTimeout, GroupFailed: As for `gather`.

    Example:
        >>> rank = dist.get_rank()  # 0 or 1
        >>> results = [torch.empty(1), torch.empty(1)]
        >>> dist.all_to_all(results, [torch.tensor([10.0 * rank]), torch.tensor([10.0 * rank + 1])])
        >>> [result.item() for result in results] == [rank, 10 + rank]
        True
    """

@overload
def all_to_all(
    output_tensor_list: list[Tensor],
    input_tensor_list: list[Tensor],
    group: ProcessGroup | None = None,
    async_op: Literal[True] = ...,
) -> Work: ...
@overload
def all_to_all(
    output_tensor_list: list[Tensor], input_tensor_list: list[Tensor], group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None: ...
@overload
def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: ProcessGroup | None = None,
    async_op: Literal[False] = False,
) -> None:
    """Sends some rows of a tensor to each rank and receives some from each (collective).

    Returns when ``output`` is filled. Unlike Gloo's, it takes any strides.

    Args:
        output: Overwritten with the rows from rank 0, then those from rank 1, and so on. Rows as long as those of ``input``.
        input: Rows for rank 0, then those for rank 1, and so on. Same dtype as ``output``.
        output_split_sizes: Number of rows (dimension 0) from each rank, 0 allowed; None: equal shares.
        input_split_sizes: Number of rows for each rank, 0 allowed; None: equal shares.
        group: None means the default group.
        async_op: Return a Work at once instead of waiting.

    Returns:
        A Work with ``async_op=True``: leave both tensors alone until its ``wait()`` has returned. Otherwise None.

    Raises:
        ValueError: Splits do not add up to the rows of the tensor, or a tensor has no rows.
        TruncationError: A rank sends more rows than this rank expects.
        OperationTimeout, GroupFailed: As for `gather`.

    Example:
        >>> rank = dist.get_rank()  # 0 or 1
        >>> output = torch.empty(2)
        >>> dist.all_to_all_single(output, torch.tensor([10.0 * rank, 10.0 * rank + 1]))
        >>> output.tolist() == [rank, 10 + rank]
        True
    """

@overload
def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: ProcessGroup | None = None,
    async_op: Literal[True] = ...,
) -> Work: ...
@overload
def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None: ...
@overload
def barrier(
    group: ProcessGroup | None = None, async_op: Literal[False] = False, device_ids: Any = None, timeout: timedelta | None = None
) -> None:
    """Returns when every rank of the group has called it (collective).

    Unlike torch's, it has ``timeout`` with every version of torch, and needs no ``device_ids``.

    Args:
        group: None means the default group.
        async_op: Return a Work at once instead of waiting.
        device_ids: Accepted and ignored.
        timeout: None: the group's.

    Returns:
        A Work with ``async_op=True``, otherwise None.

    Raises:
        OperationTimeout: Not every rank has called in time; the message names them. The group cannot be used any more.
        GroupFailed: An earlier operation of the group has failed.

    Example:
        >>> dist.barrier()
        >>> work = dist.barrier(async_op=True)
        >>> work.wait()
        True
    """

@overload
def barrier(
    group: ProcessGroup | None = None, async_op: Literal[True] = ..., device_ids: Any = None, timeout: timedelta | None = None
) -> Work: ...
@overload
def barrier(
    group: ProcessGroup | None = None, async_op: bool = False, device_ids: Any = None, timeout: timedelta | None = None
) -> Work | None: ...
@overload
def broadcast(
    tensor: Tensor,
    src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: Literal[False] = False,
    group_src: int | None = None,
) -> None:
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

@overload
def broadcast(
    tensor: Tensor,
    src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: Literal[True] = ...,
    group_src: int | None = None,
) -> Work: ...
@overload
def broadcast(
    tensor: Tensor,
    src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None: ...
@overload
def exscan(tensor: Tensor, op: Op = SUM, group: ProcessGroup | None = None, async_op: Literal[False] = False) -> None:
    """Reduces the tensors of the ranks before this one element by element (an exclusive prefix reduction).

    All ranks of the group call it (collective); it returns when ``tensor`` holds the result. torch has no such function.

    Args:
        tensor: Overwritten; rank 0 of the group, before which there is none, keeps its values. Otherwise as for `scan`.
        op: As for `all_reduce`. AVG divides by the number of ranks before this one.
        group: None means the default group. Its order of the ranks counts.
        async_op: Return a Work at once instead of waiting.

    Returns:
        A Work with ``async_op=True``: leave ``tensor`` alone until its ``wait()`` has returned. Otherwise None.

    Raises:
        UnsupportedReduction: This ``op`` of this dtype has no right answer; as for `all_reduce`.
        ValueError: The group has another backend or has been destroyed, or there is no default group.

    Example:
        >>> start = torch.tensor(10)  # this rank has 10 rows; where do they begin?
        >>> dist.exscan(start)
        >>> (0 if dist.get_rank() == 0 else start.item()) == 10 * dist.get_rank()
        True
    """

@overload
def exscan(tensor: Tensor, op: Op = SUM, group: ProcessGroup | None = None, async_op: Literal[True] = ...) -> Work: ...
@overload
def exscan(tensor: Tensor, op: Op = SUM, group: ProcessGroup | None = None, async_op: bool = False) -> Work | None: ...
@overload
def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = None,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    async_op: Literal[False] = False,
    group_dst: int | None = None,
) -> None:
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

@overload
def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = None,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    async_op: Literal[True] = ...,
    group_dst: int | None = None,
) -> Work: ...
@overload
def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = None,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None: ...
@overload
def reduce(
    tensor: Tensor,
    dst: int | None = None,
    op: Op = SUM,
    group: ProcessGroup | None = None,
    async_op: Literal[False] = False,
    group_dst: int | None = None,
) -> None:
    """Reduces the tensors of all ranks element by element; rank ``dst`` gets the result (collective).

    Returns when this rank has done its part. Unlike Gloo's, it leaves the tensors of the other ranks unchanged.

    Args:
        tensor: Overwritten on ``dst``, unchanged elsewhere. Otherwise as for `all_reduce`.
        dst: Global rank. Give this or ``group_dst``.
        op: As for `all_reduce`.
        group: None means the default group.
        async_op: Return a Work at once instead of waiting.
        group_dst: Rank within the group.

    Returns:
        A Work with ``async_op=True``: leave ``tensor`` alone until its ``wait()`` has returned. Otherwise None.

    Raises:
        ValueError: Neither or both of ``dst`` and ``group_dst`` are given, or the group has no such rank.
        UnsupportedReduction, OperationTimeout, GroupFailed: As for `all_reduce`.

    Example:
        >>> rank = dist.get_rank()  # 0 or 1
        >>> tensor = torch.tensor([1, 2]) * (rank + 1)  # [1, 2] and [2, 4]
        >>> dist.reduce(tensor, dst=0, op=dist.ReduceOp.MAX)
        >>> tensor  # on both ranks: rank 1 had the maximum and keeps its tensor
        tensor([2, 4])
    """

@overload
def reduce(
    tensor: Tensor,
    dst: int | None = None,
    op: Op = SUM,
    group: ProcessGroup | None = None,
    async_op: Literal[True] = ...,
    group_dst: int | None = None,
) -> Work: ...
@overload
def reduce(
    tensor: Tensor,
    dst: int | None = None,
    op: Op = SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None: ...
@overload
def reduce_scatter(
    output: Tensor, input_list: list[Tensor], op: Op = SUM, group: ProcessGroup | None = None, async_op: Literal[False] = False
) -> None:
    """Reduces lists of tensors over all ranks; rank i gets the result of the i-th tensors (collective).

    Returns when ``output`` holds the result. Unlike Gloo's, it takes any strides.

    Args:
        output: Overwritten with the reduction of ``input_list[i]`` over all ranks, on rank i. Any strides.
        input_list: One tensor per rank; their shapes may differ. The same shapes on all ranks, and one dtype.
        op: As for `all_reduce`.
        group: None means the default group.
        async_op: Return a Work at once instead of waiting.

    Returns:
        A Work with ``async_op=True``: leave all tensors alone until its ``wait()`` has returned. Otherwise None.

    Raises:
        ValueError: The list does not have one tensor per rank, or ``output`` does not fit.
        UnsupportedReduction, OperationTimeout, GroupFailed: As for `all_reduce`.

    Example:
        >>> rank = dist.get_rank()  # 0 or 1
        >>> output = torch.empty(1)
        >>> dist.reduce_scatter(output, [torch.tensor([1.0]), torch.tensor([10.0])])
        >>> output.item() == (2.0, 20.0)[rank]
        True
    """

@overload
def reduce_scatter(
    output: Tensor, input_list: list[Tensor], op: Op = SUM, group: ProcessGroup | None = None, async_op: Literal[True] = ...
) -> Work: ...
@overload
def reduce_scatter(
    output: Tensor, input_list: list[Tensor], op: Op = SUM, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None: ...
@overload
def reduce_scatter_single(
    output: Tensor, input: Tensor, op: Op = SUM, group: ProcessGroup | None = None, async_op: Literal[False] = False
) -> None:
    """Reduces a tensor over all ranks; rank i gets the i-th block (collective). ``reduce_scatter_tensor`` does the same.

    Returns when ``output`` holds the result. Unlike torch's, which is there since 2.13, it works with every version of torch. It
    takes any strides.

    Args:
        output: Overwritten with this rank's block of the reduction. May be this rank's part of the input.
        input: Has (number of ranks) x (elements of the output): concatenated, (n * k, ...), or stacked, (n, k, ...). Same dtype.
        op: As for `all_reduce`.
        group: None means the default group.
        async_op: Return a Work at once instead of waiting.

    Returns:
        A Work with ``async_op=True``: leave both tensors alone until its ``wait()`` has returned. Otherwise None.

    Raises:
        ValueError: ``input`` does not have as many elements.
        UnsupportedReduction, OperationTimeout, GroupFailed: As for `all_reduce`.

    Example:
        >>> rank = dist.get_rank()  # 0 or 1
        >>> output = torch.empty(1)
        >>> dist.reduce_scatter_single(output, torch.tensor([1.0, 10.0]))
        >>> output.item() == (2.0, 20.0)[rank]
        True
    """

@overload
def reduce_scatter_single(
    output: Tensor, input: Tensor, op: Op = SUM, group: ProcessGroup | None = None, async_op: Literal[True] = ...
) -> Work: ...
@overload
def reduce_scatter_single(
    output: Tensor, input: Tensor, op: Op = SUM, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None: ...
@overload
def reduce_scatter_tensor(
    output: Tensor, input: Tensor, op: Op = SUM, group: ProcessGroup | None = None, async_op: Literal[False] = False
) -> None:
    """Reduces a tensor over all ranks; rank i gets the i-th block (collective). `reduce_scatter_single` is the newer name.

    Returns when ``output`` holds the result. Unlike Gloo's, it takes any strides.

    Args:
        output: Overwritten with this rank's block of the reduction. May be this rank's part of the input.
        input: Has (number of ranks) x (elements of the output). Same dtype.
        op: As for `all_reduce`.
        group: None means the default group.
        async_op: Return a Work at once instead of waiting.

    Returns:
        A Work with ``async_op=True``: leave both tensors alone until its ``wait()`` has returned. Otherwise None.

    Raises:
        ValueError, UnsupportedReduction, OperationTimeout, GroupFailed: As for `reduce_scatter_single`.

    Example:
        >>> output = torch.empty(3)
        >>> dist.reduce_scatter_tensor(output, torch.full((6,), 0.5), op=dist.ReduceOp.MAX)
        >>> output
        tensor([0.5000, 0.5000, 0.5000])
    """

@overload
def reduce_scatter_tensor(
    output: Tensor, input: Tensor, op: Op = SUM, group: ProcessGroup | None = None, async_op: Literal[True] = ...
) -> Work: ...
@overload
def reduce_scatter_tensor(
    output: Tensor, input: Tensor, op: Op = SUM, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None: ...
@overload
def scan(tensor: Tensor, op: Op = SUM, group: ProcessGroup | None = None, async_op: Literal[False] = False) -> None:
    """Reduces the tensors of ranks 0 to this one element by element (an inclusive prefix reduction).

    All ranks of the group call it (collective); it returns when ``tensor`` holds the result. torch has no such function.

    Args:
        tensor: Overwritten. Same number of elements and same dtype on all ranks; any strides. Dtypes as for `all_reduce`.
        op: As for `all_reduce`. AVG divides by the number of ranks up to this one.
        group: None means the default group. Its order of the ranks counts.
        async_op: Return a Work at once instead of waiting.

    Returns:
        A Work with ``async_op=True``: leave ``tensor`` alone until its ``wait()`` has returned. Otherwise None.

    Raises:
        UnsupportedReduction: This ``op`` of this dtype has no right answer; as for `all_reduce`.
        ValueError: The group has another backend or has been destroyed, or there is no default group.

    Example:
        >>> tensor = torch.tensor([1, 2]) * (dist.get_rank() + 1)  # [1, 2] and [2, 4]
        >>> dist.scan(tensor)
        >>> tensor.tolist() == ([1, 2] if dist.get_rank() == 0 else [3, 6])
        True
    """

@overload
def scan(tensor: Tensor, op: Op = SUM, group: ProcessGroup | None = None, async_op: Literal[True] = ...) -> Work: ...
@overload
def scan(tensor: Tensor, op: Op = SUM, group: ProcessGroup | None = None, async_op: bool = False) -> Work | None: ...
@overload
def scatter(
    tensor: Tensor,
    scatter_list: list[Tensor] | None = None,
    src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: Literal[False] = False,
    group_src: int | None = None,
) -> None:
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

@overload
def scatter(
    tensor: Tensor,
    scatter_list: list[Tensor] | None = None,
    src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: Literal[True] = ...,
    group_src: int | None = None,
) -> Work: ...
@overload
def scatter(
    tensor: Tensor,
    scatter_list: list[Tensor] | None = None,
    src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None: ...

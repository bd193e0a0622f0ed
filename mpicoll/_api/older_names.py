"""Functions under the names that they had before torch 2.13. Their errors have the name that the program has called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from torch.distributed import ProcessGroup

from mpicoll._api.gathers import all_gather_single
from mpicoll._api.reductions import SUM, reduce_scatter_single
from mpicoll._c10d.older_names import name_as_called

if TYPE_CHECKING:
    from mpicoll._engine.work import Work
    from mpicoll._tensors.reductions import Op


def all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
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
    try:
        return all_gather_single(output_tensor, input_tensor, group, async_op)
    except Exception as error:
        name_as_called(error, "all_gather_into_tensor")
        raise


def reduce_scatter_tensor(
    output: Tensor, input: Tensor, op: Op = SUM, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
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
    try:
        return reduce_scatter_single(output, input, op, group, async_op)
    except Exception as error:
        name_as_called(error, "reduce_scatter_tensor")
        raise

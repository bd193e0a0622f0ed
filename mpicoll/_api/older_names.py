"""Functions under the names that they had before torch 2.13. Their errors have the name that the program has called."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from torch.distributed import ProcessGroup

from mpicoll._api.collectives import SUM, all_gather_single, reduce_scatter_single
from mpicoll._c10d.failed_calls import name_as_called

if TYPE_CHECKING:
    from mpicoll._progress.work import Work
    from mpicoll._tensors.reductions import Op


def all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """Does `all_gather_single`, which is the newer name."""
    try:
        return all_gather_single(output_tensor, input_tensor, group, async_op)
    except Exception as error:
        name_as_called(error, "all_gather_into_tensor")
        raise


def reduce_scatter_tensor(
    output: Tensor, input: Tensor, op: Op = SUM, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """Does `reduce_scatter_single`, which is the newer name."""
    try:
        return reduce_scatter_single(output, input, op, group, async_op)
    except Exception as error:
        name_as_called(error, "reduce_scatter_tensor")
        raise

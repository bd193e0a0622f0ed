"""Many tensors as one operation. As in torch, async_op=True gives a Future here, not a Work."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as torchs
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp
from torch.futures import Future

from mpicoll._api import groups
from mpicoll._c10d import dynamo
from mpicoll._tensors.versions import count_write

if TYPE_CHECKING:
    from mpicoll._engine.communicator import Communicator
    from mpicoll._tensors.reductions import Op


def all_reduce_coalesced(
    tensors: list[Tensor], op: Op = ReduceOp.SUM, group: ProcessGroup | None = None, async_op: bool = False
) -> Future[list[Tensor]] | None:
    """``all_reduce`` of each tensor, in place, as one operation."""
    communicator = _engine(group, tensors)
    if communicator is None:
        return torchs.all_reduce_coalesced(tensors, op, group, async_op)  # type: ignore[no-any-return]
    work = communicator.all_reduce_coalesced(as_list(tensors), op, async_op)
    count_write(*as_list(tensors))
    return None if work is None else work.get_future()


def all_gather_coalesced(
    output_tensor_lists: list[list[Tensor]],
    input_tensor_list: list[Tensor],
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Future[list[Tensor]] | None:
    """``all_gather`` of each tensor as one operation.

    Args:   output_tensor_lists: one list per rank; output_tensor_lists[r][i] receives rank r's input_tensor_list[i].
    """
    communicator = _engine(group, input_tensor_list)
    if communicator is None:
        return torchs.all_gather_coalesced(output_tensor_lists, input_tensor_list, group, async_op)  # type: ignore[no-any-return]
    per_rank = [list(tensors) for tensors in output_tensor_lists]
    if len(per_rank) != communicator.size or any(len(tensors) != len(input_tensor_list) for tensors in per_rank):
        raise ValueError(
            f"all_gather_coalesced: output_tensor_lists must be {communicator.size} lists, one per rank, of "
            f"{len(input_tensor_list)} tensors each, one per input; got lists of {[len(tensors) for tensors in per_rank]}"
        )
    per_input = [list(tensors) for tensors in zip(*per_rank, strict=True)]
    work = communicator.all_gather_coalesced(per_input, input_tensor_list, async_op)
    count_write(*(tensor for tensors in per_input for tensor in tensors))
    return None if work is None else work.get_future()


def _engine(group: ProcessGroup | None, tensors: list[Tensor]) -> Communicator | None:
    found = [groups.of(group, tensor) for tensor in as_list(tensors)]
    return found[0] if found and all(found) else None


def as_list(tensors: Any) -> list[Tensor]:
    """torch takes a single tensor for a list of one."""
    return [tensors] if isinstance(tensors, Tensor) else tensors


dynamo.skip_frames(__name__)

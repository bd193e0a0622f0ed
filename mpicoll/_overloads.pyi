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
) -> None: ...
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
) -> None: ...
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
) -> None: ...
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
) -> None: ...
@overload
def all_gather_single(
    output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup | None = None, async_op: Literal[True] = ...
) -> Work: ...
@overload
def all_gather_single(
    output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None: ...
@overload
def all_reduce(tensor: Tensor, op: Op = SUM, group: ProcessGroup | None = None, async_op: Literal[False] = False) -> None: ...
@overload
def all_reduce(tensor: Tensor, op: Op = SUM, group: ProcessGroup | None = None, async_op: Literal[True] = ...) -> Work: ...
@overload
def all_reduce(tensor: Tensor, op: Op = SUM, group: ProcessGroup | None = None, async_op: bool = False) -> Work | None: ...
@overload
def all_reduce_coalesced(
    tensors: list[Tensor], op: Op = ReduceOp.SUM, group: ProcessGroup | None = None, async_op: Literal[False] = False
) -> None: ...
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
) -> None: ...
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
) -> None: ...
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
) -> None: ...
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
) -> None: ...
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
def exscan(tensor: Tensor, op: Op = SUM, group: ProcessGroup | None = None, async_op: Literal[False] = False) -> None: ...
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
) -> None: ...
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
) -> None: ...
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
) -> None: ...
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
) -> None: ...
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
) -> None: ...
@overload
def reduce_scatter_tensor(
    output: Tensor, input: Tensor, op: Op = SUM, group: ProcessGroup | None = None, async_op: Literal[True] = ...
) -> Work: ...
@overload
def reduce_scatter_tensor(
    output: Tensor, input: Tensor, op: Op = SUM, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None: ...
@overload
def scan(tensor: Tensor, op: Op = SUM, group: ProcessGroup | None = None, async_op: Literal[False] = False) -> None: ...
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
) -> None: ...
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

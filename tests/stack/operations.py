"""Every operation of torch.distributed once, with the tensors that it takes: for tests that ask the same of each."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed
from torch import Tensor


class Operation(NamedTuple):
    tensors: list[Tensor]
    call: Callable[[Any], Any]  # on a group; returns what torch returns


def operations(
    rank: int, size: int, make: Callable[..., Tensor], async_op: bool, dist: Any = torch.distributed
) -> dict[str, Operation]:
    """By name; ``make`` returns a tensor of a shape. Messages are between ranks 0 and 1; other ranks have none."""
    one, whole, other = make(4), make(4 * size), make(4 * size)
    many, more, lists = [make(4) for _ in range(size)], [make(4) for _ in range(size)], [[make(4), make(4)] for _ in range(size)]
    at_root = many if rank == 0 else None

    def on(tensors: list[Tensor], function: Callable[..., Any], *args: Any) -> Operation:
        return Operation(tensors, lambda group: function(*args, group=group, async_op=async_op))

    found = {
        "all_reduce": on([one], dist.all_reduce, one),
        "broadcast": on([one], dist.broadcast, one, 0),
        "reduce": on([one], dist.reduce, one, 0),
        "all_gather": on([one, *many], dist.all_gather, many, one),
        "all_gather_into_tensor": on([one, whole], dist.all_gather_into_tensor, whole, one),
        "gather": on([one, *many], dist.gather, one, at_root, 0),
        "scatter": on([one, *many], dist.scatter, one, at_root, 0),
        "reduce_scatter": on([one, *many], dist.reduce_scatter, one, many),
        "reduce_scatter_tensor": on([one, whole], dist.reduce_scatter_tensor, one, whole),
        "all_to_all": on([*many, *more], dist.all_to_all, many, more),
        "all_reduce_coalesced": on(many, dist.all_reduce_coalesced, many),
        "all_gather_coalesced": on([t for part in lists for t in part], dist.all_gather_coalesced, lists, [make(4), make(4)]),
    }
    if one.is_contiguous():  # Gloo refuses others
        found["all_to_all_single"] = on([whole, other], dist.all_to_all_single, whole, other)
    if size > 1 and rank < 2 and one.is_contiguous() and async_op:
        found["isend, irecv"] = Operation([one], lambda group: (dist.isend, dist.irecv)[rank](one, 1 - rank, group))
    elif size > 1 and rank < 2 and one.is_contiguous():
        found["send, recv"] = Operation([one], lambda group: (dist.send, dist.recv)[rank](one, 1 - rank, group))
        found["recv from anybody"] = Operation(
            [one], lambda group: dist.recv(one, None, group) if rank else dist.send(one, 1, group)
        )
    return found


def waited(answer: Any) -> None:
    """Ends what an operation has returned; a blocking recv returns the sender's rank."""
    if hasattr(answer, "wait"):
        answer.wait()

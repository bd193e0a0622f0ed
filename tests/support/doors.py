"""The two doors, mpicoll and torch.distributed: a mark for tests of both, and a call of each collective through either."""

import inspect
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed
from torch import Tensor

import mpicoll
from tests.support.torch_backend import of_rank

doors = pytest.mark.parametrize("door", [mpicoll, torch.distributed], ids=["mpicoll", "torch"])


class Call(NamedTuple):
    """A collective as one rank calls it."""

    start: Callable[..., Any]  # takes group= and async_op=
    outputs: Sequence[Tensor] = ()  # the tensors that it changes on this rank
    expected: Sequence[Tensor] = ()  # what they hold afterwards


def collectives(door: Any, rank: int, size: int, root: int) -> dict[str, Call]:
    """A call of each collective of ``door``, with tensors of its own, in a group that has the ranks 0 to ``size`` - 1."""
    everybody = [of_rank(r, 2, 3) for r in range(size)]
    whole, total = torch.cat(everybody), torch.stack(everybody).sum(0)

    def own() -> Tensor:
        return everybody[rank].clone()

    def empty(*shape: int) -> Tensor:
        return torch.full((*shape, 2, 3), -1.0)

    def blocks() -> list[Tensor]:
        return [empty() for _ in range(size)]

    def one(function: Callable[..., Any], output: Tensor, expected: Tensor) -> Call:
        return Call(lambda **how: function(output, **how), [output], [expected])

    def several(function: Callable[..., Any]) -> Call:
        outputs = blocks()
        return Call(lambda **how: function(outputs, **how), outputs, everybody)

    on_root = rank == root
    gathered = blocks() if on_root else []
    nested = [[empty(), empty()] for _ in range(size)]
    calls = {
        "all_reduce": one(door.all_reduce, own(), total),
        "all_reduce, premultiplied": one(
            lambda tensor, **how: door.all_reduce(tensor, door._make_nccl_premul_sum(0.5), **how), own(), total / 2
        ),
        "all_reduce_coalesced": one(lambda tensor, **how: door.all_reduce_coalesced([tensor], **how), own(), total),
        "all_gather_coalesced": Call(
            lambda **how: door.all_gather_coalesced(nested, [own(), own() + 1], **how),
            [tensor for pair in nested for tensor in pair],
            [tensor for each in everybody for tensor in (each, each + 1)],
        ),
        "broadcast": one(lambda tensor, **how: door.broadcast(tensor, root, **how), own(), of_rank(root, 2, 3)),
        "reduce": one(lambda tensor, **how: door.reduce(tensor, root, **how), own(), total if on_root else own()),
        "all_gather": several(lambda outputs, **how: door.all_gather(outputs, own(), **how)),
        "gather": Call(lambda **how: door.gather(own(), gathered or None, root, **how), gathered, everybody if on_root else []),
        "scatter": one(
            lambda tensor, **how: door.scatter(tensor, everybody if on_root else None, root, **how), empty(), of_rank(rank, 2, 3)
        ),
        "reduce_scatter": one(lambda tensor, **how: door.reduce_scatter(tensor, [own()] * size, **how), empty(), total),
        "all_to_all": several(lambda outputs, **how: door.all_to_all(outputs, [own()] * size, **how)),
        "all_to_all_single": one(
            lambda tensor, **how: door.all_to_all_single(tensor, own().repeat(size, 1), **how), torch.empty(2 * size, 3), whole
        ),
        "barrier": Call(lambda **how: door.barrier(**how)),
    }
    for name in ("all_gather_single", "all_gather_into_tensor", "_all_gather_base"):  # new, old and very old names
        if (gather := _function(door, name)) is not None:
            calls[name] = one(lambda out, f=gather, **how: f(out, own(), **how), torch.empty(2 * size, 3), whole)
            calls[f"{name}, stacked"] = one(
                lambda out, f=gather, **how: f(out, own(), **how), empty(size), torch.stack(everybody)
            )
    for name in ("reduce_scatter_single", "reduce_scatter_tensor", "_reduce_scatter_base"):
        if (scatter := _function(door, name)) is not None:
            calls[name] = one(lambda out, f=scatter, **how: f(out, own().repeat(size, 1), **how), empty(), total)
    if "timeout" in inspect.signature(door.barrier).parameters:
        calls["barrier, with a timeout"] = Call(lambda **how: door.barrier(timeout=timedelta(seconds=20), **how))
    if hasattr(door, "gather_single"):  # torch >= 2.14
        flat = torch.empty(2 * size, 3)
        calls["gather_single"] = Call(
            lambda **how: door.gather_single(own(), flat if on_root else None, dst=root, **how),
            [flat] if on_root else [],
            [whole] if on_root else [],
        )
    return calls


def _function(door: ModuleType, name: str) -> Callable[..., Any] | None:
    """None: this version of torch does not have it."""
    home = torch.distributed.distributed_c10d if door is torch.distributed else door
    function: Callable[..., Any] | None = getattr(home, name, None)
    return function


def still_works(size: int) -> bool:
    """Whether the world goes on after an error (collective)."""
    total = torch.ones(2)
    mpicoll.all_reduce(total)
    return total.tolist() == [size, size]

"""Pairs of collective calls that do not belong together: every kind of collective, each with another argument or another kind."""

from collections.abc import Callable
from itertools import combinations
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch.distributed import ReduceOp


class Call(NamedTuple):
    """One call. ``count``: elements of a block; with ``ReduceOp`` and root where the collective has them."""

    operation: str
    dtype: torch.dtype = torch.float32
    count: int = 4
    op: Any = ReduceOp.SUM
    root: int = 0

    def __str__(self) -> str:
        return f"{self.operation}-{str(self.dtype).removeprefix('torch.')}-{self.count}-{self.op.name}-{self.root}"

    def make(self, api: ModuleType, group: Any, rank: int, size: int, async_op: bool) -> Any:
        """Makes the call by the functions of ``mpicoll`` or ``torch.distributed``."""

        def block(blocks: int = 1) -> torch.Tensor:
            return torch.full((blocks * self.count,), rank + 1).to(self.dtype)

        def several() -> list[torch.Tensor]:
            return [block() for _ in range(size)]

        at_root = rank == self.root
        calls: dict[str, Callable[..., Any]] = {
            "all_reduce": lambda **more: api.all_reduce(block(), self.op, **more),
            "reduce": lambda **more: api.reduce(block(), self.root, self.op, **more),
            "broadcast": lambda **more: api.broadcast(block(), self.root, **more),
            "all_gather": lambda **more: api.all_gather(several(), block(), **more),
            "all_gather_into_tensor": lambda **more: api.all_gather_into_tensor(block(size), block(), **more),
            "reduce_scatter": lambda **more: api.reduce_scatter(block(), several(), self.op, **more),
            "reduce_scatter_tensor": lambda **more: api.reduce_scatter_tensor(block(), block(size), self.op, **more),
            "gather": lambda **more: api.gather(block(), several() if at_root else None, self.root, **more),
            "scatter": lambda **more: api.scatter(block(), several() if at_root else None, self.root, **more),
            "all_to_all": lambda **more: api.all_to_all(several(), several(), **more),
            "all_to_all_single": lambda **more: api.all_to_all_single(block(size), block(size), **more),
            "barrier": lambda **more: api.barrier(**more),
        }
        return calls[self.operation](group=group, async_op=async_op)


REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
ROOTED = ("reduce", "broadcast", "gather", "scatter")
OTHERS = ("all_gather", "all_gather_into_tensor", "all_to_all", "all_to_all_single")
OPERATIONS = tuple(dict.fromkeys([*REDUCTIONS, *ROOTED, *OTHERS, "barrier"]))


def pairs(large: bool = False) -> list[tuple[Call, Call]]:
    """Another dtype of equal or larger size, more elements, another reduction, another root, another collective.

    ``large``: the same with blocks of at least 16 MiB, most of which go through shared memory.
    """
    few, more, many = (1 << 22, (1 << 22) + 1, 1 << 23) if large else (4, 5, 50_000)
    found = []
    for operation in OPERATIONS[:-1]:
        usual = Call(operation, count=few)
        found += [(usual, usual._replace(dtype=torch.int32)), (usual, usual._replace(dtype=torch.float64))]
        found += [(usual, usual._replace(count=more)), (usual, usual._replace(count=many))]
        if operation in REDUCTIONS:
            found += [(usual, usual._replace(op=ReduceOp.MAX)), (usual, usual._replace(op=ReduceOp.AVG))]
        if operation in ROOTED:
            found.append((usual, usual._replace(root=1)))
    return found + [(Call(one, count=few), Call(other, count=few)) for one, other in combinations(OPERATIONS, 2)]

"""What all_reduce does with sparse tensors (torch.sparse_coo), such as the gradients of nn.Embedding(sparse=True).

Ranks hold different places, and not equally many of them. Everybody gets everybody's places and values and adds them up in
the order of the ranks, so that the sum has the same bits everywhere.

    coalesce ──► header: is everybody's tensor alike, how much comes ──► indices, values ──► add up ──► the tensor, in place
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from mpicoll._tensors import reductions
from mpicoll._tensors.reductions import Op
from mpicoll.errors import UnsupportedReduction

# What torch can add up, and as what: halves in float32, rounded once.
SUMMED_AS: dict[torch.dtype, torch.dtype] = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    **{
        dtype: dtype
        for dtype in (
            torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
            torch.float32, torch.float64, torch.complex64, torch.complex128,
        )
    },
}  # fmt: skip
NUMBERS = list(SUMMED_AS)
MOST_DIMENSIONS = 64  # of any tensor of torch's
HEADER = 4 + MOST_DIMENSIONS  # number of values, dtype, sparse dimensions, dimensions, sizes


def coalesced(operation: str, tensor: Tensor, op: Op) -> Tensor:
    """What this rank contributes: on the CPU, each place once, in the dtype in which it is added up.

    Raises: UnsupportedReduction: not SUM nor AVG, or a dtype that torch cannot add up.
    """
    reductions.lookup(operation, tensor.dtype, op)
    if not (op == ReduceOp.SUM or op == ReduceOp.AVG) or tensor.dtype not in SUMMED_AS:
        raise UnsupportedReduction(
            f"{operation}: sparse tensors have SUM and AVG only, of dtypes that torch can coalesce, got {op} on {tensor.dtype}; "
            "use .to_dense()"
        )
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():  # torch coalesces an inference tensor only there
        return tensor.detach().cpu().to(SUMMED_AS[tensor.dtype]).coalesce()


def header(source: Tensor, dtype: torch.dtype) -> Tensor:
    """What this rank has to tell before its indices and values."""
    known = [source._nnz(), NUMBERS.index(dtype), source.sparse_dim(), source.dim(), *source.shape]
    return torch.tensor(known + [0] * (HEADER - len(known)), dtype=torch.int64, device="cpu")


def counts(operation: str, headers: Tensor) -> list[int]:
    """How many values each rank has.

    Raises: ValueError: the ranks' tensors are not alike; on every rank, since all see all headers.
    """
    told: list[list[int]] = headers.tolist()
    for rank, theirs in enumerate(told):
        if theirs[1:] != told[0][1:]:
            raise ValueError(
                f"{operation}: sparse tensors must have one dtype, shape and number of sparse dimensions on all ranks; "
                f"rank 0 has {_named(told[0])}, rank {rank} has {_named(theirs)}"
            )
    return [theirs[0] for theirs in told]


def _named(told: list[int]) -> str:
    _, dtype, sparse_dim, dim, *sizes = told
    return f"{NUMBERS[dtype]} of shape {tuple(sizes[:dim])} with {sparse_dim} sparse dimensions"


def add_up(tensor: Tensor, indices: Sequence[Tensor], values: Sequence[Tensor], op: Op) -> None:
    """The sum, or mean, of all ranks' parts into ``tensor``, coalesced."""
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        parts = torch.sparse_coo_tensor(
            torch.cat(list(indices), 1), torch.cat(list(values)), tensor.shape, device="cpu", check_invariants=False
        )
        total = parts.coalesce()
        result = _mean(total.values(), len(values)) if op == ReduceOp.AVG else total.values()
        tensor.copy_(
            torch.sparse_coo_tensor(
                total.indices(), result.to(tensor.dtype), tensor.shape, device="cpu", check_invariants=False, is_coalesced=True
            )
        )


def _mean(total: Tensor, size: int) -> Tensor:
    return total / size if total.is_floating_point() or total.is_complex() else reductions.truncated(total, size)

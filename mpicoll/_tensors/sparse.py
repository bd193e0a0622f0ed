"""all_reduce of sparse tensors (torch.sparse_coo), such as the gradients of nn.Embedding(sparse=True).

Ranks hold different indices, and different numbers of them. Every rank gets the indices and values of all ranks and adds them up
in the order of the ranks, so that the sum has the same bits on all ranks.

    coalesce ──► headers: are the tensors alike, how many values ──► indices, values ──► add up ──► the tensor, in place
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from mpicoll._base.errors import DifferentTensors, UnsupportedReduction
from mpicoll._tensors import reductions
from mpicoll._tensors.reductions import Op

# The dtypes that torch can add up, and the dtype of the sum: halves in float32, rounded once.
EXACT = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float32, torch.float64, torch.complex64, torch.complex128,
)  # fmt: skip
SUMMED_AS = dict(zip(EXACT, EXACT, strict=True)) | dict.fromkeys(reductions.HALVES, torch.float32)
NUMBERS = list(SUMMED_AS)
MOST_DIMENSIONS = 64  # torch allows no more for any tensor
HEADER = 4 + MOST_DIMENSIONS  # number of values, dtype, sparse dimensions, dimensions, sizes


def coalesced(operation: str, tensor: Tensor, op: Op) -> Tensor:
    """Returns this rank's contribution: on the CPU, each index once, in the dtype of the sum.

    Raises:
        UnsupportedReduction: The op is not SUM or AVG, or torch cannot add up this dtype.
    """
    reductions.lookup(operation, tensor.dtype, op)
    if not (op == ReduceOp.SUM or op == ReduceOp.AVG) or tensor.dtype not in SUMMED_AS:
        raise UnsupportedReduction(
            f"{operation}: sparse tensors have SUM and AVG only, of dtypes that torch can coalesce, got {op} on {tensor.dtype}; "
            "use .to_dense()"
        )
    # torch coalesces an inference tensor only in inference mode.
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        return tensor.detach().cpu().to(SUMMED_AS[tensor.dtype]).coalesce()


def header(source: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the numbers that ranks exchange before indices and values: see HEADER."""
    fields = [source._nnz(), NUMBERS.index(dtype), source.sparse_dim(), source.dim(), *source.shape]
    return torch.tensor(fields + [0] * (HEADER - len(fields)), dtype=torch.int64, device="cpu")


def counts(operation: str, headers: Tensor) -> list[int]:
    """Returns the number of values on each rank.

    Raises:
        DifferentTensors: The ranks' tensors are not alike. Every rank raises it, because all see all headers.
    """
    rows: list[list[int]] = headers.tolist()
    for rank, row in enumerate(rows):
        if row[1:] != rows[0][1:]:
            raise DifferentTensors(
                f"{operation}: sparse tensors must have one dtype, shape and number of sparse dimensions on all ranks; "
                f"rank 0 has {_described(rows[0])}, rank {rank} has {_described(row)}"
            )
    return [row[0] for row in rows]


def _described(row: list[int]) -> str:
    _, dtype, sparse_dim, dim, *sizes = row
    return f"{NUMBERS[dtype]} of shape {tuple(sizes[:dim])} with {sparse_dim} sparse dimensions"


def add_up(tensor: Tensor, indices: Sequence[Tensor], values: Sequence[Tensor], op: Op) -> None:
    """Writes the coalesced sum or mean of the parts of all ranks into ``tensor``."""
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

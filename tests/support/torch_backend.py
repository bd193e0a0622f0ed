"""Helpers for tests of the torch backend: every rank's contribution, and the values that torch promises to return."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

both = pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool]
NEW_NAMES = hasattr(dist, "all_gather_single")  # torch 2.13 renamed all_gather_into_tensor and reduce_scatter_tensor


def of_rank(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What rank ``rank`` contributes: small whole numbers, exact in every dtype."""
    values = torch.arange(torch.Size(shape).numel()).reshape(shape) % 5 + rank
    return (values % 2 == 0) if dtype == torch.bool else values.to(dtype)


def same(tensor: Tensor, expected: Tensor) -> bool:
    return tensor.dtype == expected.dtype and torch.equal(tensor, expected)

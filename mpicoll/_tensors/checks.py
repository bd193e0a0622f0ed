"""Argument checks, made before a byte moves. Their errors name the call, the argument, and what is allowed."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mpicoll._base import launcher
from mpicoll._base.errors import DifferentTensors

_QUANTIZED = frozenset(
    getattr(torch, name) for name in ("quint8", "qint8", "qint32", "quint4x2", "quint2x4") if hasattr(torch, name)
)


def movable(operation: str, tensor: Any, what: str = "tensor") -> None:
    """Checks that the bytes of this argument, which the call names ``what``, are its value."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{operation}: {what} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{operation}: {what} has layout {tensor.layout}; only torch.strided tensors travel, use .to_dense()")
    if tensor.dtype in _QUANTIZED:
        raise TypeError(f"{operation}: {what} has the quantized dtype {tensor.dtype}; send .int_repr(), scale and zero point")
    if tensor.device.type == "meta":
        raise ValueError(f"{operation}: {what} is on device meta, and has no values")


def one_kind_of_device(operation: str, tensors: Sequence[Tensor]) -> torch.device:
    """Returns the device of the first tensor. The others must be on devices of the same kind, as with torch's own backends."""
    first = tensors[0].device
    for tensor in tensors:
        if tensor.device.type != first.type:
            raise ValueError(
                f"{operation}: one tensor is on {first} and another one on {tensor.device}; "
                "the tensors of an operation must all be on the same kind of device"
            )
    return first


def writable(operation: str, tensor: Tensor, what: str = "tensor") -> None:
    """Checks a tensor that an operation overwrites: no two of its elements may share memory."""
    if not tensor.is_contiguous() and shares_elements(tensor):
        raise ValueError(
            f"{operation}: {what} of shape {tuple(tensor.shape)} and strides {tensor.stride()} is expanded or overlaps itself: "
            "several of its elements share memory, so it cannot be overwritten; pass tensor.contiguous()"
        )


def shares_elements(tensor: Tensor) -> bool:
    """True if two elements of the tensor have the same address."""
    if tensor.numel() < 2:
        return False
    dims = sorted((stride, n) for stride, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)
    reach = 0  # largest offset that the dimensions so far can address
    for stride, n in dims:
        if stride <= reach:  # elements share memory, or the dimensions interlock: list all offsets
            offsets = torch.zeros(1, dtype=torch.int64, device="cpu")
            for stride, n in dims:
                offsets = (offsets.view(-1, 1) + torch.arange(n, device="cpu") * stride).view(-1)
            return bool(offsets.unique().numel() < offsets.numel())
        reach += stride * (n - 1)
    return False


def tensors(operation: str, what: str, argument: Any, count: int | None = None) -> list[Tensor]:
    """Returns the list after checking that it has ``count`` tensors (None: any number), and that all are `movable`."""
    if isinstance(argument, (Tensor, str)) or not isinstance(argument, Sequence):
        raise TypeError(f"{operation}: {what} must be a list of tensors, got {type(argument).__name__}")
    if count is not None and len(argument) != count:
        raise ValueError(f"{operation}: {what} has {len(argument)} tensors, the group has {count} ranks; it needs one for each")
    for index, tensor in enumerate(argument):
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.dtype in _QUANTIZED or not tensor.is_cpu:
            movable(operation, tensor, f"{what}[{index}]")
    return list(argument)


def given(tensors: Any) -> bool:
    """False for None and for an empty list, which both mean "no list"."""
    return tensors is not None and not (isinstance(tensors, Sequence) and len(tensors) == 0)


def same_dtype(operation: str, *named: tuple[str, Tensor]) -> None:
    first_name, first = named[0]
    for name, tensor in named[1:]:
        if tensor.dtype != first.dtype:
            raise TypeError(f"{operation}: {name} is {tensor.dtype}, {first_name} is {first.dtype}; they must be the same")


def same_numel(operation: str, a_name: str, a: int, b_name: str, b: int) -> None:
    if a != b:
        raise ValueError(f"{operation}: {a_name} has {a} elements, {b_name} needs {b}")


def integer(operation: str, what: str, value: Any) -> int:
    """Returns an int for anything that `operator.index` takes: an int, a NumPy integer, a tensor of one integer."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{operation}: {what} must be an int, got {type(value).__name__} {value!r}") from None


def group_rank(operation: str, what: str, rank: Any, size: int) -> int:
    number = rank if type(rank) is int else integer(operation, what, rank)
    if not 0 <= number < size:
        raise ValueError(f"{operation}: {what} is rank {number}, the group has ranks 0 to {size - 1}{launcher.if_alone()}")
    return number


def global_rank(operation: str, what: str, rank: Any, ranks: Sequence[int]) -> int:
    """Returns the group rank of a global rank, in a group of these ``ranks``."""
    number = integer(operation, what, rank)
    if number not in ranks:
        raise ValueError(
            f"{operation}: {what}: global rank {number} is not in the group, which has ranks {list(ranks)}{launcher.if_alone()}"
        )
    return ranks.index(number)


def timeout(operation: str, seconds: float) -> None:
    """Raises ValueError for a negative timeout."""
    if not seconds >= 0:
        raise ValueError(f"{operation}: a timeout must not be negative, got {seconds:g} s")


def tag(operation: str, value: Any, tag_ub: int) -> int:
    number = value if type(value) is int else integer(operation, "tag", value)
    if not 0 <= number <= tag_ub:
        raise ValueError(f"{operation}: tag {number} is out of range; this MPI takes 0 to {tag_ub}")
    return number


def splits(operation: str, what: str, given: Sequence[int] | None, rows: int, size: int) -> list[int]:
    """Returns the rows of dim 0 for each rank: the given splits, or equal shares."""
    if given is not None and not hasattr(given, "__len__"):
        raise TypeError(f"{operation}: {what} must be a list of ints or None, got {type(given).__name__}")
    if given is None or len(given) == 0:
        if rows % size:
            raise ValueError(f"{operation}: {what}: dim 0 has {rows} rows, which {size} ranks cannot share equally; give splits")
        return [rows // size] * size
    shares = [integer(operation, f"{what}[{index}]", share) for index, share in enumerate(given)]
    if len(shares) != size:
        raise ValueError(f"{operation}: {what} has {len(shares)} entries, the group has {size} ranks; it needs one for each")
    if min(shares) < 0 or sum(shares) != rows:
        raise ValueError(f"{operation}: {what} {shares} must be >= 0 and add up to {rows}, the rows of dim 0")
    return shares


def refuse_sizes(operation: str, wrong: Sequence[tuple[int, int]]) -> None:
    """Raises an error if there are pairs of ranks (i, j) for which rank i sends another size than rank j expects."""
    for i, j in wrong:
        raise DifferentTensors(f"{operation}: what rank {i} has for rank {j} has another size than what rank {j} expects from it")

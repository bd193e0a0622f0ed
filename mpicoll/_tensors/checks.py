"""What is allowed, said before a byte moves: which call, what was given, what would be right."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_QUANTIZED = frozenset(
    getattr(torch, name) for name in ("quint8", "qint8", "qint32", "quint4x2", "quint2x4") if hasattr(torch, name)
)
_DEVICES = frozenset({"cpu", "cuda"})


def movable(operation: str, tensor: Any, what: str = "tensor") -> None:
    """Raises TypeError or ValueError unless the bytes of this tensor are its value."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{operation}: {what} must be a torch.Tensor, got {type(tensor).__name__}")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{operation}: {what} has layout {tensor.layout}; only torch.strided tensors travel, use .to_dense()")
    if tensor.dtype in _QUANTIZED:
        raise TypeError(f"{operation}: {what} has the quantized dtype {tensor.dtype}; send .int_repr(), scale and zero point")
    if tensor.device.type not in _DEVICES:
        raise ValueError(f"{operation}: {what} is on device {tensor.device}; mpicoll moves cpu and cuda tensors")


def one_kind_of_device(operation: str, tensors: Sequence[Tensor]) -> torch.device:
    """The device of the tensors, the first one of several of a kind.

    Raises:
        ValueError: They are on different kinds of device. torch's backends carry one kind in each operation, too.
    """
    first = tensors[0].device
    for tensor in tensors:
        if tensor.device.type != first.type:
            raise ValueError(
                f"{operation}: one tensor is on {first} and another one on {tensor.device}; "
                "the tensors of an operation must all be on the same kind of device"
            )
    return first


def writable(operation: str, tensor: Tensor, what: str = "tensor") -> None:
    """Raises ValueError if elements of a tensor that would be overwritten share memory."""
    if not tensor.is_contiguous() and shares_elements(tensor):
        raise ValueError(
            f"{operation}: {what} of shape {tuple(tensor.shape)} and strides {tensor.stride()} is expanded or overlaps itself: "
            "several of its elements share memory, so it cannot be overwritten; pass tensor.contiguous()"
        )


def shares_elements(tensor: Tensor) -> bool:
    """True if two elements lie in one place."""
    if tensor.numel() < 2:
        return False
    dims = sorted((stride, n) for stride, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)
    reach = 0  # the last place that the dimensions up to here get to
    for stride, n in dims:
        if stride <= reach:  # it may be, or the dimensions interlock: count
            places = torch.zeros(1, dtype=torch.int64, device="cpu")
            for stride, n in dims:
                places = (places.view(-1, 1) + torch.arange(n, device="cpu") * stride).view(-1)
            return bool(places.unique().numel() < places.numel())
        reach += stride * (n - 1)
    return False


def tensors(operation: str, what: str, given: Any, count: int | None = None) -> list[Tensor]:
    """The list, checked: tensors all, and ``count`` of them."""
    if isinstance(given, (Tensor, str)) or not isinstance(given, Sequence):
        raise TypeError(f"{operation}: {what} must be a list of tensors, got {type(given).__name__}")
    if count is not None and len(given) != count:
        raise ValueError(f"{operation}: {what} has {len(given)} tensors, the group has {count} ranks; it needs one for each")
    for index, tensor in enumerate(given):
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.dtype in _QUANTIZED or not tensor.is_cpu:
            movable(operation, tensor, f"{what}[{index}]")
    return list(given)


def given(tensors: Any) -> bool:
    """False for None and for an empty list, which both stand for no list."""
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
    """An int, or what stands for one: a NumPy integer, a tensor of one integer."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{operation}: {what} must be an int, got {type(value).__name__} {value!r}") from None


def group_rank(operation: str, what: str, rank: Any, size: int) -> int:
    number = rank if type(rank) is int else integer(operation, what, rank)
    if not 0 <= number < size:
        raise ValueError(f"{operation}: {what} is rank {number}, the group has ranks 0 to {size - 1}")
    return number


def tag(operation: str, value: Any, tag_ub: int) -> int:
    number = value if type(value) is int else integer(operation, "tag", value)
    if not 0 <= number <= tag_ub:
        raise ValueError(f"{operation}: tag {number} is out of range; this MPI takes 0 to {tag_ub}")
    return number


def splits(operation: str, what: str, given: Sequence[int] | None, rows: int, size: int) -> list[int]:
    """Rows of dim 0 for each rank: as given, or equal shares.

    Raises: ValueError: the splits do not add up to ``rows``, or there are not as many as ranks, or no equal share exists.
    """
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

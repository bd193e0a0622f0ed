"""Tensors for tests: what each rank contributes, in every dtype and memory layout, and what one process computes from it.

Values are small whole numbers, exact in every dtype, so that the order of a summation cannot matter; ``bits_of_rank`` has
arbitrary bit patterns, for what only travels.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import reduce

import numpy as np
import torch
from torch import Tensor

INTEGERS = [
    torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64,
]  # fmt: skip
HALVES = [torch.float16, torch.bfloat16]
FLOATS = [*HALVES, torch.float32, torch.float64]
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]
OPAQUE = [
    getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
]
REDUCIBLE = [torch.bool, *INTEGERS, *FLOATS, *COMPLEX]
MOVABLE = [*REDUCIBLE, *OPAQUE]
EVERY_DTYPE = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


def of_rank(rank: int, dtype: torch.dtype, shape: Sequence[int] = (4, 6), salt: int = 0) -> Tensor:
    """What rank ``rank`` contributes: whole numbers, |x| <= 3 where the dtype has a sign, else 0 to 6."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    values = torch.randint(-3, 4, tuple(shape), generator=generator)
    if dtype == torch.bool:
        return values > 0
    if dtype in COMPLEX:
        imaginary = torch.randint(-3, 4, tuple(shape), generator=generator)
        return torch.complex(values.double(), imaginary.double()).to(dtype)
    if not dtype.is_signed:
        values += 3
    return values.to(dtype)


def bits_of_rank(rank: int, dtype: torch.dtype, shape: Sequence[int] = (4, 6), salt: int = 0) -> Tensor:
    """Random bytes of rank ``rank`` as a tensor, NaNs of all kinds among them."""
    count = torch.Size(shape).numel() * torch.empty(0, dtype=dtype).element_size()
    highest = 2 if dtype == torch.bool else 256
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    raw = torch.randint(0, highest, (count,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).view(tuple(shape))


def raw(tensor: Tensor) -> bytes:
    """The values as bytes in row-major order."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return ctypes.string_at(plain.data_ptr(), plain.nbytes) if plain.nbytes else b""


def same(tensor: Tensor, expected: Tensor) -> bool:
    """Equal in dtype, shape and every bit."""
    return tensor.dtype == expected.dtype and tensor.shape == expected.shape and raw(tensor) == raw(expected)


# -- layouts: the same values, other memory ----------------------------------------------------------------------------


def _inference(values: Tensor) -> Tensor:
    with torch.inference_mode():
        return values.clone()


def _inference_strided(values: Tensor) -> Tensor:
    with torch.inference_mode():
        return torch.stack([values, values], dim=-1)[..., 0]


def _strided(values: Tensor) -> Tensor:
    wide = values.new_zeros(*values.shape, 2)
    wide[..., 0] = values
    return wide[..., 0]


def _transposed(values: Tensor) -> Tensor:
    return values.transpose(0, -1).contiguous().transpose(0, -1)


def _offset(values: Tensor) -> Tensor:
    long = values.new_zeros(values.numel() + 5)
    part = long[3 : 3 + values.numel()].view(values.shape)
    part.copy_(values)
    return part


def _spread(values: Tensor) -> Tensor:
    """Contiguous, though the dimension of one element has a stride of its own."""
    room = values.new_zeros(7 * values.numel())
    view = room.as_strided(values.shape, (*values.stride()[:-1], 7))
    view.copy_(values)
    return view


def _non_leaf(values: Tensor) -> Tensor:
    return values.clone().requires_grad_().view_as(values).clone()


ALWAYS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "contiguous": ((4, 6), torch.clone),
    "scalar": ((), torch.clone),
    "empty": ((0,), torch.clone),
    "no columns": ((3, 0), torch.clone),
    "offset": ((3, 5), _offset),
    "one element": ((1,), _spread),
    "one column": ((3, 1), _spread),
    "strided": ((4, 6), _strided),
    "strided scalar": ((), _strided),
    "transposed": ((4, 6), _transposed),
    "channels last": ((2, 3, 2, 2), lambda values: values.contiguous(memory_format=torch.channels_last)),
    "inference": ((4, 6), _inference),
    "inference strided": ((4, 6), _inference_strided),
}
WITH_GRADIENT: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "leaf": ((4, 6), lambda values: values.clone().requires_grad_()),
    "strided leaf": ((4, 6), lambda values: _strided(values).requires_grad_()),
    "not a leaf": ((4, 6), _non_leaf),
    "neg": ((4, 6), lambda values: torch._neg_view(_negated(values))),
}
WITH_CONJ: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "conj": ((4, 6), lambda values: _conjugated(values).conj()),
    "conj transposed": ((4, 6), lambda values: _transposed(_conjugated(values)).conj()),
}


def _negated(values: Tensor) -> Tensor:
    """Sign bits flipped, NaNs included."""
    return torch._neg_view(values).resolve_neg()


def _conjugated(values: Tensor) -> Tensor:
    parts = torch.view_as_real(values).clone()
    parts[..., 1] = _negated(parts[..., 1])
    return torch.view_as_complex(parts)


def layouts(dtype: torch.dtype) -> dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]]:
    """The layouts that a tensor of this dtype can have: name -> (a shape, values -> tensor of the same values)."""
    found = dict(ALWAYS)
    if dtype in FLOATS or dtype in COMPLEX:
        found |= WITH_GRADIENT
    if dtype in COMPLEX:
        found |= WITH_CONJ
    return found


# -- what one process computes -----------------------------------------------------------------------------------------

BITWISE = {"BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor}
LOGICAL = {
    "SUM": np.logical_or, "MAX": np.logical_or, "BOR": np.logical_or,
    "PRODUCT": np.logical_and, "MIN": np.logical_and, "BAND": np.logical_and, "BXOR": np.logical_xor,
}  # fmt: skip
ARITHMETIC = {"SUM": np.add, "PRODUCT": np.multiply, "MIN": np.minimum, "MAX": np.maximum, **BITWISE}


def reduced(op: str, given: Sequence[Tensor], factor: float = 1.0) -> Tensor:
    """The reduction of contiguous contributions, for every dtype and op that has a right answer."""
    dtype = given[0].dtype
    if dtype == torch.bool or dtype in INTEGERS:  # NumPy has all of them, and wraps
        if op == "AVG":  # of the wrapped sum, towards zero, in Python's integers
            total = reduced("SUM", given)
            found = [abs(value) // len(given) * (1 if value >= 0 else -1) for value in total.reshape(-1).tolist()]
            return torch.tensor(found, dtype=dtype).reshape(total.shape)
        function = LOGICAL[op] if dtype == torch.bool else ARITHMETIC[op]
        found = reduce(lambda a, b: np.asarray(function(a, b)), [tensor.numpy() for tensor in given])
        return torch.from_numpy(np.asarray(found, dtype=given[0].numpy().dtype).copy())
    if dtype in COMPLEX:
        parts = [torch.view_as_real(tensor) for tensor in given]
        return torch.view_as_complex(reduced(op, parts, factor))
    wide = [tensor.float() if dtype in HALVES else tensor for tensor in given]
    stacked = torch.stack([tensor * factor for tensor in wide] if op == "PREMUL_SUM" else wide)
    if op in ("SUM", "PREMUL_SUM"):
        return stacked.sum(0).to(dtype)
    if op == "AVG":
        return (stacked.sum(0) / len(given)).to(dtype)
    if op == "PRODUCT":
        return stacked.prod(0).to(dtype)
    return (stacked.amin(0) if op == "MIN" else stacked.amax(0)).to(dtype)

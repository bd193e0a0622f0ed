"""The one table that decides dtype x reduction.

An entry names the MPI datatype and operation that do the work, and the functions that encode and decode the tensor. There is no
default: a combination without an entry is refused before a byte moves. As a page: docs/reference/reductions.md.

    native      MPI reduces the bytes as they are                        most integer reductions; SUM, PRODUCT of float32, float64
    kernel      torch encodes, MPI reduces the code, torch decodes       all other reductions that have a right answer
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from mpicoll._base.errors import UnsupportedReduction

Op = ReduceOp | ReduceOp.RedOpType

# Encode: (a contiguous tensor, the op) -> a contiguous tensor, new or a view; it never writes into its argument.
Encode = Callable[[Tensor, Op], Tensor]
# Decode: (the reduced code, the tensor that receives the result: contiguous, group size) -> None
Decode = Callable[[Tensor, Tensor, int], None]


class Reduction(NamedTuple):
    """How one dtype is reduced by one operation."""

    mpi_type: str  # names of MPI's datatype and operation
    mpi_op: str
    encode: Encode | None = None  # None: MPI reduces the bytes as they are
    decode: Decode | None = None  # None: MPI's result needs no decoding
    scale: int = 1  # coded elements per element (2 for complex numbers: real and imaginary parts are reduced side by side)

    @property
    def native(self) -> bool:
        return self.encode is None


OPS: dict[str, ReduceOp.RedOpType] = {
    name: getattr(ReduceOp, name) for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
}
INTEGERS: dict[torch.dtype, str] = {
    getattr(torch, name): f"{name.upper()}_T"
    for name in ("uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
}
WIDE_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)  # torch has few kernels for them
FLOATS: dict[torch.dtype, str] = {torch.float32: "FLOAT", torch.float64: "DOUBLE"}
HALVES = (torch.float16, torch.bfloat16)
COMPLEX: dict[torch.dtype, torch.dtype] = {
    torch.complex32: torch.float16, torch.complex64: torch.float32, torch.complex128: torch.float64,
}  # fmt: skip
# Integers of the size of a float. Their order is that of the floats once the sign is folded in.
ORDER: dict[torch.dtype, tuple[torch.dtype, str]] = {
    torch.float16: (torch.int16, "INT16_T"), torch.bfloat16: (torch.int16, "INT16_T"),
    torch.float32: (torch.int32, "INT32_T"), torch.float64: (torch.int64, "INT64_T"),
}  # fmt: skip


def name(op: Op) -> str:
    """The name of an operation in torch, such as "SUM"."""
    return next((name for name, value in OPS.items() if op == value), str(op))


def lookup(operation: str, dtype: torch.dtype, op: Op) -> Reduction:
    """Returns the table's entry.

    Raises:
        TypeError: ``op`` is not a ReduceOp.
        UnsupportedReduction: No right answer exists; the message says what to do.
    """
    if not isinstance(op, (ReduceOp, ReduceOp.RedOpType)):
        raise TypeError(f"{operation}: op must be a torch.distributed.ReduceOp, got {type(op).__name__} {op!r}")
    # By type: a dictionary tests x == ReduceOp(x), which is False, although ReduceOp(x) == x is True.
    kind: Any = op.op if type(op) is ReduceOp else op  # type: ignore[attr-defined]
    entry = TABLE.get((dtype, kind))
    if entry is None:
        _refuse(operation, dtype, op)
    if op == ReduceOp.PREMUL_SUM:
        factor = _factor(operation, op)
        if isinstance(factor, Tensor) and factor.is_complex() and dtype not in COMPLEX:
            raise UnsupportedReduction(f"{operation}: PREMUL_SUM on {dtype}: the factor {factor.item()} is complex")
    return entry


def _refuse(operation: str, dtype: torch.dtype, op: Op) -> NoReturn:
    if not any(known == dtype for known, _ in TABLE):
        why = "this dtype travels but does not reduce; cast it first, to torch.float32, say"
    elif name(op) in ("BAND", "BOR", "BXOR"):
        why = "bitwise operations need an integer or bool dtype"
    elif name(op) == "AVG":
        why = "it needs a number; cast it first, to torch.float32, say"
    elif name(op) == "PREMUL_SUM":
        why = "it needs a floating or complex dtype; multiply first and use SUM"
    elif dtype in COMPLEX:
        why = "complex numbers have SUM, AVG and PREMUL_SUM only"
    else:
        why = "there is no such entry in the table of reductions"
    raise UnsupportedReduction(f"{operation}: {name(op)} on {dtype}: {why}")


# -- encoders and decoders ---------------------------------------------------------------------------------------------


def _copy(code: Tensor, out: Tensor, size: int) -> None:
    out.copy_(code.view(out.shape))


def _bool_code(tensor: Tensor, op: Op) -> Tensor:
    return tensor.view(torch.uint8)


def _from_bool_code(code: Tensor, out: Tensor, size: int) -> None:
    out.copy_(code.view(torch.bool).view(out.shape))


def _upcast(tensor: Tensor, op: Op) -> Tensor:
    # Halves are summed in float32 and rounded once, at the end. So the error does not grow with the number of ranks, the sum of
    # an average cannot overflow, and every rank rounds the same bits.
    return tensor.to(torch.float32)


# Note [Sums of 8 and 16 bits]
# If the processor has AVX, Open MPI 5.0.11 adds integers of 8 and 16 bits by saturating instructions, 64 bytes at a time. It
# adds the remaining elements in the usual way: two tensors of 33 int8 127 became 32 times 127 and once -2. So the sum is made in
# int32.


def _int32(tensor: Tensor, op: Op) -> Tensor:
    return tensor.to(torch.int32)


def _same(tensor: Tensor, op: Op) -> Tensor:
    return tensor


def _average(code: Tensor, out: Tensor, size: int) -> None:
    out.copy_((code / size).view(out.shape))


# Note [Averages of integers]
# The result is that of NCCL (ncclAvg): the sum wraps around as SUM does, and the quotient is truncated towards zero. Lightning
# averages integer metrics with AVG on every backend except gloo.


def truncated(total: Tensor, size: int) -> Tensor:
    """Divides signed integers or uint8 by ``size``. The result has the same width or a larger one."""
    wide = total if total.element_size() >= 4 else total.to(torch.int32)  # int8 has no 200 to divide by
    return torch.div(wide, size, rounding_mode="trunc")


def _truncated(code: Tensor, out: Tensor, size: int) -> None:
    out.copy_(truncated(code.to(out.dtype), size).view(out.shape))


_SIGNED = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def unsigned_truncated(code: Tensor, out: Tensor, size: int) -> None:
    """Divides unsigned integers, possibly seen as signed ones of their size, by ``size``. torch divides only signed ones."""
    bits = code.view(_SIGNED[code.element_size()])
    out.view(_SIGNED[out.element_size()]).copy_(_unsigned_quotient(bits, out.element_size(), size).view(out.shape))


def _unsigned_quotient(bits: Tensor, width: int, size: int) -> Tensor:
    """Divides the last ``width`` bytes of each element, as unsigned integers, by ``size``. The result may have any width."""
    if width == 2:
        return (bits.to(torch.int32) & 0xFFFF) // size
    if width == 4:
        return (bits.to(torch.int64) & 0xFFFFFFFF) // size
    # Halve first, so that the sign bit is free. Twice the quotient is exact or too small by 1.
    quotient = ((bits >> 1) & torch.iinfo(torch.int64).max) // size * 2
    return quotient + (bits - quotient * size >= size)


def _factor(operation: str, op: Op) -> float | Tensor:
    state: Any = op.__getstate__() if isinstance(op, ReduceOp) else None  # torch < 2.13 has no attribute `factor`
    factor = state[1] if isinstance(state, tuple) else None
    if factor is None:
        raise ValueError(f"{operation}: PREMUL_SUM carries no factor; make it with torch.distributed._make_nccl_premul_sum(x)")
    return factor  # type: ignore[no-any-return]


def _scaled(tensor: Tensor, op: Op) -> Tensor:
    wide = tensor.to(torch.float32) if tensor.dtype in HALVES else tensor
    factor = _factor("PREMUL_SUM", op)
    if isinstance(factor, Tensor):
        factor = factor.to(device=wide.device, dtype=wide.dtype)
    return wide * factor


def _scaled_complex(tensor: Tensor, op: Op) -> Tensor:
    factor = _factor("PREMUL_SUM", op)
    if not (isinstance(factor, Tensor) and factor.is_complex()):
        return _scaled(torch.view_as_real(tensor), op)
    wide = tensor.to(torch.complex64) if tensor.dtype == torch.complex32 else tensor
    return torch.view_as_real(wide * factor.to(device=wide.device, dtype=wide.dtype))


def _sortable(smallest: bool) -> Encode:
    """Encodes floats as integers of the same order. A NaN becomes the integer that wins, so the result is NaN.

    MPI's own MIN and MAX on floats keep or drop a NaN depending on the implementation and on the rank that holds it.
    ``smallest``: for MIN, in which the smallest integer wins.
    """

    def encode(tensor: Tensor, op: Op) -> Tensor:
        integer = ORDER[tensor.dtype][0]
        limits = torch.iinfo(integer)
        code = _fold(tensor.view(integer))
        return code.masked_fill_(tensor.isnan(), limits.min if smallest else limits.max)

    return encode


def _from_sortable(code: Tensor, out: Tensor, size: int) -> None:
    out.copy_(_fold(code).view(out.dtype).view(out.shape))


def _fold(bits: Tensor) -> Tensor:
    """Reverses the order of the bit patterns of negative floats. It is its own inverse."""
    limits = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (limits.bits - 1)) & limits.max)


def _parts(encode: Encode) -> Encode:
    def encoded(tensor: Tensor, op: Op) -> Tensor:
        return encode(torch.view_as_real(tensor), op)

    return encoded


def _from_parts(decode: Decode) -> Decode:
    def decoded(code: Tensor, out: Tensor, size: int) -> None:
        decode(code, torch.view_as_real(out), size)

    return decoded


# -- the table ---------------------------------------------------------------------------------------------------------


def _build() -> dict[tuple[torch.dtype, ReduceOp.RedOpType], Reduction]:
    table: dict[tuple[torch.dtype, ReduceOp.RedOpType], Reduction] = {}

    def add(dtype: torch.dtype, op: str, *entry: object, **more: object) -> None:
        table[dtype, OPS[op]] = Reduction(*entry, **more)  # type: ignore[arg-type]

    for dtype, mpi_type in INTEGERS.items():
        add(dtype, "PRODUCT", mpi_type, "PROD")
        for op in ("SUM", "MIN", "MAX", "BAND", "BOR", "BXOR"):
            add(dtype, op, mpi_type, op)
        average = unsigned_truncated if dtype in WIDE_UNSIGNED else _truncated
        if dtype.itemsize <= 2:
            add(dtype, "SUM", "INT32_T", "SUM", _int32, _copy)
            add(dtype, "AVG", "INT32_T", "SUM", _int32, average)
        else:
            add(dtype, "AVG", mpi_type, "SUM", _same, average)

    # MPI has no SUM on C_BOOL, and a sum of bytes could leave 3 in a bool. Logical operations give 0 or 1.
    for mpi_op, ops in {"LOR": ("SUM", "MAX", "BOR"), "LAND": ("PRODUCT", "MIN", "BAND"), "LXOR": ("BXOR",)}.items():
        for op in ops:
            add(torch.bool, op, "UINT8_T", mpi_op, _bool_code, _from_bool_code)

    for dtype, mpi_type in FLOATS.items():
        add(dtype, "SUM", mpi_type, "SUM")
        add(dtype, "PRODUCT", mpi_type, "PROD")
        add(dtype, "AVG", mpi_type, "SUM", _same, _average)
        add(dtype, "PREMUL_SUM", mpi_type, "SUM", _scaled, _copy)
    for dtype in HALVES:
        add(dtype, "SUM", "FLOAT", "SUM", _upcast, _copy)
        add(dtype, "PRODUCT", "FLOAT", "PROD", _upcast, _copy)
        add(dtype, "AVG", "FLOAT", "SUM", _upcast, _average)
        add(dtype, "PREMUL_SUM", "FLOAT", "SUM", _scaled, _copy)
    for dtype, (_, mpi_type) in ORDER.items():
        add(dtype, "MIN", mpi_type, "MIN", _sortable(smallest=True), _from_sortable)
        add(dtype, "MAX", mpi_type, "MAX", _sortable(smallest=False), _from_sortable)

    for dtype, real in COMPLEX.items():
        for op in ("SUM", "AVG", "PREMUL_SUM"):
            part = table[real, OPS[op]]
            encode = _scaled_complex if op == "PREMUL_SUM" else _parts(part.encode or _same)
            add(dtype, op, part.mpi_type, "SUM", encode, _from_parts(part.decode or _copy), scale=2)
    return table


TABLE = _build()

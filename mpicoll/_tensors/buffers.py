"""From a tensor to contiguous memory on its device, and back.

Strides, subclasses, autograd and the lazy conj and neg bits end here: below, there are bytes in row-major order on every rank.
Memory is a plain contiguous tensor: the tensor itself or a packed copy.

    readable    memory with the tensor's values
    writable    the same, for an operation that overwrites the tensor
    copy_back   copies what was written into a packed copy into the tensor: same storage, same strides

Whether autograd counts the result as a write is up to the caller of the engine (versions.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from mpicoll._tensors import checks

STRIDED = torch.strided

# One byte per element, and torch has no copy_ for them.
UNCOPIED = frozenset(
    getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in range(1, 8) if hasattr(torch, f"{sign}int{bits}")
)

# dtypes that need no check and no special copy
ORDINARY = frozenset(
    getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"),
        *("complex64", "complex128"),
    )
)


def readable(operation: str, tensor: Tensor, what: str = "tensor") -> Tensor:
    """Returns memory with the tensor's values.

    Raises:
        TypeError, ValueError: The bytes of the tensor are not its value (`checks.movable`).
    """
    checks.movable(operation, tensor, what)
    return tensor if is_plain(tensor) else packed(tensor)


def writable(operation: str, tensor: Tensor, what: str = "tensor") -> Tensor:
    """Returns memory to be written, wholly or only its front (by a message shorter than the tensor): the rest keeps its values.

    Raises:
        TypeError, ValueError: As `readable`.
        ValueError: Elements of the tensor share memory (an expanded tensor), so the result has no single value.
    """
    checks.movable(operation, tensor, what)
    checks.writable(operation, tensor, what)
    return tensor if is_plain(tensor) else packed(tensor)


def copy_back(tensors: Sequence[Tensor], memories: Sequence[Tensor]) -> None:
    """Copies each packed copy into its tensor. Does nothing where the memory is the tensor itself."""
    for tensor, memory in zip(tensors, memories, strict=True):
        if memory is not tensor:
            copy_into(tensor, memory)


def are_dense_cpu(tensors: object, count: int, dtype: torch.dtype) -> bool:
    """True for a list of ``count`` tensors of this dtype that all pass `is_dense_cpu`."""
    if type(tensors) is not list or len(tensors) != count:
        return False
    return all(is_dense_cpu(tensor) and tensor.dtype is dtype for tensor in tensors)


def is_dense_cpu(tensor: Tensor) -> bool:
    """True for a contiguous CPU tensor of an ordinary class and dtype. It is its own memory and needs no checks."""
    kind = type(tensor)
    if kind is not Tensor and kind is not Parameter:
        return False
    return (
        (dtype := tensor.dtype) in ORDINARY
        and tensor.layout is STRIDED
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not (dtype.is_complex and tensor.is_conj())
    )


def is_plain(tensor: Tensor) -> bool:
    """True if the tensor's own memory is what others should see."""
    strided = tensor.layout is STRIDED and tensor.is_contiguous() and not tensor.is_neg()
    return strided and (type(tensor) is Tensor or has_memory(tensor)) and not tensor.is_conj()


def has_memory(tensor: Tensor) -> bool:
    """False for a subclass that stands for another tensor: copies pass through an AsyncCollectiveTensor, its address is 0."""
    return tensor.data_ptr() != 0 or tensor.numel() == 0


def packed(tensor: Tensor) -> Tensor:
    """A new contiguous tensor of the same values, shape, dtype and device.

    Raises: TypeError: the tensor stands for several (a DTensor), and so does its copy.
    """
    with torch.no_grad():
        if tensor.dtype in UNCOPIED:
            return packed(tensor.view(torch.uint8)).view(tensor.dtype)
        source = tensor.detach().resolve_conj().resolve_neg()
        if source.is_contiguous() and source.data_ptr() != tensor.data_ptr():
            return source
        copy = source.clone(memory_format=torch.contiguous_format)
    if not has_memory(copy):
        name = type(tensor).__name__
        raise TypeError(f"mpicoll: a {name} has no memory of its own to communicate; pass the tensor inside (DTensor.to_local())")
    return copy


def copy_into(tensor: Tensor, values: Tensor) -> None:
    """``tensor.copy_(values)`` for whatever the tensor is: a leaf that requires grad, an inference tensor, a view."""
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        target = uncounted(tensor)
        if target.dtype in UNCOPIED:
            target, values = target.view(torch.uint8), values.view(torch.uint8)
        target.copy_(values.view(target.shape))


def uncounted(tensor: Tensor) -> Tensor:
    """The same memory, for a write that does not raise the tensor's version counter; see _tensors/versions.py."""
    if tensor.is_inference():
        return tensor
    return tensor.data if type(tensor) is Tensor or type(tensor) is Parameter else tensor.detach()


def raw(memory: Tensor) -> Tensor:
    """Contiguous memory as bytes of one dimension, which may be written whatever autograd thinks of them."""
    return flat(memory, torch.uint8)


def flat(memory: Tensor, dtype: torch.dtype) -> Tensor:
    """Contiguous memory as elements of one dimension, likewise."""
    with torch.inference_mode(False):
        alias = uncounted(memory)
        if alias.is_inference():  # which may not be written out of inference mode; its memory may
            alias = alias.new_empty(0).set_(memory.untyped_storage(), memory.storage_offset(), memory.shape, memory.stride())
        # Not reshape(-1), which keeps a stride of 0 of one element that was expanded.
        return alias.as_strided((alias.numel(),), (1,)).view(dtype)


def overlap(a: Tensor, b: Tensor) -> bool:
    """True if two contiguous tensors share memory, which MPI forbids between what it reads and what it writes."""
    first, second = a.data_ptr(), b.data_ptr()
    return first < second + b.nbytes and second < first + a.nbytes and a.nbytes > 0 and b.nbytes > 0

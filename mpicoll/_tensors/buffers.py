"""One step from a tensor to contiguous memory of its device, and back.

Strides, subclasses, autograd and the lazy conj and neg bits end here: below, there are bytes in row-major order on every rank.

    outgoing   read       the tensor itself, or a packed copy
    incoming   written    the tensor itself, or a packed copy that ``deliver`` copies back: same storage, same strides
    ordered    where a GPU's memory is among it: what carries the operation out, behind what the caller has launched

The result of an operation is in place in either case. Whether autograd counts it as a write is up to the caller of the engine
(_tensors/versions.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

from mpicoll._cuda import streams
from mpicoll._tensors import checks

T = TypeVar("T")

STRIDED = torch.strided

# One byte per element, and no copy_ in torch.
UNCOPIED = frozenset(
    getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in range(1, 8) if hasattr(torch, f"{sign}int{bits}")
)


BARE = frozenset(
    getattr(torch, name)
    for name in (
        *("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"),
        *("complex64", "complex128"),
    )
)


class Message:
    """A tensor on its way through MPI.

    ``memory``: a plain contiguous tensor on the same device, the tensor itself or its packed copy; hold it while it is used.
    """

    __slots__ = ("memory", "tensor")

    def __init__(self, tensor: Tensor, memory: Tensor) -> None:
        self.tensor = tensor
        self.memory = memory

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    @property
    def address(self) -> int:
        return self.memory.data_ptr()

    def deliver(self) -> None:
        """Copies a packed copy back into the tensor; nothing to do where the tensor itself was written."""
        if self.memory is not self.tensor:
            copy_into(self.tensor, self.memory)


def ordered(transfer: Callable[[], T], memories: Sequence[Tensor]) -> Callable[[], T]:
    """``transfer``, which uses ``memories``; where some are a GPU's, on our streams, behind what was launched until now."""
    if all(memory.is_cpu for memory in memories):
        return transfer
    marks = streams.marks(memory.device for memory in memories if not memory.is_cpu)

    def behind() -> T:
        # What is made inside may be used again elsewhere, by who is in inference mode and who is not.
        with torch.inference_mode(False), streams.ours(marks):
            return transfer()

    return behind


def is_plain(tensor: Tensor) -> bool:
    """True if the tensor's own memory is what others should see."""
    strided = tensor.layout is STRIDED and tensor.is_contiguous() and not tensor.is_neg()
    return strided and (type(tensor) is Tensor or has_memory(tensor)) and not tensor.is_conj()


def is_bare(tensor: Tensor) -> bool:
    """``is_plain`` of a CPU's tensor that also needs no check: of a usual type and dtype. False sends it the long way."""
    kind = type(tensor)
    if kind is not Tensor and kind is not Parameter:
        return False
    return (
        (dtype := tensor.dtype) in BARE
        and tensor.layout is STRIDED
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not (dtype.is_complex and tensor.is_conj())
    )


def has_memory(tensor: Tensor) -> bool:
    """False for a subclass that stands for another tensor: copies pass through an AsyncCollectiveTensor, its address is 0."""
    return tensor.data_ptr() != 0 or tensor.numel() == 0


def outgoing(operation: str, tensor: Tensor) -> Message:
    """For memory that is read."""
    checks.movable(operation, tensor)
    return Message(tensor, tensor if is_plain(tensor) else packed(tensor))


def incoming(operation: str, tensor: Tensor) -> Message:
    """For memory that is written, wholly or its front only (a message shorter than the tensor): the rest stays as it was.

    Raises: ValueError: elements of the tensor share memory (an expanded tensor), so the result has no one value.
    """
    checks.movable(operation, tensor)
    checks.writable(operation, tensor)
    if is_plain(tensor):
        return Message(tensor, tensor)
    return Message(tensor, packed(tensor))


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

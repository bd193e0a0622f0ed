"""One step from a tensor to memory that MPI may touch, and back.

Strides, devices, autograd and the lazy conj and neg bits end here: below, there is an address and a number of bytes, in
row-major order on every rank.

    outgoing   MPI reads    the tensor itself, or a packed copy
    incoming   MPI writes   the tensor itself, or a packed copy that ``deliver`` copies back: same storage, same strides

The result of an operation is in place in either case, and the tensor's version counter goes up, so that autograd notices
that a tensor it had saved was overwritten.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C import _increment_version
from torch.nn import Parameter

from mpicoll.cuda import streams
from mpicoll.engine import checks

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

    ``memory``: a plain contiguous CPU tensor, the tensor itself or its packed copy; hold it while MPI uses it. ``after``: of a
    tensor on a GPU that MPI writes, an event before which nothing may be delivered (cuda/streams.py, Note [Order]).
    """

    __slots__ = ("after", "memory", "tensor")

    def __init__(self, tensor: Tensor, memory: Tensor, after: Any = None) -> None:
        self.tensor = tensor
        self.memory = memory
        self.after = after

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    @property
    def address(self) -> int:
        return self.memory.data_ptr()

    def deliver(self, values: Tensor | None = None) -> None:
        """Copies a packed copy back into the tensor; nothing to do where MPI wrote into the tensor itself.

        Args:   values: what arrived, where that is not in ``memory``.
        """
        arrived = self.memory if values is None else values
        if arrived is self.tensor:
            return
        if self.after is None:
            copy_into(self.tensor, arrived)
            return
        with streams.delivery(self.tensor, self.after):
            copy_into(self.tensor, arrived)


def is_plain(tensor: Tensor) -> bool:
    """True if the tensor's own memory is what MPI should see."""
    strided = tensor.layout is STRIDED and tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg()
    return strided and (type(tensor) is Tensor or has_memory(tensor)) and not tensor.is_conj()


def is_bare(tensor: Tensor) -> bool:
    """``is_plain`` of a tensor that also needs no check: of a usual type and dtype. False sends it the long way."""
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
    """For memory that MPI reads."""
    checks.movable(operation, tensor)
    return Message(tensor, tensor if is_plain(tensor) else packed(tensor))


def incoming(operation: str, tensor: Tensor) -> Message:
    """For memory that MPI writes, wholly or its front only (a message shorter than the tensor): the rest stays as it was.

    Raises: ValueError: elements of the tensor share memory (an expanded tensor), so the result has no one value.
    """
    checks.movable(operation, tensor)
    checks.writable(operation, tensor)
    bump(tensor)
    if is_plain(tensor):
        return Message(tensor, tensor)
    return Message(tensor, packed(tensor), None if tensor.is_cpu else streams.mark(tensor))


def packed(tensor: Tensor) -> Tensor:
    """A new contiguous CPU tensor of the same values, shape and dtype.

    Raises: TypeError: the tensor stands for several (a DTensor), and so does its copy.
    """
    with torch.no_grad():
        if tensor.dtype in UNCOPIED:
            return packed(tensor.view(torch.uint8)).view(tensor.dtype)
        source = tensor.detach().resolve_conj().resolve_neg()
        if not source.is_cpu:
            return streams.fetch(source)
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


def bump(*tensors: Tensor) -> None:
    """Counts MPI's write as a write, when the operation begins; on inference tensors, which have no counter, torch does nothing.

    Not when it ends: that is some time later, in another thread, and autograd may have saved the tensor meanwhile, as it does
    with the result of a functional collective, which nobody else writes.
    """
    _increment_version(tensors)  # what torch.autograd.graph.increment_version calls, a quarter of a microsecond later


def uncounted(tensor: Tensor) -> Tensor:
    """The same memory, for a write that `bump` has counted."""
    if tensor.is_inference():
        return tensor
    return tensor.data if type(tensor) is Tensor or type(tensor) is Parameter else tensor.detach()


def overlap(a: Tensor, b: Tensor) -> bool:
    """True if two contiguous tensors share memory, which MPI forbids between what it reads and what it writes."""
    first, second = a.data_ptr(), b.data_ptr()
    return first < second + b.nbytes and second < first + a.nbytes and a.nbytes > 0 and b.nbytes > 0

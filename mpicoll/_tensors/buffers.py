"""From a tensor to contiguous memory on its device, and back.

This file handles strides, subclasses, autograd and the lazy conj and neg bits. The packages below see row-major bytes, on
every rank. Memory is a plain contiguous tensor: the tensor itself or a packed copy. Of a tensor on another accelerator than CUDA
(xpu, npu, mps ...) it is a copy on the CPU, made behind the work on the current stream; the result is copied back.

    readable    memory with the tensor's values
    writable    memory with the tensor's values, for an operation that overwrites the tensor
    copy_back   copies the values of a packed copy into the tensor, which keeps its storage and strides

# Note [Version counters]
# The engine bypasses autograd when it writes memory, and counts nothing. Its callers count, after they have started the operation
# and before they return to the program. The program cannot have saved the result in between, whichever thread completes the
# operation.
#
#     mpicoll's functions         count every tensor that the operation writes on this rank
#     torch.distributed           counts the tensors that Gloo counts, see Note [What Gloo counts]

# Note [What Gloo counts]
# Measured with torch 2.13 and tested by tests/stack/test_version_counters.py. Gloo counts a result that it copies from its own
# buffer into the tensor: all_gather in each form, gather, reduce_scatter in each form, all_to_all of lists, the coalesced
# forms, all_reduce of sparse tensors. It does not count a result that it receives in place: all_reduce, reduce, broadcast,
# scatter, all_to_all_single, recv. Programs rely on both. DTensor's distribute_tensor broadcasts into memory to which the program
# may hold views from chunk() or split(); autograd refuses those views once their base counts as written.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch._C import _increment_version
from torch.nn import Parameter

from mpicoll._base.errors import MpicollError
from mpicoll._tensors import checks

T = TypeVar("T")
STRIDED = torch.strided
BY_ADDRESS = frozenset({"cpu", "cuda"})  # kinds of device whose memory the packages below use as it is; cuda: also AMD's GPUs

# One byte per element, and torch has no copy_ for them.
UNCOPIED = frozenset(
    getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in range(1, 8) if hasattr(torch, f"{sign}int{bits}")
)

# dtypes that need no check and no special copy
COMPLEX = frozenset({torch.complex64, torch.complex128})
ORDINARY = COMPLEX | frozenset(
    getattr(torch, name)
    for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64")
)


def readable(operation: str, tensor: Tensor) -> Tensor:
    """Returns memory with the tensor's values. Raises the errors of `checks.movable`."""
    checks.movable(operation, tensor)
    return tensor if is_plain(tensor) else packed(tensor)


def writable(operation: str, tensor: Tensor) -> Tensor:
    """Returns memory for an operation that overwrites the tensor.

    The memory holds the tensor's values, because a message shorter than the tensor overwrites only its front. Raises the errors
    of `checks.movable` and `checks.writable`.
    """
    checks.movable(operation, tensor)
    checks.writable(operation, tensor)
    return tensor if is_plain(tensor) else packed(tensor)


def copy_back(tensors: Sequence[Tensor], memories: Sequence[Tensor]) -> None:
    """Copies each packed copy into its tensor. Skips a tensor that is its own memory."""
    for tensor, memory in zip(tensors, memories, strict=True):
        if memory is not tensor:
            copy_into(tensor, memory)


def are_dense_cpu(tensors: object, count: int, dtype: torch.dtype) -> bool:
    """True for a list of ``count`` tensors of this dtype that all pass `is_dense_cpu`."""
    if type(tensors) is not list or len(tensors) != count:
        return False
    for tensor in tensors:  # noqa: SIM110  a generator in all() takes 0.2 us longer
        if not is_dense_cpu(tensor) or tensor.dtype is not dtype:
            return False
    return True


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
        and not (dtype in COMPLEX and tensor.is_conj())
    )


class Known(Generic[T]):
    """What was prepared for memory that an operation has used before, and may use again: kept by the memory's description.

    To describe it takes half the time of the checks and conversions that it saves. The address says which memory it is; nothing
    is kept alive. Only for tensors of which `is_dense_cpu` is true.
    """

    MOST = 1024  # then it begins anew

    def __init__(self) -> None:
        self._kept: dict[Hashable, T] = {}

    def find(self, tensor: Tensor, root: int | None = None) -> T | None:
        """Returns what was kept for this memory and this root."""
        kind = type(tensor)
        if (kind is not Tensor and kind is not Parameter) or tensor.layout is not STRIDED:
            return None
        found = self._kept.get((tensor.data_ptr(), tensor.nbytes, tensor.dtype, root))
        if found is None or not tensor.is_cpu or not tensor.is_contiguous() or tensor.is_neg():
            return None
        return found

    def keep(self, tensor: Tensor, value: T, root: int | None = None) -> None:
        if tensor.dtype not in COMPLEX:  # which `find` does not ask for a lazy conj
            if len(self._kept) >= self.MOST:
                self._kept.clear()
            self._kept[tensor.data_ptr(), tensor.nbytes, tensor.dtype, root] = value


def is_plain(tensor: Tensor) -> bool:
    """True if the tensor is its own memory: dense, and its bytes are its values."""
    strided = tensor.layout is STRIDED and tensor.is_contiguous() and not tensor.is_neg() and tensor.device.type in BY_ADDRESS
    return strided and (type(tensor) is Tensor or has_memory(tensor)) and not tensor.is_conj()


def has_memory(tensor: Tensor) -> bool:
    """False for a subclass that wraps another tensor, such as AsyncCollectiveTensor.

    Its address is 0, and copying it copies the inner tensor.
    """
    return tensor.data_ptr() != 0 or tensor.numel() == 0


def packed(tensor: Tensor) -> Tensor:
    """Returns a new contiguous tensor of the same values, shape and dtype, on the same device if that is in `BY_ADDRESS`.

    Raises:
        TypeError: The tensor wraps others (a DTensor), and so does its copy.
    """
    with torch.no_grad():
        if tensor.dtype in UNCOPIED:
            return packed(tensor.view(torch.uint8)).view(tensor.dtype)
        if tensor.device.type not in BY_ADDRESS:
            copy = tensor.detach().cpu()
            return copy if is_plain(copy) else packed(copy)
        source = tensor.detach().resolve_conj().resolve_neg()
        if source.is_contiguous() and source.data_ptr() != tensor.data_ptr():
            return source
        copy = source.clone(memory_format=torch.contiguous_format)
    if not has_memory(copy):
        name = type(tensor).__name__
        raise TypeError(f"mpicoll: a {name} has no memory of its own to communicate; pass the tensor inside (DTensor.to_local())")
    return copy


def copy_into(tensor: Tensor, values: Tensor) -> None:
    """Does ``tensor.copy_(values)`` for any tensor: also a leaf that requires grad, an inference tensor, or a view."""
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        target = uncounted(tensor)
        if type(target) is Tensor and not _is_backed(target):  # copy_ would write there
            raise MpicollError(f"mpicoll: the storage of a result of shape {tuple(tensor.shape)} was freed during the operation")
        if target.dtype in UNCOPIED:
            target, values = target.view(torch.uint8), values.view(torch.uint8)
        target.copy_(values.view(target.shape))


def _is_backed(tensor: Tensor) -> bool:
    """True if the storage has room for every element."""
    if tensor.numel() == 0:
        return True
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.element_size()
    return tensor.untyped_storage().nbytes() >= needed


def uncounted(tensor: Tensor) -> Tensor:
    """Returns an alias of the tensor. A write to it does not raise the tensor's version counter; see Note [Version counters]."""
    if tensor.is_inference():
        return tensor
    return tensor.data if type(tensor) is Tensor or type(tensor) is Parameter else tensor.detach()


def raw(memory: Tensor) -> Tensor:
    """Returns contiguous memory as one dimension of bytes, writable even if autograd or inference mode protects the tensor."""
    return flat(memory, torch.uint8)


def flat(memory: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns contiguous memory as one dimension of elements, writable as those of `raw`."""
    with torch.inference_mode(False):
        alias = uncounted(memory)
        if alias.is_inference():  # torch refuses writes to it outside inference mode, but not writes to its memory
            alias = alias.new_empty(0).set_(memory.untyped_storage(), memory.storage_offset(), memory.shape, memory.stride())
        # Not reshape(-1): one expanded element would keep its stride of 0.
        return alias.as_strided((alias.numel(),), (1,)).view(dtype)


def overlap(a: Tensor, b: Tensor) -> bool:
    """True if two contiguous tensors share memory. MPI forbids that between a buffer that it reads and one that it writes."""
    first, second = a.data_ptr(), b.data_ptr()
    return first < second + b.nbytes and second < first + a.nbytes and a.nbytes > 0 and b.nbytes > 0


def count_write(*tensors: Tensor) -> None:
    """Raises the tensors' version counters, so that autograd refuses a backward pass that needs their former values.

    Inference tensors have no counter and are skipped.
    """
    _increment_version(tensors)  # torch.autograd.graph.increment_version takes a quarter of a microsecond longer to call it

"""The memory of the tensors that an operation uses in the background.

# Note [Resized while in use]
# A program may resize a tensor, or free its storage, before it has waited for the operation. mpicoll then raises at wait.
#     [1] The operation has an alias of each tensor, which keeps the storage. So resize_ to a smaller size, ``set_`` and
#         ``tensor.data = other`` disturb neither the operation nor the other ranks.
#     [2] resize_ to a larger size, and resize_ of the storage, free the storage's memory, whoever else refers to the storage.
#         torch (2.11 to 2.15) cannot forbid this for a time: an export to NumPy forbids it for ever, and FSDP frees storages
#         after each wait. So `freed` looks before the operation begins, and the operation does not begin without its memory.
#     [3] `resized` looks when the operation has ended.
# Between [2] and [3] MPI has the address. If the memory is freed then, MPI may read or write freed memory before [3] raises.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

from torch import Tensor
from torch.nn import Parameter

from mpicoll._tensors.buffers import STRIDED
from mpicoll._tensors.calls import Call

PLAIN = frozenset({Tensor, Parameter})  # subclasses may have no memory of their own

# A tensor, its alias, which keeps the storage, and their address; by the tensor's id. Plain tuples: see `Call`.
Held: TypeAlias = "dict[int, tuple[Tensor, Tensor, int, int]]"


def hold(tensors: Iterable[Tensor]) -> Held:
    """Makes aliases of the tensors. See Note [Resized while in use]."""
    return {id(t): (t, t.data, t.data_ptr(), t.numel()) for t in tensors if type(t) in PLAIN and t.layout is STRIDED}


def freed(held: Held) -> str:
    """Says which tensor's storage was freed or moved since it was held; empty if none."""
    for tensor, own, address, count in held.values():
        if own.data_ptr() != address:
            return _description(tensor, count)
    return ""


def resized(held: Held) -> str:
    """Says which tensor has other memory, or another size, than when it was held; empty if none."""
    for tensor, _, address, count in held.values():
        if tensor.data_ptr() != address or tensor.numel() != count:
            return _description(tensor, count)
    return ""


def _description(tensor: Tensor, count: int) -> str:
    return (
        f"a tensor of {count} elements of {tensor.dtype} was resized, or got another storage, while the operation used it; it "
        f"now has shape {tuple(tensor.shape)} and a storage of {tensor.untyped_storage().nbytes()} bytes. Wait for the operation "
        "before you resize its tensors or free their storage"
    )


def aliased(call: Call, held: Held) -> Call:
    """Returns the call with aliases of its tensors."""
    function, arguments, signature = call
    return function, _aliased(arguments, held), signature


def _aliased(value: Any, held: Held) -> Any:
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([_aliased(each, held) for each in value])
    if kind in PLAIN and value.layout is STRIDED:
        if id(value) not in held:
            held.update(hold([value]))
        return held[id(value)][1]
    return value

"""Two functional ops whose C++ asks the group for a C++ backend, which a group written in Python does not have.

    all_gather_into_tensor_out    inductor's form of an all_gather that may write to its destination directly
    batch_p2p_ops                 dynamo's form of batch_isend_irecv (TORCHDYNAMO_ENABLE_P2P_COMPILATION=1)

They raised "No backend type associated with device type cpu". The kernels here do the same through the group's methods. They
serve tensors on the CPU in groups of every backend, Gloo included.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import _register_work, _resolve_process_group


@functools.cache
def register() -> torch.library.Library:
    """Registers the kernels, once; they live as long as the library that is returned."""
    library = torch.library.Library("_c10d_functional", "IMPL")
    for kernel in (_all_gather_into_tensor_out, _batch_p2p_ops):
        name = kernel.__name__.removeprefix("_")
        if hasattr(torch.ops._c10d_functional, name):  # torch 2.11 has no batch_p2p_ops
            library.impl(name, kernel, "CPU")
    return library


def _group(name: Any) -> Any:
    return _resolve_process_group(name) if isinstance(name, str) else name  # type: ignore[arg-type]  # GroupName is a str


def _all_gather_into_tensor_out(input: Tensor, group_size: int, group_name: Any, *, out: Tensor) -> Tensor:
    _register_work(out, _group(group_name)._allgather_base(out, input.contiguous()))
    return out


def _batch_p2p_ops(
    op_list: Sequence[str], peer_list: Sequence[int], tag_list: Sequence[int], tensors: Sequence[Tensor], group_name: Any
) -> list[Tensor]:
    """Returns the tensor to wait for of each operation: an empty one for a send, the written one for a receive."""
    group = _group(group_name)
    outcome = []
    for op, peer, tag, tensor in zip(op_list, peer_list, tag_list, tensors, strict=True):
        sends = op == "isend"
        work = (group.send if sends else group.recv)([tensor], peer, tag)
        outcome.append(tensor.new_empty(0) if sends else tensor)
        _register_work(outcome[-1], work)
    return outcome

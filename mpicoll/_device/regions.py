"""Memory of any device by its address, for algorithms that copy between addresses."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from mpicoll._mpi.datatypes import fromaddress


class Regions:
    """Args: tensors: one-dimensional, of bytes: all memory of GPUs that may be named. What lies in none of them is the CPU's."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._known = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, tensor) for tensor in tensors if not tensor.is_cpu]

    def bytes(self, address: int, nbytes: int) -> Tensor:
        """What lies there, as a tensor of its device."""
        for begin, end, tensor in self._known:
            if begin <= address and address + nbytes <= end:
                return tensor[address - begin : address - begin + nbytes]
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return torch.frombuffer(fromaddress(address, nbytes), dtype=torch.uint8)

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """In place of memmove; returns at once where both are GPUs'."""
        if nbytes == 0:
            return
        target, values = self.bytes(to, nbytes), self.bytes(source, nbytes)
        # Pageable memory that a GPU is still to write would be read too early.
        target.copy_(values, non_blocking=not (target.is_cpu or values.is_cpu))

"""Memory of any device by address, for algorithms that copy between addresses."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from mpicoll._mpi.datatypes import fromaddress


class Regions:
    """Finds the tensor of bytes that contains an address. An address in none of the tensors is in CPU memory."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._known = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, tensor) for tensor in tensors if not tensor.is_cpu]

    def bytes(self, address: int, nbytes: int) -> Tensor:
        """The memory at this address, as a tensor on its device."""
        for begin, end, tensor in self._known:
            if begin <= address and address + nbytes <= end:
                return tensor[address - begin : address - begin + nbytes]
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return torch.frombuffer(fromaddress(address, nbytes), dtype=torch.uint8)

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Works like memmove. Returns before the copy has ended if both addresses are in GPU memory."""
        if nbytes == 0:
            return
        target, values = self.bytes(to, nbytes), self.bytes(source, nbytes)
        # A copy with pageable memory must block: otherwise that memory would be read before a GPU has written it.
        target.copy_(values, non_blocking=not (target.is_cpu or values.is_cpu))

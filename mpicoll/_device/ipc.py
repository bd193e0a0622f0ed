"""GPU memory that processes of one host open from each other, by CUDA IPC handles that torch makes and opens.

Torch keeps the memory of a buffer until every process that got a record of it has released the buffer. It counts one process for
each record, so each process needs a record of its own. A record that no process opens keeps the memory for good. Tests replace
this module by a small fake, and streams.py too.
"""

from __future__ import annotations

import pickle

import torch
from torch import Tensor
from torch.multiprocessing import reductions

DEVICE, WAITS = 6, 14  # indices in the tuple that torch hands over: device number, whether to wait for an event of the sender


def allocate(device: torch.device, nbytes: int) -> Tensor | None:
    """A buffer of bytes; None if it cannot be allocated."""
    try:
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
    except RuntimeError:  # no room (torch's OutOfMemoryError is one), no context
        return None


def share(buffer: Tensor) -> bytes | None:
    """A record by which one other process opens the buffer. None if the memory cannot be shared (with some torch allocators)."""
    try:
        _, handed_over = reductions.reduce_tensor(buffer)
        return pickle.dumps(handed_over)
    except RuntimeError:
        return None


def opened(record: bytes, device: torch.device) -> Tensor | None:
    """The buffer of another process, for ``device`` to use, whatever number its device has there. None if it cannot be opened."""
    handed_over = list(pickle.loads(record))
    handed_over[DEVICE] = device.index
    handed_over[WAITS] = False  # the owner announces when the data can be read
    try:
        with torch.inference_mode(False):
            buffer = reductions.rebuild_cuda_tensor(*handed_over)
    except RuntimeError:
        return None
    assert isinstance(buffer, Tensor)
    return buffer

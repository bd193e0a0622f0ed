"""GPU memory that processes of one host open from each other: CUDA's IPC handles, made and opened by torch.

Torch counts who has a buffer open and keeps its memory until nobody has, in whatever order processes let go of it. Tests put a
small fake in this module's place, as in streams.py's.
"""

from __future__ import annotations

import pickle

import torch
from torch import Tensor
from torch.multiprocessing import reductions

DEVICE = 6  # the place of the device's number among what torch hands over


def current_device() -> torch.device:
    """The one that this rank uses where a tensor does not say."""
    return torch.device("cuda", torch.cuda.current_device())


def allocate(device: torch.device, nbytes: int) -> Tensor | None:
    """A buffer of bytes; None: there is no room."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        return None


def share(buffer: Tensor) -> bytes | None:
    """What another process opens the buffer by; None: this memory cannot be shared (as with expandable segments, say)."""
    try:
        _, handed_over = reductions.reduce_tensor(buffer)
        return pickle.dumps(handed_over)
    except RuntimeError:
        return None


def opened(record: bytes, device: torch.device) -> Tensor | None:
    """Another process's buffer, for ``device`` to use, whatever number the other one knows its own by; None: not possible."""
    handed_over = list(pickle.loads(record))
    handed_over[DEVICE] = device.index
    try:
        buffer = reductions.rebuild_cuda_tensor(*handed_over)
    except RuntimeError:
        return None
    assert isinstance(buffer, Tensor)
    return buffer

"""GPU memory that processes of one host open from each other: CUDA's IPC handles, made and opened by torch.

Torch keeps a buffer's memory until whoever was given a record of it has let go. It counts one process for each record, so that
everybody needs one of its own; a record that nobody opens keeps the memory for good. Tests put a small fake in this module's
place, as in streams.py's.
"""

from __future__ import annotations

import pickle

import torch
from torch import Tensor
from torch.multiprocessing import reductions

DEVICE, WAITS = 6, 14  # places among what torch hands over: the device's number, whether to wait for an event of the sender's


def current_device() -> torch.device:
    """The one that this rank uses where a tensor does not say."""
    return torch.device("cuda", torch.cuda.current_device())


def allocate(device: torch.device, nbytes: int) -> Tensor | None:
    """A buffer of bytes; None: it cannot be had."""
    try:
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device=device)
    except RuntimeError:  # no room (torch's OutOfMemoryError is one), no context
        return None


def share(buffer: Tensor) -> bytes | None:
    """What one other process opens the buffer by; None: this memory cannot be shared (as with some of torch's allocators)."""
    try:
        _, handed_over = reductions.reduce_tensor(buffer)
        return pickle.dumps(handed_over)
    except RuntimeError:
        return None


def opened(record: bytes, device: torch.device) -> Tensor | None:
    """Another process's buffer, for ``device`` to use, whatever number the other one knows its own by; None: not possible."""
    handed_over = list(pickle.loads(record))
    handed_over[DEVICE] = device.index
    handed_over[WAITS] = False  # its owner tells when there is something to be read
    try:
        with torch.inference_mode(False):
            buffer = reductions.rebuild_cuda_tensor(*handed_over)
    except RuntimeError:
        return None
    assert isinstance(buffer, Tensor)
    return buffer

"""What a message of a checked group (MPICOLL_CHECK=1) says about itself, in front of the tensor and in the same message.

MPI compares neither dtypes nor sizes: float32 arrives as int32, and a message that is too short fills the front. Only the
receiver can notice it, once the message has come.
"""

from __future__ import annotations

import struct

from torch import Tensor

HEADER = struct.Struct("q24s")  # bytes of the tensor, name of its dtype
NBYTES = HEADER.size


def of(tensor: Tensor) -> bytes:
    return HEADER.pack(tensor.nbytes, _name(tensor))


def difference(header: bytes | bytearray, tensor: Tensor) -> str:
    """Returns what is wrong if ``tensor`` receives a message with this header, or an empty string."""
    nbytes, name = HEADER.unpack(header)
    name = name.rstrip(b"\0")
    if (nbytes, name) == (tensor.nbytes, _name(tensor)):
        return ""
    return f"the message has {nbytes} bytes of {name.decode()}, and its tensor {tensor.nbytes} bytes of {_name(tensor).decode()}"


def _name(tensor: Tensor) -> bytes:
    return str(tensor.dtype).removeprefix("torch.").encode()

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
    return HEADER.pack(tensor.nbytes, str(tensor.dtype).removeprefix("torch.").encode())


def difference(sent: bytes | bytearray, expected: bytes) -> str:
    """Returns what is wrong with a message that has the first header if its receive has the second one, or an empty string."""
    return "" if sent == expected else f"the message has {_in_words(sent)}, and its tensor {_in_words(expected)}"


def _in_words(header: bytes | bytearray) -> str:
    nbytes, name = HEADER.unpack(header)
    return f"{nbytes} bytes of {name.rstrip(bytes(1)).decode()}"

"""Large pages of memory. Where transparent huge pages are set to "madvise" (Debian, Ubuntu), memory must ask for them.

The first touch of a page costs more than writing it: 64 MiB in pages of 4 KiB take five times as long as a copy into memory
that is in use. Asking changes nothing but the time that the first touch takes, and may be refused.
"""

from __future__ import annotations

import ctypes
import mmap

WORTH_BYTES = 4 << 20  # below this, malloc tends to return memory that has been touched before

_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux
_madvise = ctypes.CDLL(None).madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def ask(address: int, nbytes: int) -> None:
    """For the whole pages within this memory."""
    if nbytes < WORTH_BYTES or _ADVICE is None:
        return
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    _madvise(first, last - first, _ADVICE)

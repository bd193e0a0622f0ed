"""Asks the kernel for huge pages (madvise) for new memory.

The first touch of a page costs more than writing it: a copy into 64 MiB of new pages of 4 KiB takes five times as long as a copy
into memory that is in use. Kernels whose transparent huge pages are set to "madvise" (Debian, Ubuntu) hand them out on request.
"""

from __future__ import annotations

import ctypes
import mmap

MIN_BYTES = 4 << 20  # below this, malloc tends to return memory that has been touched before

_ADVICE = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux
_madvise = getattr(ctypes.CDLL(None), "madvise", None)
if _madvise is not None:
    _madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def ask_for_large(address: int, nbytes: int) -> None:
    """Asks for huge pages for the whole pages within this memory. Only a hint: the kernel may ignore it."""
    if nbytes < MIN_BYTES or _ADVICE is None or _madvise is None:
        return
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    _madvise(first, last - first, _ADVICE)

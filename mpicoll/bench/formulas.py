"""Bandwidths as the NCCL tests define them, and the floor: the least that any algorithm must read and write.

n ranks, S bytes (see operations.py). Algorithm bandwidth: S / time. Bus bandwidth: that times a factor, so that a perfect
algorithm shows the same figure on any number of ranks.

The floor of a row is a memory copy by one rank. It reads and writes as many bytes as the busiest rank must (bytes of another rank
count when they are read):

    all_reduce, reduce, broadcast    reads S (of itself or of the root), writes S            copy of S
    all_gather*, gather              reads S (a part of every rank), writes S                copy of S
    all_to_all*                      reads S, writes S                                       copy of S
    reduce_scatter*, scatter         reads S, writes its part, S/n                           copy of (S + S/n) / 2
    latency, exchange, bandwidth     a message is read and written once                      copy of S (64 S for a window)
"""

from __future__ import annotations

FLOOR_FROM = 64 << 10  # bytes; below it a call costs more than the copy, in any implementation
WINDOW = 64  # messages in flight in `bandwidth`, as in the OSU benchmarks

EMPTY = ("barrier",)  # operations without data
OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
GATHERS = ("all_gather", "all_gather_into_tensor", "gather")
SCATTERS = ("scatter", "reduce_scatter", "reduce_scatter_tensor")
IN_PARTS = (*GATHERS, *SCATTERS, "all_to_all", "all_to_all_single")  # S is split among the ranks


def bus_factor(what: str, n: int) -> float:
    """Bus bandwidth / algorithm bandwidth."""
    if what == "all_reduce":
        return 2 * (n - 1) / n
    return (n - 1) / n if what in IN_PARTS else 1.0


def repeats(what: str) -> int:
    """Number of messages of a call."""
    return WINDOW if what == "bandwidth" else 1


def floor_bytes(what: str, nbytes: int, n: int) -> int:
    """Bytes of the copy for each message; 0: this row has no floor."""
    if nbytes < FLOOR_FROM:
        return 0
    return (nbytes + nbytes // n) // 2 if what in SCATTERS else nbytes


def spell(nbytes: float) -> str:
    """4096 -> "4 KiB", 1536 -> "1.5 KiB", 1500 -> "1500 B"."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit and nbytes * 4 % unit == 0:
            return f"{nbytes / unit:g} {name}"
    return f"{nbytes:g} B"


def parse(text: str) -> int:
    """ "64KiB" -> 65536; also "4k", "1M", "8". Raises ValueError with what is allowed."""
    digits = text.rstrip("KMGTkmgtiIbB ")
    unit = text[len(digits) :].strip().lower().removesuffix("b").removesuffix("i")
    powers = {"": 0, "k": 1, "m": 2, "g": 3}
    if not digits.isdigit() or unit not in powers:
        raise ValueError(f"{text!r} is no size: write 8, 64KiB, 1MiB")
    return int(digits) << (10 * powers[unit])

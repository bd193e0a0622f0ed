"""How a process of this node is, as the operating system knows it."""

from __future__ import annotations

from pathlib import Path

RUNS, ENDED = "runs", "has ended"


def of(pid: int) -> str:
    """Returns RUNS, ENDED, "is stopped (SIGSTOP)" or "is stopped by a debugger"."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ENDED
    return {"T": "is stopped (SIGSTOP)", "t": "is stopped by a debugger", "Z": ENDED, "X": ENDED}.get(state, RUNS)

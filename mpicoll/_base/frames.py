"""Which calls on a stack are the program's: reports of failures show these alone."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from types import TracebackType

STANDARD = str(Path(traceback.__file__).parent)


def of_program(file: str) -> bool:
    """Whether a file belongs to the program: not to mpicoll, torch or Python. Other libraries count as the program's."""
    packages = (getattr(sys.modules.get(name), "__file__", None) for name in ("mpicoll", "torch"))
    if file.startswith(tuple(f"{Path(package).parent}/" for package in packages if package)):
        return False
    return "site-packages" in file or not file.startswith(("<frozen ", STANDARD))


def up_to_program(trace: TracebackType | None) -> bool:
    """Cuts a traceback behind the last call of the program. Returns False if there is none."""
    last = None
    while trace is not None:
        last = trace if of_program(trace.tb_frame.f_code.co_filename) else last
        trace = trace.tb_next
    if last is not None:
        last.tb_next = None
    return last is not None

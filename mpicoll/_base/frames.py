"""Which calls on a stack are the program's: reports of failures show these alone."""

from __future__ import annotations

import opcode
import sys
import traceback
from pathlib import Path
from types import TracebackType

from mpicoll._base.errors import MpicollError

RAISE = opcode.opmap["RAISE_VARARGS"]  # the bytecode of ``raise error``
STANDARD = str(Path(traceback.__file__).parent)


def of_program(file: str) -> bool:
    """Whether a file belongs to the program: not to mpicoll, torch or Python. Other libraries count as the program's."""
    if file.startswith(tuple(_folders("mpicoll", "torch"))):
        return False
    return "site-packages" in file or not file.startswith(("<frozen ", STANDARD))


def _folders(*names: str) -> list[str]:
    """The folders of these packages, as far as they have been imported."""
    packages = (getattr(sys.modules.get(name), "__file__", None) for name in names)
    return [f"{Path(package).parent}/" for package in packages if package]


def is_refusal(error: BaseException) -> bool:
    """Whether mpicoll or torch.distributed has raised it by a ``raise`` of its own: then its text says what the program did."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    file = "" if trace is None else trace.tb_frame.f_code.co_filename
    ours = file.startswith((*_folders("mpicoll"), *(f"{folder}distributed/" for folder in _folders("torch"))))
    raised = trace is not None and trace.tb_frame.f_code.co_code[trace.tb_lasti] == RAISE
    return ours and raised and not isinstance(error, AssertionError)  # `assert` raises by the same bytecode


def shorten(error: BaseException) -> None:
    """Cuts a refusal's traceback behind the last call of the program, and its cause if that is MPI's: the error has its text."""
    if not is_refusal(error):
        return
    up_to_program(error.__traceback__)
    inner = (error.__cause__ or error.__context__) if isinstance(error, MpicollError) else None
    if inner is not None and not up_to_program(inner.__traceback__):
        error.__suppress_context__, error.__cause__ = True, None


def up_to_program(trace: TracebackType | None) -> bool:
    """Cuts a traceback behind the last call of the program. Returns False if there is none."""
    last = None
    while trace is not None:
        last = trace if of_program(trace.tb_frame.f_code.co_filename) else last
        trace = trace.tb_next
    if last is not None:
        last.tb_next = None
    return last is not None

"""Where the threads of this process are, for the messages of the watchdog and for the flight record."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import mpicoll

STANDARD = str(Path(traceback.__file__).parent)
LIBRARIES = tuple(str(Path(package.__file__ or "").parent) + os.sep for package in (mpicoll, torch))


def show(what: str) -> None:
    """Prints ``what``, the line of the program that its main thread runs, and the stacks of all threads, on stderr."""
    at = _of_main()
    print(f"mpicoll: {what}; this rank is here:{'' if at is None else ' ' + at}", file=sys.stderr, flush=True)
    faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)


def threads() -> list[dict[str, Any]]:
    """Each thread's stack, its innermost call last. ``at``: the innermost call of the program, not of mpicoll or torch."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, frames = threading.main_thread().ident, sys._current_frames()
    return [{"name": names.get(each, "?"), "main": each == main, **_stack(frame)} for each, frame in frames.items()]


def _of_main() -> str | None:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    at: str | None = None if frame is None else _stack(frame)["at"]
    return at


def _stack(frame: FrameType) -> dict[str, Any]:
    calls = [(code.f_code.co_filename, line, code.f_code.co_name) for code, line in traceback.walk_stack(frame)][::-1]
    words = [f"{file}:{line} in {function}" for file, line, function in calls]
    program = [text for text, (file, *_) in zip(words, calls, strict=True) if not _is_library(file)]
    return {"at": program[-1] if program else None, "stack": words}


def _is_library(file: str) -> bool:
    return file.startswith(LIBRARIES) or (file.startswith(("<frozen ", STANDARD)) and "site-packages" not in file)

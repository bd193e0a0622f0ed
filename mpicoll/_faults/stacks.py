"""Where the threads of this process are, for the messages of the watchdog and for the flight record."""

from __future__ import annotations

import sys
import threading
import traceback
from types import FrameType
from typing import Any

from mpicoll._base import frames, log

SHOWN = 8  # calls of a thread


def show(what: str) -> None:
    """Prints ``what``, the line of the program that its main thread runs, and the program's calls of each thread, on stderr."""
    here = sorted(threads(), key=lambda each: not each["main"])
    at = here[0]["at"] if here and here[0]["main"] else None
    lines = [f"{what}; this rank is here:{'' if at is None else ' ' + at}"]
    for thread in here:
        calls = thread["program"][-SHOWN:]
        if len(calls) > 1 or (calls and not thread["main"]):
            lines += [f"  thread {thread['name']}:", *(f"    {call}" for call in calls)]
    log.say("\n".join(lines))


def threads() -> list[dict[str, Any]]:
    """Each thread's stack, its innermost call last. ``program``: the program's calls; ``at``: the last one."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, stacks = threading.main_thread().ident, sys._current_frames()
    return [{"name": names.get(each, "?"), "main": each == main, **_stack(frame)} for each, frame in stacks.items()]


def _stack(frame: FrameType) -> dict[str, Any]:
    calls = [(code.f_code.co_filename, line, code.f_code.co_name) for code, line in traceback.walk_stack(frame)][::-1]
    words = [f"{file}:{line} in {function}" for file, line, function in calls]
    program = [text for text, (file, *_) in zip(words, calls, strict=True) if frames.of_program(file)]
    return {"at": program[-1] if program else None, "program": program, "stack": words}

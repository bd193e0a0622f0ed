"""Standard output whose reader leaves early, as in ``mpicoll doctor | head -1``.

Most tools are then ended by SIGPIPE, and a shell says status 141. Python ignores SIGPIPE, and would print a traceback. A handler
for SIGPIPE would also end a process in which a connection of MPI breaks, so the error is caught where it leaves the command.
"""

from __future__ import annotations

import functools
import os
import select
import signal
import sys
from collections.abc import Callable
from typing import ParamSpec

P = ParamSpec("P")

STDOUT = 1  # file descriptor
READER_LEFT = 128 + signal.SIGPIPE


def quiet_without_reader(main: Callable[P, int]) -> Callable[P, int]:
    """Decorates the main function of a command: if the reader of standard output has left, it returns `READER_LEFT`, quietly."""

    @functools.wraps(main)
    def command(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            try:
                return main(*args, **kwargs)
            finally:  # also after SystemExit of argparse's --help
                sys.stdout.flush()
        except BrokenPipeError:
            if not _reader_has_left():
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, STDOUT)  # what is still in the buffer is written there when Python ends
            os.close(nowhere)
            return READER_LEFT

    return command


def _reader_has_left() -> bool:
    """Whether a pipe is broken that is standard output, and not, for example, a connection."""
    poll = select.poll()
    poll.register(STDOUT, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))

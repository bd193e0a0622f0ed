"""The excepthooks of a world: an uncaught exception ends the job (`mpicoll._mpi.abort`).

init_process_group of torch sets a hook that adds the rank to the traceback, and never removes it. Ours goes outside: torch holds
stderr back while it calls the hook that it found, and a hook that ends the process inside would lose the text.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from mpicoll._mpi import abort

_replaced: tuple[Callable[..., Any], Callable[..., Any]] | None = None  # sys.excepthook before torch's init, and torch's


def install(before: Callable[..., Any]) -> None:
    """Sets our hooks outside torch's. ``before`` is sys.excepthook before torch's init_process_group was called."""
    global _replaced
    _replaced = (before, sys.excepthook)
    abort.install()


def uninstall() -> None:
    """Puts back the hook from before the world, unless a program has set its own since."""
    global _replaced
    abort.uninstall()
    if _replaced is not None and sys.excepthook is _replaced[1]:
        sys.excepthook = _replaced[0]  # otherwise torch would add the rank twice after the next init
    _replaced = None

"""The excepthooks of a world: an uncaught exception ends the job (`mpicoll._mpi.abort`).

init_process_group of torch sets a hook that adds the rank to the traceback, and never removes it. Ours goes outside: torch holds
stderr back while it calls the hook that it found, and a hook that ends the process inside would lose the text.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from mpicoll._base.torch_errors import OperationTimeout
from mpicoll._mpi import abort

_replaced: tuple[Callable[..., Any], Callable[..., Any]] | None = None  # sys.excepthook before torch's init, and torch's


@contextlib.contextmanager
def outside_torch() -> Iterator[None]:
    """Sets our hooks outside the one that torch's init_process_group sets in the body.

    If the body raises, they are as before. After a timeout they are set: an uncaught one ends the job, where the ranks that came
    would otherwise wait in MPI_Finalize for the one that did not.
    """
    global _replaced
    installed = abort.uninstall()  # set by init_rpc, or after a timeout
    before = sys.excepthook
    try:
        yield
    except BaseException as error:
        if installed or isinstance(error, OperationTimeout):
            abort.install()
        raise
    _replaced = (before, sys.excepthook)
    abort.install()


def uninstall() -> None:
    """Puts back the hook from before the world, unless a program has set its own since."""
    global _replaced
    abort.uninstall()
    if _replaced is not None and sys.excepthook is _replaced[1]:
        sys.excepthook = _replaced[0]  # otherwise torch would add the rank twice after the next init
    _replaced = None

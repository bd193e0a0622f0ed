"""A wrapper of a function of torch.distributed that sees all arguments by torch's names, positional ones too.

Programs wrap the same functions, before mpicoll and after it, mostly as ``(backend, **kwargs)`` or ``(*args, **kwargs)``. So
positional arguments are named by torch's order, not by the signature of the wrapped function, and they are passed on as
positional arguments.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

# The order in which torch takes them (2.11 to 2.15; before that, too).
WORLD_NAMES = ("backend", "init_method", "timeout", "world_size", "rank", "store", "group_name", "pg_options", "device_id")
GROUP_NAMES = ("ranks", "timeout", "backend", "backend_options", "pg_tag", "use_local_synchronization", "group_desc", "device_id")
MEMBERS_NAMES = (
    "group_size", "group_rank", "global_ranks_in_group", "backend", "store", "group_name", "backend_options", "timeout",
)  # fmt: skip
SHRINK_NAMES = ("ranks_to_exclude", "group", "shrink_flags", "pg_options")

Arguments = dict[str, Any]
Handler = Callable[[Callable[..., Any], Arguments], Any]


def wrap(
    original: Callable[..., Any], names: tuple[str, ...], select: Callable[[Arguments], Handler | None]
) -> Callable[..., Any]:
    """Wraps a function, so that a handler gets the calls that ``select`` picks.

    A call from inside a handler goes to ``original``. Such a call comes from a program's wrapper that holds an older one of ours.

    Args:
        original: torch's function, or a program's wrapper of it.
        names: torch's names of the positional arguments.
        select: Gets the arguments by name, may change them, and returns the handler, or None. The handler gets ``original``, as
            a function of keywords alone, and the arguments.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        positional = names[: len(args)]
        arguments = {**dict(zip(positional, args, strict=False)), **kwargs}
        unclear = len(arguments) < len(args) + len(kwargs) or not _fits(signature, args, kwargs)
        running = names, threading.get_ident()
        if running in _under_way or unclear:  # torch raises its own error
            return original(*args, **kwargs)
        try:
            handler = select(arguments)
            if handler is None:
                return _in_form(original, positional, **arguments)
            _under_way.add(running)
            return handler(functools.partial(_in_form, original, positional), arguments)
        except Exception as error:
            from mpicoll._base.errors import LaunchError  # seldom needed

            if isinstance(error, LaunchError):  # about the start of the program: none of our calls explains it
                raise error.with_traceback(None) from None
            raise
        finally:
            _under_way.discard(running)

    return wrapped


# Pairs of a function, known by the names of its arguments, and a thread that runs its handler.
_under_way: set[tuple[tuple[str, ...], int]] = set()


def _fits(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Arguments) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _in_form(original: Callable[..., Any], positional: tuple[str, ...], /, **arguments: Any) -> Any:
    """Calls ``original``; arguments in ``positional`` go by position, up to the first that is missing, and the others by name."""
    front = []
    for name in positional:
        if name not in arguments:
            break
        front.append(arguments.pop(name))
    return original(*front, **arguments)


def complete(arguments: Arguments) -> Arguments:
    """Returns the arguments with MPICOLL_TIMEOUT as the timeout, if it is set and they have none.

    Raises:
        ValueError: MPICOLL_TIMEOUT has a value that is not allowed.
    """
    from mpicoll._base.config import get

    seconds = None if arguments.get("timeout") is not None else get("MPICOLL_TIMEOUT")
    return arguments if seconds is None else {**arguments, "timeout": timedelta(seconds=seconds)}


def limit(arguments: Arguments) -> float:
    """The timeout in seconds. One of another type is left to torch, which refuses it."""
    from torch.distributed.constants import default_pg_timeout

    timeout = arguments.get("timeout")
    return (timeout if isinstance(timeout, timedelta) else default_pg_timeout).total_seconds()

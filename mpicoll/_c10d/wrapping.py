"""A wrapper round a function of torch.distributed that looks at the arguments by torch's names, however they are given.

Programs put functions of their own round torch's, before mpicoll and after it, most of them as ``(backend, **kwargs)`` or
``(*args, **kwargs)``. So the arguments are named by torch's order, not by the signature of what was found there, and they go on
in the form in which they came: positional ones as positional ones.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["GROUP_NAMES", "WORLD_NAMES", "wrap"]

# The order in which torch takes them (2.11 to 2.15; before that, too).
WORLD_NAMES = ("backend", "init_method", "timeout", "world_size", "rank", "store", "group_name", "pg_options", "device_id")
GROUP_NAMES = ("ranks", "timeout", "backend", "backend_options", "pg_tag", "use_local_synchronization", "group_desc", "device_id")

Arguments = dict[str, Any]
Handler = Callable[[Callable[..., Any], Arguments], Any]


def wrap(
    original: Callable[..., Any], names: tuple[str, ...], select: Callable[[Arguments], Handler | None]
) -> Callable[..., Any]:
    """``original``, except for the calls that ``select`` takes.

    Args:
        original: torch's function, or a program's own round it.
        names: torch's names of the positional arguments.
        select: Given the arguments by name, which it may change: the handler, to be called with a form of ``original`` that
            takes keywords alone, and the arguments; None: the call is not ours.

    A call from inside a handler goes to ``original``: it comes from a program's function that calls an older wrapper of ours.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        positional = names[: len(args)]
        arguments = {**dict(zip(positional, args, strict=False)), **kwargs}
        unclear = len(arguments) < len(args) + len(kwargs) or not _fits(signature, args, kwargs)
        here = names, threading.get_ident()
        if here in _under_way or unclear:  # torch words its own complaint
            return original(*args, **kwargs)
        handler = select(arguments)
        if handler is None:
            return _in_form(original, positional, **arguments)
        _under_way.add(here)
        try:
            return handler(functools.partial(_in_form, original, positional), arguments)
        finally:
            _under_way.discard(here)

    return wrapped


# The functions, by their arguments' names, and the threads in which a handler is at work.
_under_way: set[tuple[tuple[str, ...], int]] = set()


def _fits(signature: inspect.Signature, args: tuple[Any, ...], kwargs: Arguments) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def _in_form(original: Callable[..., Any], positional: tuple[str, ...], /, **arguments: Any) -> Any:
    """Calls ``original`` with these arguments by position, as far as they are there, and the others by name."""
    front = []
    for name in positional:
        if name not in arguments:
            break
        front.append(arguments.pop(name))
    return original(*front, **arguments)

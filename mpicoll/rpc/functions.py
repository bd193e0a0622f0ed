"""The decorator for functions that answer a remote call later."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def async_execution(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a function that returns a torch.futures.Future: the caller gets the value of that future once it has completed.

    The thread that runs the function is free while the future is pending. Below ``@staticmethod`` or ``@classmethod``, this
    must be the inner decorator. Decorating sends nothing (not collective).

    Args:
        fn: Returns a torch.futures.Future. Otherwise the call fails with a RuntimeError.

    Returns:
        A function with the same behaviour, which rpc_sync, rpc_async and remote recognise.

    Example:
        >>> @rpc.functions.async_execution
        ... def add_there(to, x, y):
        ...     return rpc.rpc_async(to, torch.add, (x, y))
        >>> rpc.rpc_sync("worker1", add_there, ("worker0", torch.ones(2), 1))
        tensor([2., 2.])
    """

    @functools.wraps(fn)
    def wrapper(*arguments: Any, **keywords: Any) -> Any:
        return fn(*arguments, **keywords)

    wrapper._wrapped_async_rpc_function = fn  # type: ignore[attr-defined]
    return wrapper


def is_async_execution(function: Callable[..., Any]) -> bool:
    """Returns whether the function is marked by `async_execution`, or by torch's decorator of that name."""
    return hasattr(function, "_wrapped_async_rpc_function")


def checked_future(function: Any, value: Any) -> Any:
    """Returns ``value``, the result of a marked function. Raises RuntimeError if it is not a future."""
    if isinstance(value, torch._C.Future):  # `then` returns this type, and not torch.futures.Future
        return value
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise RuntimeError(
        "Functions decorated with @rpc.async_function must return a torch.futures.Future object, but instead got "
        f"{kind} from {getattr(function, '__qualname__', function)}"
    )

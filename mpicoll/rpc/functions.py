"""Marks for functions that other workers call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def async_execution(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator: the function returns a torch.futures.Future, whose value, once it is there, is the answer to the caller.

    The thread that runs it is free meanwhile. Must be the inner decorator below ``@staticmethod`` and ``@classmethod``.
    """

    @functools.wraps(fn)
    def wrapper(*arguments: Any, **keywords: Any) -> Any:
        return fn(*arguments, **keywords)

    wrapper._wrapped_async_rpc_function = fn  # type: ignore[attr-defined]
    return wrapper


def is_marked(function: Callable[..., Any]) -> bool:
    """Whether it is `async_execution`, torch's own included."""
    return hasattr(function, "_wrapped_async_rpc_function")


def answer_of(function: Any, value: Any) -> Any:
    """What a marked function has returned. Raises: RuntimeError: that is no future."""
    if isinstance(value, torch._C.Future):  # what `then` returns is no torch.futures.Future
        return value
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise RuntimeError(
        "Functions decorated with @rpc.async_function must return a torch.futures.Future object, but instead got "
        f"{kind} from {getattr(function, '__qualname__', function)}"
    )

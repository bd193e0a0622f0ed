"""Marks for functions that other workers call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def async_execution(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator: the function returns a torch.futures.Future, whose value, once it is there, is the answer to the caller.

    The thread that runs it is free meanwhile. Must be the inner decorator below ``@staticmethod`` and ``@classmethod``.
    """

    @functools.wraps(function)
    def wrapper(*arguments: Any, **keywords: Any) -> Any:
        return function(*arguments, **keywords)

    wrapper._wrapped_async_rpc_function = function  # type: ignore[attr-defined]
    return wrapper


def is_marked(function: Callable[..., Any]) -> bool:
    """Whether it is `async_execution`, torch's own included."""
    return hasattr(function, "_wrapped_async_rpc_function")

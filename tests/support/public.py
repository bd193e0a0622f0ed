"""The public functions and classes of mpicoll, by the name that a program uses, for the tests of their docstrings."""

import importlib
import inspect
from typing import Any

import mpicoll

PACKAGES = ("nn", "rpc", "autograd", "optim", "testing")


def documented() -> dict[str, Any]:
    """Functions and classes that mpicoll defines itself: of mpicoll, and of its public packages."""
    found = {f"dist.{name}": getattr(mpicoll, name) for name in mpicoll.OURS}
    for package in PACKAGES:
        module = importlib.import_module(f"mpicoll.{package}")
        found |= {f"{package}.{name}": getattr(module, name) for name in module.__all__}
    found["rpc.functions.async_execution"] = importlib.import_module("mpicoll.rpc.functions").async_execution
    return {name: value for name, value in found.items() if is_ours(value)}


def is_ours(value: Any) -> bool:
    return (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__.startswith("mpicoll.")


def is_error(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, BaseException)


def methods(name: str, value: type) -> dict[str, Any]:
    """The public methods that a class defines itself, by ``Class.method``."""
    defined = {key: inspect.getattr_static(value, key) for key in vars(value) if not key.startswith("_")}
    unwrapped = {key: getattr(member, "__func__", member) for key, member in defined.items()}
    return {f"{name}.{key}": member for key, member in unwrapped.items() if inspect.isfunction(member) and is_ours(member)}

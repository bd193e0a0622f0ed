"""Calls of torch.distributed that torch's own Python code refuses, before it calls mpicoll.

If one of torch's functions for collectives, messages and objects raises, its wrapper asks `_get_msg_dict` for a description of
the call, for torch's log, and raises the error again. Only then does our wrapper of `_get_msg_dict` run: a call that succeeds
costs nothing more. It raises a TypeError for a group that is no process group, and tells the other ranks of it.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import Backend
from torch.distributed import GroupMember, ProcessGroup

from mpicoll._c10d import dynamo, patches, torch_world
from mpicoll._engine.registry import registry

if TYPE_CHECKING:
    from mpicoll._engine.communicator import Communicator

# torch's functions, and the collective of mpicoll with which each begins.
COLLECTIVES = {
    **{
        name: name
        for name in (
            "all_gather", "all_gather_single", "all_reduce", "all_to_all", "all_to_all_single", "barrier", "broadcast",
            "gather", "reduce", "reduce_scatter", "reduce_scatter_single", "scatter",
        )
    },
    "all_gather_into_tensor": "all_gather_single",
    "reduce_scatter_tensor": "reduce_scatter_single",
    "all_gather_object": "all_gather",
    "gather_object": "all_gather",
    "broadcast_object_list": "broadcast",
    "scatter_object_list": "broadcast",
}  # fmt: skip
MESSAGES = ("send", "recv", "send_object_list", "recv_object_list")


def install() -> None:
    """Wraps `_get_msg_dict`, once."""
    patches.wrap("torch.distributed.c10d_logger._get_msg_dict", _describing)


def _describing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _get_msg_dict(func_name: str, *args: Any, **kwargs: Any) -> Any:
        error = sys.exc_info()[1]
        if error is not None and (func_name in COLLECTIVES or func_name in MESSAGES):
            arguments = _by_name(func_name, args, kwargs)
            if "group" in arguments:
                _look(func_name, arguments, error)
        return original(func_name, *args, **kwargs)

    dynamo.disable(_get_msg_dict)
    return _get_msg_dict


def _by_name(function: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns all arguments by torch's names; nothing if they do not fit, or if a program has put its own function in place."""
    try:
        bound = inspect.signature(getattr(torch_world.c10d, function)).bind(*args, **kwargs)
    except TypeError:
        return {}
    bound.apply_defaults()
    return bound.arguments


def _look(function: str, arguments: dict[str, Any], error: BaseException) -> None:
    """Raises the error that the program gets instead of ``error``, if there is a better one."""
    group = arguments["group"]
    if group is None or isinstance(group, (ProcessGroup, Backend)) or group == GroupMember.NON_GROUP_MEMBER:
        return
    default = _communicator(torch_world.default_group())
    if default is not None:
        raise no_group(default, function, group) from None


def no_group(default: Communicator, function: str, group: Any) -> TypeError:
    """Returns the error for a ``group`` that is no process group. The ranks that call it on the default group learn of it."""
    error = TypeError(f"{function}: group must be a ProcessGroup or None, got {type(group).__name__} {group!r}")
    if function in COLLECTIVES:
        default.refused(COLLECTIVES[function], error)
    return error


def _communicator(group: Any) -> Communicator | None:
    """Returns the communicator of a group; None if it is another backend's."""
    return registry.find(torch_world.name_of(group) or "")

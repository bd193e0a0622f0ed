"""Calls of torch.distributed that torch's own Python code refuses, before it calls mpicoll.

If one of torch's functions for collectives, messages and objects raises, its wrapper asks `_get_msg_dict` for a description of
the call, for torch's log, and raises the error again. Only then does our wrapper of `_get_msg_dict` run: a call that succeeds
costs nothing more:

    a group that is no process group    TypeError
    objects that do not pickle          the ranks exchange the error in place of the objects, and raise it
    a function under an older name      the error has this name
    anything else                       torch's error

What is refused before a collective has begun takes its place in the order, as if mpicoll had refused it: Note [A refusal is a
call] in _engine/group.py.
"""

from __future__ import annotations

import functools
import inspect
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import Backend
from torch.distributed import GroupMember, ProcessGroup

from mpicoll._base.errors import MpicollError
from mpicoll._c10d import dynamo, patches, torch_world
from mpicoll._c10d.names import OLDER_NAMES, name_as_called
from mpicoll._engine.collectives import REFUSALS
from mpicoll._engine.registry import registry

if TYPE_CHECKING:
    from mpicoll._engine.communicator import Communicator

OBJECTS = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")
# torch's functions, and the collective of mpicoll with which each begins.
COLLECTIVES = {
    **{
        name: name
        for name in (
            "all_gather", "all_gather_single", "all_reduce", "all_to_all", "all_to_all_single", "barrier", "broadcast",
            "gather", "reduce", "reduce_scatter", "reduce_scatter_single", "scatter",
        )
    },
    **OLDER_NAMES, "gather_single": "gather", "gather_into_tensor": "gather",
    **dict(zip(OBJECTS, ("all_gather", "all_gather", "broadcast", "broadcast"), strict=True)),
}  # fmt: skip
MESSAGES = ("send", "recv", "send_object_list", "recv_object_list")
LOGGER = "torch.distributed.c10d_logger"
PICKLES, UNPICKLES = "_object_to_tensor", "_tensor_to_object"  # functions of torch


def install() -> None:
    """Wraps `_get_msg_dict`, once."""
    patches.wrap(f"{LOGGER}._get_msg_dict", _describing)


def _describing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _get_msg_dict(func_name: str, *args: Any, **kwargs: Any) -> Any:
        error = sys.exc_info()[1]
        if error is not None and (func_name in COLLECTIVES or func_name in MESSAGES):
            name_as_called(error, func_name)
            _look(func_name, _by_name(func_name, args, kwargs), error)
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
    """Tells the other ranks. Raises the error that the program gets instead of ``error``, if there is a better one."""
    group, default = arguments.get("group"), torch_world.default_group()
    is_group = group is None or isinstance(group, (ProcessGroup, Backend)) or group == GroupMember.NON_GROUP_MEMBER
    communicator = registry.find(torch_world.name_of(default if group is None or not is_group else group) or "")
    if communicator is None or "group" not in arguments:  # another backend's
        return
    if not is_group:
        raise no_group(communicator, function, group) from None
    places = _places(error)
    if places[PICKLES]:
        _fail_everywhere(communicator, function, arguments, error)
    elif function in COLLECTIVES and isinstance(error, ValueError if function in OBJECTS else REFUSALS) and _is_new(places):
        communicator.refused(COLLECTIVES[function], error)


def _places(error: BaseException) -> Counter[str]:
    """Counts the functions through which the error has come: those of torch by name, and those of mpicoll and of torch's log."""
    places: Counter[str] = Counter()
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__"))
        ours, log = module.startswith("mpicoll."), module == LOGGER
        places["mpicoll" if ours else "torch's log" if log else frame.f_code.co_name] += 1
    return places


def _is_new(places: Counter[str]) -> bool:
    """Whether a call has been refused before its collective began, and nobody has been told.

    What mpicoll refuses it has told itself, a function of torch inside this one has been asked before, and what does not unpickle
    has come by a collective.
    """
    return not places["mpicoll"] and not places[UNPICKLES] and places["torch's log"] == 1


def no_group(default: Communicator, function: str, group: Any) -> TypeError:
    """Returns the error for a ``group`` that is no process group. The ranks that call it on the default group learn of it."""
    error = TypeError(f"{function}: group must be a ProcessGroup or None, got {type(group).__name__} {group!r}")
    if function in COLLECTIVES:
        default.refused(COLLECTIVES[function], error)
    return error


class _Refusal(str):
    """Travels in place of an object that does not pickle. Unpickling it raises the error."""

    def __reduce__(self) -> Any:
        return _raise, (str(self),)


def _raise(text: str) -> None:
    raise MpicollError(text)


def _fail_everywhere(communicator: Communicator, function: str, arguments: dict[str, Any], error: BaseException) -> None:
    """Makes the call again with refusals: torch pickles all objects before it sends anything, so the other ranks still wait."""
    refusal = _Refusal(f"{communicator.where(function)}: an object does not pickle there: {type(error).__name__}: {error}")
    name = next(name for name in ("obj", "scatter_object_input_list", "object_list") if name in arguments)
    sent = refusal if name == "obj" else [refusal] * len(arguments[name])
    try:
        getattr(torch_world.c10d, function)(**{**arguments, name: sent})
    except MpicollError as raised:
        if not _places(raised)[UNPICKLES]:  # otherwise the program gets `error`
            raise

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
from collections.abc import Callable, Iterator, Sequence
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

# torch's functions, and the collective of mpicoll with which each begins.
COLLECTIVES = {
    **{
        name: name
        for name in (
            "all_gather", "all_gather_single", "all_reduce", "all_to_all", "all_to_all_single", "barrier", "broadcast",
            "gather", "reduce", "reduce_scatter", "reduce_scatter_single", "scatter",
        )
    },
    **OLDER_NAMES,
    "gather_single": "gather",
    "gather_into_tensor": "gather",
    "all_gather_object": "all_gather",
    "gather_object": "all_gather",
    "broadcast_object_list": "broadcast",
    "scatter_object_list": "broadcast",
}  # fmt: skip
LOGGER = "torch.distributed.c10d_logger"
PICKLES, UNPICKLES = "_object_to_tensor", "_tensor_to_object"  # functions of torch
MESSAGES = ("send", "recv", "send_object_list", "recv_object_list")


def install() -> None:
    """Wraps `_get_msg_dict`, once."""
    patches.wrap(f"{LOGGER}._get_msg_dict", _describing)


def _describing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _get_msg_dict(func_name: str, *args: Any, **kwargs: Any) -> Any:
        error = sys.exc_info()[1]
        if error is not None and func_name in OLDER_NAMES:
            name_as_called(error, func_name)
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
    """Tells the other ranks. Raises the error that the program gets instead of ``error``, if there is a better one."""
    group = arguments["group"]
    default = _communicator(torch_world.default_group())
    if group is not None and not isinstance(group, (ProcessGroup, Backend)) and group != GroupMember.NON_GROUP_MEMBER:
        if default is not None:
            raise no_group(default, function, group) from None
        return
    communicator = default if group is None else _communicator(group)
    if communicator is None:
        return
    places = list(_places(error))
    if PICKLES in places:
        _fail_everywhere(communicator, function, arguments, error)
    elif function in COLLECTIVES and _before_it_began(function, error, places):
        communicator.refused(COLLECTIVES[function], error)  # type: ignore[arg-type]


def _places(error: BaseException) -> Iterator[str]:
    """Yields the functions through which the error has come: those of torch by name, those of mpicoll as "mpicoll"."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__"))
        yield "mpicoll" if module.startswith("mpicoll.") else "logger" if module == LOGGER else frame.f_code.co_name


def _before_it_began(function: str, error: BaseException, places: Sequence[str]) -> bool:
    """Whether torch's code has refused the arguments of a collective, or of the first collective of a function for objects.

    Not if the error comes from mpicoll, or from a function of torch inside this one, for which this has been asked before.
    """
    if "mpicoll" in places or UNPICKLES in places or places.count("logger") > 1:
        return False
    return isinstance(error, ValueError if "object" in function else REFUSALS)


def no_group(default: Communicator, function: str, group: Any) -> TypeError:
    """Returns the error for a ``group`` that is no process group. The ranks that call it on the default group learn of it."""
    error = TypeError(f"{function}: group must be a ProcessGroup or None, got {type(group).__name__} {group!r}")
    if function in COLLECTIVES:
        default.refused(COLLECTIVES[function], error)
    return error


def _communicator(group: Any) -> Communicator | None:
    """Returns the communicator of a group; None if it is another backend's."""
    return registry.find(torch_world.name_of(group) or "")


class _Refusal:
    """Travels in place of an object that does not pickle. Unpickling it raises the error."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __reduce__(self) -> Any:
        return _raise, (self._text,)


def _raise(text: str) -> None:
    raise MpicollError(text)


def _fail_everywhere(communicator: Communicator, function: str, arguments: dict[str, Any], error: BaseException) -> None:
    """Makes the call again with refusals: torch pickles all objects before it sends anything, so the other ranks still wait."""
    text = f"{communicator.where(function)}: an object does not pickle there: {type(error).__name__}: {error}"
    refusal, sent = _Refusal(text), dict(arguments)
    if "obj" in sent:
        sent["obj"] = refusal
    else:
        name = "scatter_object_input_list" if "scatter_object_input_list" in sent else "object_list"
        sent[name] = [refusal] * len(sent[name])
    try:
        getattr(torch_world.c10d, function)(**sent)
    except MpicollError as raised:
        if UNPICKLES not in _places(raised):  # otherwise the program gets `error`
            raise

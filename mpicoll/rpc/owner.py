"""What calls to a reference's owner run there. ``reference``: the object's id, or the owner's own reference to it."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch.futures import Future

from mpicoll.autograd import passes
from mpicoll.rpc import entries
from mpicoll.rpc.entries import Entry, Id, entry_of
from mpicoll.rpc.functions import answer_of, async_execution, is_marked
from mpicoll.rpc.futures import mapped, settled, value_of
from mpicoll.rpc.workers import RemoteError, described, reported


@async_execution
def make(identity: Id, weight: Fraction, function: Callable[..., Any], arguments: Any, keywords: Any) -> Future[Any]:
    """Answered when the object is there: with nothing, or with the error, which the reference keeps."""
    entry = entry_of(identity)
    done: Future[Any] = Future()

    def keep(future: Future[Any]) -> None:
        try:
            entry.value.set_result(future.value())
        except Exception as error:  # noqa: BLE001  it belongs to who asks for the value
            entry.value.set_exception(described(error, entries.me()).exception())
        entry.made = True
        entries.change(entry, weight)
        done.set_result(None)

    try:
        value = function(*arguments, **keywords)
        result = answer_of(function, value) if is_marked(function) else settled(value)
        result.add_done_callback(keep)
    except BaseException as error:  # noqa: BLE001  it belongs to who asks for the value
        failed: Future[Any] = Future()
        failed.set_exception(reported(error, entries.me()).exception())
        keep(failed)
    return done


def never_made(identity: Id, weight: Fraction, error: RemoteError) -> None:
    entry = entry_of(identity)
    if not entry.value.done():
        entry.value.set_exception(error.exception())
        entry.made = True
        entries.change(entry, weight)


def _value(reference: Id | Any) -> Future[Any]:
    entry: Entry = entry_of(reference) if isinstance(reference, tuple) else reference._entry
    return entry.value


@async_execution
def get_value(reference: Id | Any) -> Future[Any]:
    return _value(reference)


def confirm(identity: Id) -> None:
    entry_of(identity)


def give_back(identity: Id, weight: Fraction) -> None:
    entries.change(entry_of(identity), -weight)


@async_execution
def wait_until_made(reference: Id | Any) -> Future[Any]:
    return mapped(_value(reference), lambda value: None)


@async_execution
def get_type(reference: Id | Any) -> Future[Any]:
    return mapped(_value(reference), type)


def run_backward(reference: Id | Any, context_id: int, retain_graph: bool) -> None:
    value = value_of(_value(reference))
    if not isinstance(value, torch.Tensor):
        raise RuntimeError(f"RRef should contain a tensor for .backward(), but it contains a {type(value).__name__}")
    if context_id == -1:
        value.backward(retain_graph=retain_graph)
    else:
        passes.backward(context_id, [value], retain_graph)


@async_execution
def invoke(reference: Id | Any, name: str, arguments: Any, keywords: Any) -> Future[Any]:
    """Calls a method of the object; a method that is marked async_execution is answered when its future is."""
    method = getattr(value_of(_value(reference)), name)
    value = method(*arguments, **keywords)
    return answer_of(method, value) if is_marked(method) else settled(value)


def _check_attribute(name: str, value: Any) -> None:
    getattr(value, name)


@async_execution
def find_attribute(reference: Id | Any, name: str) -> Future[Any]:
    """Ends when the object is there. Raises: AttributeError: it has none of this name."""
    return mapped(_value(reference), partial(_check_attribute, name))

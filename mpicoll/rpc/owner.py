"""Functions that run on the owner of a reference, called by its users.

Their argument ``reference`` is the object's id, or the owner's own RRef to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.futures import Future

from mpicoll.autograd import passes
from mpicoll.rpc.agent import Agent
from mpicoll.rpc.functions import async_execution, checked_future, is_async_execution
from mpicoll.rpc.futures import completed_future, map_future, value_of
from mpicoll.rpc.owned_objects import Entry, Id, Weight
from mpicoll.rpc.workers import RemoteError, describe, report


@async_execution
def make(identity: Id, weight: Weight, function: Callable[..., Any], arguments: Any, keywords: Any) -> Future[Any]:
    """Creates the object: calls ``function``. The answer is empty; an error stays with the reference."""
    agent = Agent.get()
    entry = agent.objects.entry(identity)
    done: Future[Any] = Future()

    def keep(future: Future[Any]) -> None:
        try:
            entry.value.set_result(future.value())
        except Exception as error:  # noqa: BLE001  raised where the value is asked for
            entry.value.set_exception(describe(error, agent.me).exception())
        entry.is_made = True
        agent.objects.give(entry, weight)
        done.set_result(None)

    try:
        made = _future_of(function, arguments, keywords)
    except BaseException as error:  # noqa: BLE001  raised where the value is asked for
        made = Future()
        made.set_exception(report(error, agent.me).exception())
    made.add_done_callback(keep)
    return done


def _future_of(function: Callable[..., Any], arguments: Any, keywords: Any) -> Future[Any]:
    """Calls. Returns a future of the answer: with `async_execution` the one that the function returns."""
    value = function(*arguments, **keywords)
    return checked_future(function, value) if is_async_execution(function) else completed_future(value)


def never_made(identity: Id, weight: Weight, error: RemoteError) -> None:
    """Notes that the call of `make` failed before it ran, and why."""
    objects = Agent.get().objects
    entry = objects.entry(identity)
    if not entry.value.done():
        entry.value.set_exception(error.exception())
        entry.is_made = True
        objects.give(entry, weight)


def confirm(identity: Id) -> None:
    """Adds the entry. The answer tells the caller that the owner knows the reference."""
    Agent.get().objects.entry(identity)


def give_back(identity: Id, weight: Weight, new: Weight | None = None) -> None:
    """Takes back the weight of a user that has gone, or has made itself ``new`` weight. Nothing to do once RPC has ended."""
    agent = Agent.current
    if agent is not None:
        entry = agent.objects.entry(identity)
        if new is not None:
            agent.objects.give(entry, new)
        agent.objects.take_back(entry, weight)


def _value(reference: Id | Any) -> Future[Any]:
    entry: Entry = Agent.get().objects.entry(reference) if isinstance(reference, tuple) else reference._entry
    return entry.value


@async_execution
def get_value(reference: Id | Any) -> Future[Any]:
    return _value(reference)


@async_execution
def wait_until_made(reference: Id | Any) -> Future[Any]:
    return map_future(_value(reference), lambda value: None)


@async_execution
def get_type(reference: Id | Any) -> Future[Any]:
    return map_future(_value(reference), type)


def run_backward(reference: Id | Any, context_id: int, retain_graph: bool) -> None:
    """Runs a backward pass with the object as root: the distributed one of ``context_id``, or (-1) that of this worker."""
    value = value_of(_value(reference))
    if not isinstance(value, torch.Tensor):
        raise RuntimeError(f"RRef should contain a tensor for .backward(), but it contains a {type(value).__name__}")
    if context_id == -1:
        value.backward(retain_graph=retain_graph)
    else:
        passes.backward(context_id, [value], retain_graph)


@async_execution
def invoke(reference: Id | Any, name: str, arguments: Any, keywords: Any) -> Future[Any]:
    """Calls a method of the object. Answers with what it returns; with `async_execution`, once its future has completed."""
    return _future_of(getattr(value_of(_value(reference)), name), arguments, keywords)


@async_execution
def find_attribute(reference: Id | Any, name: str) -> Future[Any]:
    """Answers once the object is there; with an AttributeError if it has no attribute of this name."""
    return map_future(_value(reference), lambda value: callable(getattr(value, name)))

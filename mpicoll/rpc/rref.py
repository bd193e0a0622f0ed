"""References to objects that live on one worker, its owner, and are used by many.

Who keeps an object alive: weighted reference counting (Bevan, 1987). The owner gives the first user the weight 1; a user that
passes the reference on halves its weight and gives away one half; a user that is dropped returns its weight to the owner; when
all weight is back, the object goes. Passing on takes no message, and no order of arrival can go wrong: what is on its way has
weight.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch.futures import Future

from mpicoll.autograd import passes
from mpicoll.errors import MpicollError
from mpicoll.rpc import wire
from mpicoll.rpc.constants import UNSET_RPC_TIMEOUT
from mpicoll.rpc.functions import async_execution, is_marked
from mpicoll.rpc.futures import mapped, settled, value_of
from mpicoll.rpc.workers import RemoteError, WorkerInfo, described

if TYPE_CHECKING:
    from mpicoll.rpc.agent import Agent

T = TypeVar("T")
Id = tuple[int, int]  # worker that made the reference, its count

_agent: Agent | None = None
_count = itertools.count()
_guard = threading.RLock()  # guards the entries


@dataclass(eq=False)
class Entry:
    """An object at its owner. ``outside``: the weight that is with users; ``value``: the object, or why there is none."""

    id: Id
    value: Future[Any] = field(default_factory=Future)
    outside: Fraction = Fraction(0)
    made: bool = False  # the call that makes it has come


_owned: dict[Id, Entry] = {}


def connect(agent: Agent | None) -> None:
    """References belong to this agent from here on; None: to nobody."""
    global _agent
    _agent = agent
    with _guard:
        _owned.clear()


def agent() -> Agent:
    """Raises: RuntimeError: init_rpc has not been called."""
    if _agent is None:
        raise RuntimeError("RPC has not been initialized. Call mpicoll.rpc.init_rpc first.")
    return _agent


def _entry(identity: Id) -> Entry:
    with _guard:
        return _owned.setdefault(identity, Entry(identity))


def _change(entry: Entry, weight: Fraction) -> None:
    """More weight has gone out (or less is out); an entry that nobody outside knows is kept by the owner's own RRefs only."""
    with _guard:
        entry.outside += weight
        if entry.outside == 0 and entry.made:
            _owned.pop(entry.id, None)
        else:
            _owned[entry.id] = entry


class RRef(Generic[T]):
    """A reference to an object on its owner, this worker or another.

    Args:   value: an object of this worker, which becomes its owner. type_hint: accepted since torch has it.
    """

    _entry: Entry | None  # at the owner
    _weight: Fraction  # elsewhere
    _made: Future[Any]  # elsewhere: ends when the owner has the object

    def __init__(self, value: T, type_hint: Any = None) -> None:
        here = agent()
        entry = Entry((here.me.id, next(_count)), made=True)
        entry.value.set_result(value)
        self._become(here, entry.id, here.me, entry)

    def _become(self, here: Agent, identity: Id, owner: WorkerInfo, entry: Entry | None) -> None:
        self._agent, self._id, self._owner, self._entry = here, identity, owner, entry

    def __repr__(self) -> str:
        kind = "OwnerRRef" if self._entry is not None else "UserRRef"
        return f"{kind}(RRefId = {self._id[0]}:{self._id[1]}, owner = {self._owner.name})"

    __str__ = __repr__

    def __del__(self) -> None:
        here: Agent | None = getattr(self, "_agent", None)
        if here is not None and self._entry is None and not here.closed:
            here.dropped.append(partial(here.notify, self._owner, _returned, self._id, self._weight))

    # -- where it is ---------------------------------------------------------------------------------------------------

    def owner(self) -> WorkerInfo:
        return self._owner

    def owner_name(self) -> str:
        return self._owner.name

    def is_owner(self) -> bool:
        return self._entry is not None

    def confirmed_by_owner(self) -> bool:
        """True once the owner has the object, or has tried to make it."""
        return self._entry is not None or self._made.done()

    def _check(self, operation: str) -> None:
        if self._agent.closed or _agent is not self._agent:
            raise MpicollError(f"RRef.{operation}: {self} belongs to an RPC that has been shut down")

    # -- its value -----------------------------------------------------------------------------------------------------

    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:
        """A copy of the object; the object itself on its owner. Waits until it is there.

        Args:   timeout: seconds; 0: no limit; -1: the agent's.
        Raises: what went wrong when it was made; RuntimeError: no answer in time.
        """
        self._check("to_here")
        if self._entry is not None:
            if not self._entry.value.done():
                self._ask(timeout, _there).wait()
            return self.local_value()
        return self._ask(timeout, _value_of).wait()  # type: ignore[no-any-return]

    def local_value(self) -> T:
        """The object itself. Raises: RuntimeError: it is on another worker; what went wrong when it was made."""
        if self._entry is None:
            raise RuntimeError(
                f"Cannot call localValue() on a non-local reference. Call it on {self._owner.name}: {self} is here on "
                f"{self._agent.me.name}"
            )
        return value_of(self._entry.value)  # type: ignore[no-any-return]

    def _ask(self, timeout: float, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future = self._agent.call(self._owner, function, (self._reference(), *arguments), timeout_s=seconds(timeout))
        future.keeps = self
        return future

    def _reference(self) -> Id | RRef[Any]:
        """What a call to the owner names the object by: the id costs no weight, and holds while this reference is kept.

        The owner's own may be the only one that knows the object: it goes along itself.
        """
        return self if self._entry is not None else self._id

    def _get_future(self) -> Future[Any]:
        """Ends when the owner has the object."""
        return self._entry.value if self._entry is not None else self._made

    def _get_type(self, timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
        self._check("_get_type")
        future = self._ask(timeout, _type_of)
        return future.wait() if blocking else future

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Runs the backward pass with the object, a scalar tensor, as its root: a distributed one, or (-1) the owner's own."""
        self._check("backward")
        self._ask(UNSET_RPC_TIMEOUT, _backward, dist_autograd_ctx_id, retain_graph).wait()

    # -- its methods ---------------------------------------------------------------------------------------------------

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """``rref.rpc_sync().method(...)``: calls the object's method on its owner, and returns the answer."""
        return Proxy(self, timeout, "rpc_sync")

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """``rref.rpc_async().method(...)``: the same, and returns a future at once."""
        return Proxy(self, timeout, "rpc_async")

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """``rref.remote().method(...)``: the same, and returns an RRef to the answer, which stays there."""
        return Proxy(self, timeout, "remote")

    # -- passed on -----------------------------------------------------------------------------------------------------

    def __reduce_ex__(self, protocol: Any) -> Any:
        message = wire.outgoing()
        if message is None:
            raise RuntimeError(
                "RRef pickling is only allowed inside RPC calls: an RRef can be passed in a call or an answer of mpicoll.rpc, "
                "and cannot be pickled otherwise"
            )
        self._check("pickling")
        with _guard:
            if self._entry is not None:
                weight = Fraction(1)
                _change(self._entry, weight)
                message.forks.append(partial(_change, self._entry, -weight))
            else:
                self._weight = weight = self._weight / 2
                message.forks.append(partial(self._take_back, weight))
        return _arrive, (self._id, self._owner.id, weight)

    def _take_back(self, weight: Fraction) -> None:
        with _guard:
            self._weight += weight


def _new_user(identity: Id, owner: WorkerInfo, weight: Fraction) -> RRef[Any]:
    rref: RRef[Any] = RRef.__new__(RRef)
    rref._become(agent(), identity, owner, None)
    rref._weight = weight
    return rref


def _new_owner(entry: Entry) -> RRef[Any]:
    rref: RRef[Any] = RRef.__new__(RRef)
    here = agent()
    rref._become(here, entry.id, here.me, entry)
    return rref


def _arrive(identity: Id, owner: int, weight: Fraction) -> RRef[Any]:
    """A reference that another worker has passed on."""
    here = agent()
    if owner == here.me.id:
        entry = _entry(identity)
        rref = _new_owner(entry)
        _change(entry, -weight)
        return rref
    rref = _new_user(identity, here.workers.find(owner), weight)
    rref._made = here.call(rref._owner, _confirm, (identity,), timeout_s=0)
    return rref


def create(
    to: WorkerInfo, function: Callable[..., Any], arguments: Any, keywords: Any, timeout: float, keeps: Any = None
) -> RRef[Any]:
    """Has ``function`` called on a worker, which keeps the result; a reference to it, at once. ``keeps``: until it is there."""
    here = agent()
    identity = (here.me.id, next(_count))
    mine = to.id == here.me.id
    weight = Fraction(0 if mine else 1)
    rref = _new_owner(_entry(identity)) if mine else _new_user(identity, to, weight)
    made = here.call(to, _make, (identity, weight, function, arguments, keywords), timeout_s=seconds(timeout))
    made.keeps = keeps
    made.when_ended(partial(_check_made, here, to, identity, weight))
    rref._made = made
    return rref


def _check_made(here: Agent, to: WorkerInfo, identity: Id, weight: Fraction, made: Future[Any]) -> None:
    """A call that did not get as far as `_make` (the owner lacks a module, say): who asks the owner must not wait for ever."""
    try:
        made.value()
    except Exception as error:  # noqa: BLE001  it belongs to who asks for the value
        if not here.closed:
            here.notify(to, _never_made, identity, weight, described(error, here.me))


def seconds(timeout: float) -> float | None:
    """None for -1, the agent's. Raises: ValueError: another negative number."""
    if timeout == UNSET_RPC_TIMEOUT:
        return None
    if not timeout >= 0:
        raise ValueError(f"timeout must be 0 (no limit) or more seconds, got {timeout}")
    return timeout


# -- at the owner ------------------------------------------------------------------------------------------------------


@async_execution
def _make(identity: Id, weight: Fraction, function: Callable[..., Any], arguments: Any, keywords: Any) -> Future[Any]:
    """Answered when the object is there: with nothing, or with the error, which the reference keeps."""
    entry = _entry(identity)
    done: Future[Any] = Future()

    def keep(future: Future[Any]) -> None:
        try:
            entry.value.set_result(future.value())
        except Exception as error:  # noqa: BLE001  it belongs to who asks for the value
            entry.value.set_exception(described(error, agent().me).exception())
        entry.made = True
        _change(entry, weight)
        done.set_result(None)

    try:
        value = function(*arguments, **keywords)
        result = value if is_marked(function) else settled(value)
        result.add_done_callback(keep)
    except BaseException as error:  # noqa: BLE001  it belongs to who asks for the value
        failed: Future[Any] = Future()
        failed.set_exception(described(error, agent().me).exception())
        keep(failed)
    return done


def _never_made(identity: Id, weight: Fraction, error: RemoteError) -> None:
    entry = _entry(identity)
    if not entry.value.done():
        entry.value.set_exception(error.exception())
        entry.made = True
        _change(entry, weight)


def _value(reference: Id | RRef[Any]) -> Future[Any]:
    if isinstance(reference, RRef):
        assert reference._entry is not None
        return reference._entry.value
    return _entry(reference).value


@async_execution
def _value_of(reference: Id | RRef[Any]) -> Future[Any]:
    return _value(reference)


def _confirm(identity: Id) -> None:
    _entry(identity)


def _returned(identity: Id, weight: Fraction) -> None:
    _change(_entry(identity), -weight)


@async_execution
def _there(reference: Id | RRef[Any]) -> Future[Any]:
    return mapped(_value(reference), lambda value: None)


@async_execution
def _type_of(reference: Id | RRef[Any]) -> Future[Any]:
    return mapped(_value(reference), type)


def _backward(reference: Id | RRef[Any], context_id: int, retain_graph: bool) -> None:
    value = value_of(_value(reference))
    if not isinstance(value, torch.Tensor):
        raise RuntimeError(f"RRef.backward: the RRef holds a {type(value).__name__}, not a tensor")
    if context_id == -1:
        value.backward(retain_graph=retain_graph)
    else:
        passes.backward(context_id, [value], retain_graph)


@async_execution
def _invoke(reference: Id | RRef[Any], name: str, arguments: Any, keywords: Any) -> Future[Any]:
    """Calls a method of the object; a method that is marked async_execution is answered when its future is."""
    method = getattr(value_of(_value(reference)), name)
    value = method(*arguments, **keywords)
    return value if is_marked(method) else settled(value)


class Proxy:
    """``proxy.method(*arguments)`` calls that method on the owner."""

    def __init__(self, rref: RRef[Any], timeout: float, how: str) -> None:
        self._rref, self._timeout, self._how = rref, timeout, how

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def method(*arguments: Any, **keywords: Any) -> Any:
            rref = self._rref
            rref._check(self._how)
            everything = (rref._reference(), name, arguments, keywords)
            if self._how == "remote":
                return create(rref._owner, _invoke, everything, {}, self._timeout, rref)
            future = rref._agent.call(rref._owner, _invoke, everything, timeout_s=seconds(self._timeout))
            future.keeps = rref
            return future.wait() if self._how == "rpc_sync" else future

        return method

"""References to objects that live on one worker, its owner, and are used by many.

Who keeps an object alive: weighted reference counting (Bevan, 1987). The owner gives the first user the weight 1; a user that
passes the reference on halves its weight and gives away one half; a user that is dropped returns its weight to the owner; when
all weight is back, the object goes. Passing on takes no message, and no order of arrival can go wrong: what is on its way has
weight.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch.futures import Future

from mpicoll.errors import MpicollError
from mpicoll.rpc import entries, owner, wire
from mpicoll.rpc.constants import UNSET_RPC_TIMEOUT
from mpicoll.rpc.entries import Entry, Id, entry_of
from mpicoll.rpc.futures import CallFuture, CallTimedOut, settled, timed_out, value_of
from mpicoll.rpc.workers import WorkerInfo, described

if TYPE_CHECKING:
    from mpicoll.rpc.agent import Agent

T = TypeVar("T")

_agent: Agent | None = None
_users: dict[int, weakref.ref[RRef[Any]]] = {}  # the references here to objects elsewhere


def connect(agent: Agent | None) -> None:
    """References belong to this agent from here on; None: to nobody."""
    global _agent
    _agent = agent
    entries.begin(agent.me if agent is not None else None)
    _users.clear()


def agent() -> Agent:
    """Raises: RuntimeError: init_rpc has not been called."""
    if _agent is None:
        raise RuntimeError("RPC has not been initialized. Call mpicoll.rpc.init_rpc first.")
    return _agent


def agent_of_a_reference() -> Agent:
    """The same, in the words that torch has for references."""
    if _agent is None:
        raise RuntimeError("Current RPC agent is not set! Did you initialize the RPC framework (e.g. by calling `rpc.init_rpc`)?")
    return _agent


class RRef(Generic[T]):
    """A reference to an object on its owner, this worker or another.

    Args:   value: an object of this worker, which becomes its owner. type_hint: accepted since torch has it.
    """

    _entry: Entry | None  # at the owner
    _weight: Fraction  # elsewhere
    _fork: Id  # elsewhere: of this copy of the reference
    _made: Future[Any] | None = None  # ends when the owner has the object, or too late; None: it was there at once
    _deleted = False  # elsewhere: the weight is back at the owner
    _type: Future[Any] | None = None  # of the object, once it has been asked for
    _attributes: frozenset[str] = frozenset()  # that the object has, as far as they have been asked for

    def __init__(self, value: T, type_hint: Any = None) -> None:
        here = agent_of_a_reference()
        entry = Entry(entries.new_id(here.me.id), made=True)
        entry.value.set_result(value)
        self._become(here, entry.id, here.me, entry)

    def _become(self, here: Agent, identity: Id, worker: WorkerInfo, entry: Entry | None) -> None:
        self._agent, self._id, self._owner, self._entry = here, identity, worker, entry

    def __repr__(self) -> str:
        identity = entries.written(self._id)
        if self._entry is not None:
            return f"OwnerRRef({identity})"
        return f"UserRRef(RRefId = {identity}, ForkId = {entries.written(self._fork)})"

    __str__ = __repr__

    def _named(self) -> str:
        """As torch's errors name it."""
        identity = f"rref_id={entries.written(self._id)}"
        if self._entry is not None:
            return f"OwnerRRef({identity})"
        return f"UserRRef({identity}, fork_id={entries.written(self._fork)})"

    def __del__(self) -> None:
        here: Agent | None = getattr(self, "_agent", None)
        if here is None or self._entry is not None:
            return
        _users.pop(id(self), None)
        if not self._deleted and not here.closed:
            here.dropped.append(partial(here.notify, self._owner, owner.give_back, self._id, self._weight))

    def _delete(self) -> None:
        """Gives the weight back, so that this reference can no longer be used."""
        with entries.guard:
            if self._deleted:
                return
            self._deleted = True
        self._agent.notify(self._owner, owner.give_back, self._id, self._weight)

    # -- where it is ---------------------------------------------------------------------------------------------------

    def owner(self) -> WorkerInfo:
        return self._owner

    def owner_name(self) -> str:
        return self._owner.name

    def is_owner(self) -> bool:
        return self._entry is not None

    def confirmed_by_owner(self) -> bool:
        """True once the owner has the object, or has tried to make it."""
        return self._entry is not None or (self._made is not None and self._made.done())

    def _check(self, operation: str) -> None:
        if self._deleted or self._agent.closed or _agent is not self._agent:
            use = "fork an UserRRef" if operation == "pickling" else f"{operation}() on it"
            raise MpicollError(f"{self._named()} has been deleted. Cannot call {use} after deletion. RPC has been shut down.")
        if operation in ("to_here", "pickling") and self._entry is None and timed_out(self._made):
            raise RuntimeError(
                "RRef creation via rpc.remote() timed out, and it is possible that the RRef on the owner node does not exist. "
                f"Give rpc.remote a longer timeout than {self._agent.timeout_s:g} s, or 0 for none: {self._named()}"
            )

    # -- its value -----------------------------------------------------------------------------------------------------

    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:
        """A copy of the object; the object itself on its owner. Waits until it is there.

        Args:   timeout: seconds; 0: no limit; -1: the agent's.
        Raises: what went wrong when it was made; RuntimeError: no answer in time.
        """
        self._check("to_here")
        if self._entry is not None:
            if not self._entry.value.done():
                self._ask(timeout, owner.wait_until_made).wait()
            return self.local_value()
        return self._ask(timeout, owner.get_value).wait()  # type: ignore[no-any-return]

    def local_value(self) -> T:
        """The object itself. Raises: RuntimeError: it is on another worker; what went wrong when it was made."""
        if self._entry is None:
            raise RuntimeError(
                f"For {self._named()}, can't call localValue() on user {self._agent.me}. Call it on owner {self._owner}"
            )
        return value_of(self._entry.value)  # type: ignore[no-any-return]

    def _ask(self, timeout: float, function: Callable[..., Any], *arguments: Any) -> CallFuture:
        future = self._agent.call(self._owner, function, (self._reference(), *arguments), timeout_s=seconds(timeout))
        future.keeps = self
        return future

    def _reference(self) -> Id | RRef[Any]:
        """What a call to the owner names the object by: the id costs no weight, and holds while this reference is kept.

        The owner's own may be the only one that knows the object: it goes along itself.
        """
        return self if self._entry is not None else self._id

    def _get_future(self) -> Future[Any]:
        """Ends when the owner has the object, with an error if that takes longer than the timeout of `rpc.remote`."""
        if self._entry is None:
            assert self._made is not None
            return self._made
        value = self._entry.value
        return value if self._made is None else self._made.then(lambda made: (made.value(), value_of(value))[1])

    def _get_type(self, timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
        """The object's type, which only the first call asks the owner for; a future of it where ``blocking`` is False."""
        self._check("_get_type")
        future = self._type
        if future is None:
            future = self._type = self._ask(timeout, owner.get_type)
            future.when_ended(self._type_came)
        return future.wait() if blocking else future

    def _type_came(self, future: Future[Any]) -> None:
        try:
            future.value()
        except Exception:  # noqa: BLE001  raised by ``wait``; the next call asks again
            self._type = None

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Runs the backward pass with the object, a scalar tensor, as its root: a distributed one, or (-1) the owner's own."""
        self._check("backward")
        self._ask(UNSET_RPC_TIMEOUT, owner.run_backward, dist_autograd_ctx_id, retain_graph).wait()

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
        self._check("pickling")
        message = wire.pickling_state()
        if message is None:
            raise RuntimeError(
                "Can not pickle rref in python pickler, rref can only be pickled when using RPC: pass it in a call or an answer"
            )
        with entries.guard:
            if self._entry is not None:
                weight = Fraction(1)
                entries.change(self._entry, weight)
                message.forks.append(partial(entries.change, self._entry, -weight))
            else:
                self._weight = weight = self._weight / 2
                message.forks.append(partial(self._take_back, weight))
        fork = entries.new_id(self._agent.me.id)
        return _arrive, (self._id, self._owner.id, weight, fork, self.confirmed_by_owner())

    def _take_back(self, weight: Fraction) -> None:
        with entries.guard:
            self._weight += weight


def _new_user(identity: Id, worker: WorkerInfo, weight: Fraction, fork: Id) -> RRef[Any]:
    rref: RRef[Any] = RRef.__new__(RRef)
    rref._become(agent(), identity, worker, None)
    rref._weight, rref._fork = weight, fork
    _users[id(rref)] = weakref.ref(rref)
    return rref


def _new_owner(entry: Entry) -> RRef[Any]:
    rref: RRef[Any] = RRef.__new__(RRef)
    here = agent()
    rref._become(here, entry.id, here.me, entry)
    return rref


def _arrive(identity: Id, owner_id: int, weight: Fraction, fork: Id, confirmed: bool) -> RRef[Any]:
    """A reference that another worker has passed on. What is made of it runs when the owner has confirmed it."""
    here = agent()
    if owner_id == here.me.id:
        entry = entry_of(identity)
        rref = _new_owner(entry)
        entries.change(entry, -weight)
        return rref
    rref = _new_user(identity, here.workers.find(owner_id), weight, fork)
    if confirmed:
        rref._made = settled(None)
    else:
        rref._made = here.call(rref._owner, owner.confirm, (identity,), timeout_s=0)
        wire.unconfirmed().append(rref._made)
    return rref


def create(
    to: WorkerInfo, function: Callable[..., Any], arguments: Any, keywords: Any, timeout: float, keeps: Any = None
) -> RRef[Any]:
    """Has ``function`` called on a worker, which keeps the result; a reference to it, at once. ``keeps``: until it is there."""
    here = agent()
    identity = entries.new_id(here.me.id)
    mine = to.id == here.me.id
    weight = Fraction(0 if mine else 1)
    if mine:
        rref = _new_owner(entry_of(identity))
    else:
        rref = _new_user(identity, to, weight, entries.new_id(here.me.id))
    try:
        made = here.call(to, owner.make, (identity, weight, function, arguments, keywords), timeout_s=seconds(timeout))
    except BaseException:
        rref._deleted = True  # the owner knows nothing of it: there is no weight to give back
        entries.forget(identity)
        raise
    made.keeps = keeps
    made.when_ended(partial(_check_made, here, to, identity, weight))
    rref._made = made
    return rref


def _check_made(here: Agent, to: WorkerInfo, identity: Id, weight: Fraction, made: Future[Any]) -> None:
    """A call that did not get as far as `make` (the owner lacks a module, say): a user that asks must not wait for ever."""
    try:
        made.value()
    except Exception as error:  # noqa: BLE001  it belongs to who asks for the value
        if not isinstance(error, CallTimedOut) and not here.closed:  # a late one may get there yet
            here.notify(to, owner.never_made, identity, weight, described(error, here.me))


def seconds(timeout: float) -> float | None:
    """None for -1, the agent's. Raises: ValueError: another negative number."""
    if timeout == UNSET_RPC_TIMEOUT:
        return None
    if not timeout >= 0:
        raise ValueError(f"timeout must be 0 (no limit) or more seconds, got {timeout}")
    return timeout


# -- its methods -------------------------------------------------------------------------------------------------------


class Proxy:
    """``proxy.method(*arguments)`` calls that method on the owner."""

    def __init__(self, rref: RRef[Any], timeout: float, how: str) -> None:
        self._rref, self._timeout, self._how = rref, timeout, how

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._call, name)

    def _call(self, name: str, *arguments: Any, **keywords: Any) -> Any:
        rref = self._rref
        rref._check(self._how)
        everything = (rref._reference(), name, arguments, keywords)
        if self._how == "remote":
            self._check_attribute(name)
            return create(rref._owner, owner.invoke, everything, {}, self._timeout, rref)
        future = rref._agent.call(rref._owner, owner.invoke, everything, timeout_s=seconds(self._timeout))
        future.keeps = rref
        return future.wait() if self._how == "rpc_sync" else future

    def _check_attribute(self, name: str) -> None:
        """Asks the owner once for each name. Raises: AttributeError; RuntimeError: the object is not there in time."""
        rref = self._rref
        if name not in rref._attributes:
            rref._ask(self._timeout, owner.find_attribute, name).wait()
            rref._attributes = rref._attributes | {name}


# -- all of them -------------------------------------------------------------------------------------------------------


def delete_users() -> None:
    """Gives back the weight of every reference here to an object elsewhere; they cannot be used afterwards."""
    for reference in list(_users.values()):
        rref = reference()
        if rref is not None:
            rref._delete()


def pending_users() -> int:
    """References here whose owner has not confirmed them yet."""
    live = [reference() for reference in list(_users.values())]
    return sum(rref is not None and rref._made is not None and not rref._made.done() for rref in live)

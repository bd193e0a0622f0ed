"""References to objects that live on one worker, the owner, and are used by many.

Weighted reference counting (Bevan, 1987) keeps an object alive. The first user gets a unit of weight. A user that passes the
reference on keeps one half of its weight and gives the other half away. A user that is dropped returns its weight to the owner.
When all weight is back, the object is freed. Passing on takes no message of its own, and the order in which messages arrive does
not matter, because a reference that is on its way has weight.

A unit has a finite number of parts. A user that has one part left makes itself another unit, and tells the owner in one notice
that this one exists and that the part is back. It need not wait: the owner counts the parts of each unit by itself. The count of
the new unit cannot be 0 by mistake if its parts return before the notice: it is negative.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from torch.futures import Future

from mpicoll._base.errors import MpicollError
from mpicoll.rpc import owner, wire
from mpicoll.rpc.agent import NOT_SET, Agent
from mpicoll.rpc.constants import UNSET_RPC_TIMEOUT
from mpicoll.rpc.futures import CallFuture, CallTimedOut, completed_future, error_of, map_future, name_of, value_of
from mpicoll.rpc.options import timeout_seconds
from mpicoll.rpc.owned_objects import WHOLE, Entry, Id, Weight, id_text
from mpicoll.rpc.workers import WorkerInfo, describe

T = TypeVar("T")


class RRef(Generic[T]):
    """A reference to an object on its owner, which is this worker or another one (not collective).

    RRefs travel in the arguments and results of remote calls, and nowhere else. `mpicoll.rpc.remote` makes one to an object on
    another worker.

    Args:
        value: An object of this worker, which becomes its owner.
        type_hint: Accepted because torch has it, and not used.

    Raises:
        RuntimeError: RPC has not been initialised.

    Example:
        >>> rref = rpc.remote("worker1", torch.ones, ((2,),))
        >>> rref.to_here()
        tensor([1., 1.])
        >>> rref.rpc_sync().sum().item()  # calls the method on worker1
        2.0
    """

    _entry: Entry | None  # on the owner
    _weight: Weight  # on other workers
    _fork: Id  # on other workers: id of this copy of the reference
    _made: Future[Any] | None = None  # completes when the owner has the object; None: the owner had it before
    _deleted = False  # on other workers: the weight is back at the owner
    _type: CallFuture | None = None  # of the object, once asked for
    _attributes: frozenset[str] = frozenset()  # names that the object is known to have

    def __init__(self, value: T, type_hint: Any = None) -> None:
        agent = Agent.get(NOT_SET)
        entry = Entry(agent.objects.new_id(), is_made=True)
        entry.value.set_result(value)
        self._agent, self._id, self._owner, self._entry = agent, entry.id, agent.me, entry

    def __repr__(self) -> str:
        if self._entry is not None:
            return f"OwnerRRef({id_text(self._id)})"
        return f"UserRRef(RRefId = {id_text(self._id)}, ForkId = {id_text(self._fork)})"

    def _error_name(self) -> str:
        """Returns the name that torch's errors give to this reference."""
        if self._entry is not None:
            return f"OwnerRRef(rref_id={id_text(self._id)})"
        return f"UserRRef(rref_id={id_text(self._id)}, fork_id={id_text(self._fork)})"

    def __del__(self) -> None:
        agent: Agent | None = getattr(self, "_agent", None)
        if agent is not None and self._entry is None and not self._deleted and not agent.calls.closed:
            self._give_back(self._weight)

    def _delete(self) -> None:
        """Gives the weight back. The reference can no longer be used."""
        with self._agent.objects.guard:
            if self._deleted:
                return
            self._deleted = True
        self._give_back(self._weight)

    def _give_back(self, weight: Weight, new: Weight | None = None) -> None:
        self._agent.notices.append(partial(self._agent.notify, self._owner, owner.give_back, self._id, weight, new))

    # -- where it is ---------------------------------------------------------------------------------------------------

    def owner(self) -> WorkerInfo:
        """Returns the worker that has the object."""
        return self._owner

    def owner_name(self) -> str:
        """Returns the name of the worker that has the object."""
        return self._owner.name

    def is_owner(self) -> bool:
        """Returns whether this worker has the object."""
        return self._entry is not None

    def confirmed_by_owner(self) -> bool:
        """Returns whether the owner has the object, or has tried to create it."""
        return self._entry is not None or (self._made is not None and self._made.done())

    def _check(self, operation: str) -> None:
        if self._deleted or self._agent.calls.closed or Agent.current is not self._agent:
            use = "fork an UserRRef" if operation == "pickling" else f"{operation}() on it"
            raise MpicollError(
                f"{self._error_name()} has been deleted. Cannot call {use} after deletion. RPC has been shut down."
            )
        has_timed_out = isinstance(getattr(self._made, "error", None), CallTimedOut)
        if operation in ("to_here", "pickling") and self._entry is None and has_timed_out:
            raise RuntimeError(
                "RRef creation via rpc.remote() timed out, and it is possible that the RRef on the owner node does not exist. "
                f"Give rpc.remote a longer timeout than {self._agent.timeout_s:g} s, or 0 for none: {self._error_name()}. "
                f"{self._made.error}"  # type: ignore[union-attr]
            )

    # -- its value -----------------------------------------------------------------------------------------------------

    def to_here(self, timeout: float = UNSET_RPC_TIMEOUT) -> T:
        """Returns a copy of the object; on its owner, the object itself. Waits until the object has been created.

        Args:
            timeout: Seconds; 0: no limit; -1: the agent's.

        Raises:
            RuntimeError: No answer in time, or this reference has been deleted.
            Exception: What the creation of the object raised, with its type.
        """
        self._check("to_here")
        if self._entry is not None:
            if not self._entry.value.done():
                self._ask("RRef.to_here", timeout, owner.wait_until_made).wait()
            return self.local_value()
        return self._ask("RRef.to_here", timeout, owner.get_value).wait()  # type: ignore[no-any-return]

    def local_value(self) -> T:
        """Returns the object itself.

        Raises:
            RuntimeError: The object is on another worker.
            Exception: What the creation of the object raised, with its type.
        """
        if self._entry is None:
            raise RuntimeError(
                f"For {self._error_name()}, can't call localValue() on user {self._agent.me}. Call it on owner {self._owner}"
            )
        return value_of(self._entry.value)  # type: ignore[no-any-return]

    def _ask(self, name: str, timeout: float, function: Callable[..., Any], *arguments: Any) -> CallFuture:
        """Calls a function of owner.py on the owner. ``name``: what the program has called, for errors."""
        arguments = (self._reference(), *arguments)
        future = self._agent.call(self._owner, function, arguments, timeout_s=timeout_seconds(timeout), name=name)
        future.keeps = self
        return future

    def _reference(self) -> Id | RRef[Any]:
        """Returns the argument that names the object to its owner.

        From another worker it is the id, which carries no weight: this reference holds the object until the answer is here. On
        the owner it is the reference, because the owner's RRef may be the only thing that holds the entry.
        """
        return self if self._entry is not None else self._id

    def _get_future(self) -> Future[Any]:
        """Returns a future that completes when the object exists, with an error if rpc.remote's timeout passes before."""
        if self._entry is None:
            assert self._made is not None
            return self._made
        value = self._entry.value
        return value if self._made is None else map_future(self._made, lambda _: value_of(value))

    def _get_type(self, timeout: float = UNSET_RPC_TIMEOUT, blocking: bool = True) -> Any:
        """Returns the type of the object, or a future of it. Asks the owner once, and again only after an error."""
        self._check("_get_type")
        future = self._type
        if future is None or future.error is not None:
            future = self._type = self._ask("the type of an RRef", timeout, owner.get_type)
        return future.wait() if blocking else future

    def backward(self, dist_autograd_ctx_id: int = -1, retain_graph: bool = False) -> None:
        """Runs a backward pass on the owner, with the object, a tensor of one element, as its root.

        Args:
            dist_autograd_ctx_id: Id of a distributed autograd context; -1: a backward pass of the owner alone.
            retain_graph: Keep what a second pass needs.

        Raises:
            RuntimeError: The object is not such a tensor, or the backward pass failed.
        """
        self._check("backward")
        self._ask("RRef.backward", UNSET_RPC_TIMEOUT, owner.run_backward, dist_autograd_ctx_id, retain_graph).wait()

    # -- its methods ---------------------------------------------------------------------------------------------------

    def rpc_sync(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Returns a proxy: ``rref.rpc_sync().method(...)`` calls a method of the object on its owner and returns the answer.

        Args:
            timeout: Of the call, in seconds; 0: no limit; -1: the agent's.
        """
        return Proxy(self, timeout, "rpc_sync")

    def rpc_async(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Returns a proxy: ``rref.rpc_async().method(...)`` calls a method of the object on its owner and returns a future.

        Args:
            timeout: Of the call, in seconds; 0: no limit; -1: the agent's.
        """
        return Proxy(self, timeout, "rpc_async")

    def remote(self, timeout: float = UNSET_RPC_TIMEOUT) -> Any:
        """Returns a proxy: ``rref.remote().method(...)`` calls a method on the owner, which keeps the answer; it returns an RRef.

        Args:
            timeout: Of the call, in seconds; 0: no limit; -1: the agent's.
        """
        return Proxy(self, timeout, "remote")

    # -- passing it on -------------------------------------------------------------------------------------------------

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._check("pickling")
        state = wire.pickling_state()
        if state is None:
            raise RuntimeError(
                "Can not pickle rref in python pickler, rref can only be pickled when using RPC: pass it in a call or an answer"
            )
        objects, fork = self._agent.objects, self._agent.objects.new_id()
        if self._entry is not None:
            weight = (fork, WHOLE)
            objects.give(self._entry, weight)
            state.undo.append(partial(objects.take_back, self._entry, weight))
        else:
            weight = self._half()
            state.undo.append(partial(self._give_back, weight))
        return _unpickle, (self._id, self._owner.id, weight, fork, self.confirmed_by_owner())

    def _half(self) -> Weight:
        """Gives away one half of the weight."""
        with self._agent.objects.guard:
            unit, parts = self._weight
            if parts == 1:
                unit, parts = new = (self._agent.objects.new_id(), WHOLE)
                self._give_back(self._weight, new)
            self._weight = (unit, parts // 2)
            return self._weight


def _unpickle(identity: Id, owner_rank: int, weight: Weight, fork: Id, is_confirmed: bool) -> RRef[Any]:
    """Makes the reference that another worker has passed on. A call with it runs after the owner has confirmed it."""
    agent = Agent.get()
    rref = _reference(agent, identity, agent.workers.find(owner_rank), weight, fork)
    if rref._entry is not None:
        agent.objects.take_back(rref._entry, weight)
        return rref
    if is_confirmed:
        rref._made = completed_future(None)
    else:
        rref._made = agent.call(rref._owner, owner.confirm, (identity,), timeout_s=0)
        wire.unconfirmed().append(rref._made)
    return rref


def _reference(agent: Agent, identity: Id, worker: WorkerInfo, weight: Weight, fork: Id) -> RRef[Any]:
    """Makes a reference to an object of this worker or another one; ``weight`` and ``fork`` are for those on other workers."""
    rref: RRef[Any] = RRef.__new__(RRef)
    rref._agent, rref._id, rref._owner, rref._entry = agent, identity, worker, None
    if worker == agent.me:
        rref._entry = agent.objects.entry(identity)
    else:
        rref._weight, rref._fork = weight, fork
        agent.users[id(rref)] = rref
    return rref


def create(
    worker: WorkerInfo,
    function: Callable[..., Any],
    arguments: Any,
    keywords: Any,
    timeout: float,
    keeps: Any = None,
    name: str = "",
) -> RRef[Any]:
    """Calls ``function`` on a worker, which keeps the result; at once, returns a reference to it. Holds ``keeps`` meanwhile.

    ``name``: what the program has called, for errors; empty: the function.
    """
    agent = Agent.get()
    agent.calls.check_open(worker)
    identity, fork = agent.objects.new_id(), agent.objects.new_id()
    weight = (fork, 0 if worker == agent.me else WHOLE)
    rref = _reference(agent, identity, worker, weight, fork)
    try:
        to_make = (identity, weight, function, arguments, keywords)
        name = name or name_of(function)
        made = agent.call(worker, owner.make, to_make, timeout_s=timeout_seconds(timeout), name=name)
    except BaseException:
        rref._deleted = True  # the owner has given no weight that could be returned
        agent.objects.forget(identity)
        raise
    made.keeps = keeps
    made.when_ended(partial(_report_failure, agent, worker, identity, weight))
    rref._made = made
    return rref


def _report_failure(agent: Agent, worker: WorkerInfo, identity: Id, weight: Weight, made: Future[Any]) -> None:
    """Tells the owner if the call failed before `owner.make` ran (a module that it lacks, say): users must not wait for ever."""
    error = error_of(made)
    if error is not None and not isinstance(error, CallTimedOut) and not agent.calls.closed:  # after a timeout it may still run
        agent.notify(worker, owner.never_made, identity, weight, describe(error, agent.me))


class Proxy:
    """``proxy.method(*arguments)`` calls that method of the object on its owner."""

    def __init__(self, rref: RRef[Any], timeout: float, how: str) -> None:
        self._rref, self._timeout, self._how = rref, timeout, how

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._call, name)

    def _call(self, name: str, *arguments: Any, **keywords: Any) -> Any:
        rref = self._rref
        rref._check(self._how)
        if self._how == "remote":
            self._check_attribute(name)
            to_invoke = (rref._reference(), name, arguments, keywords)
            return create(rref._owner, owner.invoke, to_invoke, {}, self._timeout, rref, f"{name} of an RRef")
        future = rref._ask(f"{name} of an RRef", self._timeout, owner.invoke, name, arguments, keywords)
        return future.wait() if self._how == "rpc_sync" else future

    def _check_attribute(self, name: str) -> None:
        """Raises what getattr on the object raises. Asks the owner once for each name."""
        rref = self._rref
        if name not in rref._attributes:
            rref._ask(f"{name} of an RRef", self._timeout, owner.find_attribute, name).wait()
            rref._attributes = rref._attributes | {name}

"""One worker's end of RPC: sends calls, carries out those of others, brings answers to who waits for them.

    rpc_sync on worker a                                      worker b
    [1] Agent.call packs function and arguments   ------>     [2] _look takes the message, _carry_out unpacks and calls
    [4] _look takes the answer, _settle completes  <------     [3] _answer packs what came out, or the exception
        the future that the caller waits for

Who looks for messages, and which thread runs what: service.py.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.futures import Future

from mpicoll._mpi.mailbox import Mailbox
from mpicoll._mpi.runtime import Runtime
from mpicoll.autograd import contexts, passes
from mpicoll.errors import MpicollError, WorkerLeft
from mpicoll.rpc import wire
from mpicoll.rpc.devices import DeviceMaps
from mpicoll.rpc.functions import answer_of, is_marked
from mpicoll.rpc.futures import CallFuture, CallTimedOut
from mpicoll.rpc.options import MPIRpcBackendOptions
from mpicoll.rpc.pool import Pool
from mpicoll.rpc.service import Service, Task
from mpicoll.rpc.transport import Transport
from mpicoll.rpc.workers import WorkerInfo, Workers, described, reported

CALL, RESULT, ERROR, NOTICE, LEAVING, READY = range(6)  # kinds of messages

ENDED_KEPT = 1000  # deadlines of calls that have ended; more are thrown away


class Agent:
    """What init_rpc makes and shutdown ends. ``_guard`` guards the calls under way and the counts."""

    def __init__(self, there: Runtime, name: str, options: MPIRpcBackendOptions) -> None:
        self.there = there
        self.options = options
        self.mailbox = Mailbox(self.there)
        everybody: list[Any] = self.mailbox.exchange((name, self.there.rank, options.device_maps))
        self.workers = Workers([(its_name, rank) for its_name, rank, _ in everybody])
        self._devices = DeviceMaps(name, {its_name: maps for its_name, _, maps in everybody})
        self.me = self.workers.find(self.there.rank)
        self.timeout_s = options.rpc_timeout
        self.pool = Pool(options.num_worker_threads)
        self.dropped: deque[Callable[[], None]] = deque()  # what garbage collection has left to be done (takes no lock)
        self.closed: str | None = None
        self._guard = threading.Lock()
        self._calls: dict[int, tuple[CallFuture, WorkerInfo, str, float]] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._number = itertools.count(1)
        self._sent = self._received = 0  # messages; a call counts as received when it has been answered
        self.under_way = 0  # calls of others
        self.ready: set[int] = set()  # workers that are at their shutdown, after some other has left
        self._buried = 0  # of the mailbox's dead, those whose calls have failed
        self._transport = Transport(self.mailbox, self.me.id)
        self._service = Service(self._look, self._transport.busy, self.pool, lambda: self.under_way > options.num_worker_threads)

    def start(self) -> None:
        """From here on it answers."""
        self._service.start()

    # -- [1] call ------------------------------------------------------------------------------------------------------

    def call(
        self, to: WorkerInfo, function: Callable[..., Any], arguments: Any, keywords: Any = None, timeout_s: float | None = None
    ) -> CallFuture:
        """Has ``function`` called on a worker; the answer is the future's.

        Args:   timeout_s: seconds until the future fails; 0: never; None: the agent's.
        Raises: what pickling raises; WorkerLeft.
        """
        future = CallFuture(self._service.help)
        seconds = self.timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + seconds if seconds > 0 else float("inf")
        number = next(self._number)
        with self._guard:
            self._check_open(to)
            self._calls[number] = (future, to, _name(function), seconds)
            if seconds > 0:
                self._remember(deadline, number)
        try:
            self._send(CALL, to, number, (function, arguments, keywords or {}))
        except BaseException:
            with self._guard:
                self._calls.pop(number, None)
            raise
        return future

    def failed(self, error: Exception) -> CallFuture:
        """The future of a call that has failed before it could be sent."""
        future = CallFuture(self._service.help)
        future.fail(error)
        return future

    def notify(self, to: WorkerInfo, function: Callable[..., Any], *arguments: Any) -> None:
        """Has ``function`` called on a worker, without an answer; nothing if it has left, or RPC has ended."""
        with contextlib.suppress(MpicollError):
            self._send(NOTICE, to, 0, (function, arguments, {}))

    def _remember(self, deadline: float, number: int) -> None:
        """With the guard held."""
        if len(self._deadlines) > 2 * len(self._calls) + ENDED_KEPT:
            kept = [entry for entry in self._deadlines if entry[1] in self._calls]
            heapq.heapify(kept)
            self._deadlines = kept
        heapq.heappush(self._deadlines, (deadline, number))

    def _check_open(self, to: WorkerInfo) -> None:
        if self.closed:
            raise MpicollError(self.closed)
        if to.id in self.workers.left:
            raise WorkerLeft(f"worker {to.name!r} (rank {to.id}) has left: {self.workers.left[to.id]}")

    def _send(self, kind: int, to: WorkerInfo, call: int, obj: Any) -> None:
        number = next(self._number)
        state = wire.PicklingState(to.id, self._devices.to(to.name, kind == RESULT), contexts.current() is not None)
        message = wire.pack(kind, call, number, obj, partial(contexts.attach, to=to.id), state)
        with self._guard:
            self._check_open(to)
            self._sent += 1
        try:
            self._transport.send(to.id, message)
        except Exception as error:
            self._lost(to.id, f"MPI could not send to it: {error}")
            raise WorkerLeft(f"worker {to.name!r} (rank {to.id}): {error}") from error

    def _look(self) -> list[Task]:
        """Looks for messages once; what is to be done about those that are here."""
        if self.dropped:
            self.pool.submit(self._tidy)
        deadlines = self._deadlines  # only who looks takes from it
        if deadlines and deadlines[0][0] < time.monotonic():
            self._expire()
        tasks = [self._task(message) for message in self._transport.arrived()]
        if len(self.mailbox.dead) > self._buried:
            fresh = self.mailbox.dead[self._buried :]
            self._buried += len(fresh)
            tasks += [Task(partial(self._lost, rank, "its process has died"), True) for rank in fresh]
        return tasks

    def _task(self, message: wire.IncomingMessage) -> Task:
        if message.kind in (RESULT, ERROR):
            entry = self._calls.get(message.call)
            return Task(partial(self._settle, message), entry is None or not entry[0].watched)
        if message.kind == LEAVING:
            return Task(partial(self._left, message), True)
        if message.kind == READY:
            return Task(partial(self.ready.add, message.source), True)
        with self._guard:
            self.under_way += 1
        return Task(partial(self._carry_out, message), False)

    # -- [2] carry out, [3] answer -------------------------------------------------------------------------------------

    def _carry_out(self, message: wire.IncomingMessage) -> None:
        caller = self.workers.find(message.source)
        context: contexts.Context | None = None

        def accept(tensors: list[Tensor], extra: contexts.Extra) -> list[Tensor]:
            nonlocal context
            if extra is not None:
                context = contexts.find_or_make(extra[0])
            return contexts.accept(tensors, extra, message.source)

        try:
            function, arguments, keywords = wire.unpack(message, accept)
            for confirmation in message.unconfirmed:
                _wait_for(confirmation)
            with contexts.entered(context):
                result = function(*arguments, **keywords)
            if is_marked(function):
                result = answer_of(function, result)
                result.add_done_callback(partial(self._answer_later, message, caller, context))
                return
        except BaseException as error:  # noqa: BLE001  it belongs to the caller; sys.exit() does, too
            self._answer(message, caller, context, ERROR, reported(error, self.me))
        else:
            self._answer(message, caller, context, RESULT, result)

    def _answer_later(
        self, message: wire.IncomingMessage, caller: WorkerInfo, context: contexts.Context | None, future: Future[Any]
    ) -> None:
        try:
            result = future.value()
        except Exception as error:  # noqa: BLE001  it belongs to the caller
            self._answer(message, caller, context, ERROR, described(error, self.me))
        else:
            self._answer(message, caller, context, RESULT, result)

    def _answer(
        self, message: wire.IncomingMessage, caller: WorkerInfo, context: contexts.Context | None, kind: int, result: Any
    ) -> None:
        try:
            if message.kind == NOTICE:
                return
            with contexts.entered(context):
                try:
                    self._send(kind, caller, message.call, result)
                except WorkerLeft:
                    return  # nobody is there to be told
                except Exception as error:  # noqa: BLE001  the result cannot be pickled: it belongs to the caller
                    self._send(ERROR, caller, message.call, described(error, self.me))
        except MpicollError:
            return  # RPC has ended meanwhile, and with it all calls
        finally:
            with self._guard:
                self._received += 1
                self.under_way -= 1

    # -- [4] settle ----------------------------------------------------------------------------------------------------

    def _settle(self, message: wire.IncomingMessage) -> None:
        with self._guard:
            entry = self._calls.pop(message.call, None)
        try:
            if entry is None:
                return  # its time was up before
            future, worker, *_ = entry
            try:
                with _plain():
                    value = wire.unpack(message, partial(contexts.accept, sender=worker.id))
            except BaseException as error:  # noqa: BLE001  it belongs to the caller
                future.fail(error if isinstance(error, Exception) else described(error, self.me).exception())
                return
            if message.kind == ERROR:
                future.fail(value.exception())
            else:
                future.settle(value)
        finally:
            with self._guard:
                self._received += 1

    def _expire(self) -> None:
        now = time.monotonic()
        late = []
        with self._guard:
            while self._deadlines and self._deadlines[0][0] < now:
                entry = self._calls.pop(heapq.heappop(self._deadlines)[1], None)
                if entry is not None:
                    late.append(entry)
        for future, worker, function, seconds in late:
            text = (
                f"RPC ran for more than set timeout ({seconds * 1000:.0f} ms) and will now be marked with an error: "
                f"{function} on worker {worker.name!r} (rank {worker.id})"
            )
            self.pool.submit(partial(future.fail, CallTimedOut(text)))

    def _left(self, message: wire.IncomingMessage) -> None:
        why = wire.unpack(message, lambda tensors, extra: tensors)
        with self._guard:
            self._received += 1
        self._lost(message.source, why)

    def _lost(self, rank: int, why: str) -> None:
        """A worker is gone: the calls to it fail."""
        worker = self.workers.find(rank)
        with self._guard:
            self.workers.left.setdefault(rank, why)
            self._transport.lost.add(rank)
            mine = [number for number, entry in self._calls.items() if entry[1].id == rank]
            entries = [self._calls.pop(number) for number in mine]
        for future, _, function, _ in entries:
            future.fail(WorkerLeft(f"worker {worker.name!r} (rank {rank}) has left before it answered {function}: {why}"))

    def _tidy(self) -> None:
        while True:
            try:
                do = self.dropped.popleft()
            except IndexError:  # several threads may be here
                return
            do()

    # -- the end -------------------------------------------------------------------------------------------------------

    def counts(self) -> tuple[int, int, int]:
        """Messages sent, messages received (a call counts when it has been answered), calls of ours that have not ended."""
        self._tidy()
        with self._guard:
            return self._sent, self._received, len(self._calls)

    def tell_ready(self) -> None:
        """Every other worker that is still there will find this one in its ``ready``."""
        for worker in self.workers.all:
            if worker.id != self.me.id:
                with contextlib.suppress(WorkerLeft):
                    self._send(READY, worker, 0, None)

    def stop(self, graceful: bool) -> None:
        """Ends the threads; calls that have not ended fail."""
        if not graceful:
            for worker in self.workers.all:
                if worker.id != self.me.id and worker.id not in self.workers.left:
                    with contextlib.suppress(MpicollError):
                        self._send(LEAVING, worker, 0, "it called shutdown(graceful=False) or came to its end")
            self._transport.flush(1.0)
        with self._guard:
            self.closed = f"RPC has been shut down on this worker ({self.me.name!r}); call init_rpc first"
            entries = list(self._calls.values())
            self._calls.clear()
        self.pool.close()
        for future, worker, function, _ in entries:
            future.fail(WorkerLeft(f"RPC was shut down before worker {worker.name!r} (rank {worker.id}) answered {function}"))
        self._service.stop()
        if graceful:
            self.mailbox.free()
            self.there.free()


def _plain() -> contextlib.AbstractContextManager[Any]:
    """An answer is for whoever waits for it, whatever mode the thread is in that has found it."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext()


def _wait_for(confirmation: Future[Any]) -> None:
    """Of a reference among the arguments. An owner that has left is found out by whoever uses the reference."""
    with contextlib.suppress(WorkerLeft):
        confirmation.wait()


def _name(function: Any) -> str:
    return str(getattr(function, "__qualname__", None) or type(function).__qualname__)


def connect(agent: Agent) -> None:
    """Gives autograd its way to other workers."""
    contexts.worker_id = agent.me.id

    def call(worker: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Future[Any]:
        return agent.call(agent.workers.find(worker), function, arguments, timeout_s=0)

    passes.call = call

"""One worker's end of RPC: sends calls, runs those of other workers, and completes the futures of its own.

    rpc_sync on worker a                                      worker b
    [1] Agent.call packs function and arguments    ------>    [2] Agent._run unpacks and calls
    [4] Agent._settle unpacks the answer and       <------    [3] Agent._answer packs the result, or the exception
        completes the future that the caller waits for

Which thread does what: service.py.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.futures import Future

from mpicoll._base.errors import MpicollError, WorkerLeft
from mpicoll._base.waits import LOOK_S
from mpicoll._mpi.runtime import Runtime, forked_error, in_forked_child
from mpicoll.autograd import contexts
from mpicoll.rpc import wire
from mpicoll.rpc.functions import checked_future, is_async_execution
from mpicoll.rpc.futures import PendingCall, PendingCalls, error_of, name_of
from mpicoll.rpc.options import DeviceMaps, MPIRpcBackendOptions
from mpicoll.rpc.owned_objects import OwnedObjects
from mpicoll.rpc.service import Pool, Service, Task
from mpicoll.rpc.transport import Transport
from mpicoll.rpc.workers import RemoteError, WorkerInfo, Workers, describe, report, this_process

if TYPE_CHECKING:
    from mpicoll._mpi.mailbox import Mailbox  # not at run time: it starts MPI


HAS_LEFT = "it called shutdown(graceful=False) or came to its end"
NOT_INITIALIZED = "RPC has not been initialized. Call mpicoll.rpc.init_rpc first."
# torch's words where a reference or the agent itself is asked for
NOT_SET = "Current RPC agent is not set! Did you initialize the RPC framework (e.g. by calling `rpc.init_rpc`)?"


class Agent:
    """All state of RPC in this process, from init_rpc to shutdown (making it is collective over the ranks of ``runtime``)."""

    current: ClassVar[Agent | None] = None  # of this process: set by init_rpc, cleared by shutdown
    is_static_group = True  # all workers take part from init_rpc to shutdown

    @classmethod
    def get(cls, otherwise: str = NOT_INITIALIZED) -> Agent:
        """Returns the current agent. Raises RuntimeError with the text ``otherwise`` if there is none."""
        if in_forked_child():
            raise forked_error()
        if cls.current is None:
            raise RuntimeError(otherwise)
        return cls.current

    def __init__(self, runtime: Runtime, mailbox: Mailbox, name: str, options: MPIRpcBackendOptions) -> None:
        self.options = options
        self.timeout_s = options.rpc_timeout
        self.mailbox = mailbox
        everyone: list[Any] = self.mailbox.exchange((name, options.device_maps, this_process(runtime.hostname)))
        names, device_maps, processes = zip(*everyone, strict=True)
        self.workers = Workers(names, processes, runtime.rank)
        self.me = self.workers.find(runtime.rank)
        self.calls = PendingCalls(self.workers)
        self.pool = Pool(options.num_worker_threads)
        self.objects = OwnedObjects(self.me.id)
        # The RRefs on this worker to objects on others, by `id`
        self.users: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        # Notices to send soon, of RRefs that are being freed by garbage collection, or pickled; appending takes no lock.
        self.notices: deque[Callable[[], None]] = deque()
        self.ready: set[int] = set()  # ranks of the workers that have come to their shutdown after another has left
        self.at_shutdown = threading.Event()  # set while this worker waits in its shutdown
        self._runtime = runtime
        self._dead = 0  # number of the mailbox's dead ranks whose calls have failed
        self._ended: set[int] = set()  # workers that have calls to answer, and whose processes had ended at the last look
        self._look_at = 0.0  # when to look at the processes of the callees again
        maps = DeviceMaps(name, dict(zip(names, device_maps, strict=True)))
        self._transport = Transport(self.mailbox, self.me.id, self.calls, maps)
        self.running = 0  # calls of other workers that have begun and have not been answered
        self._guard = threading.Lock()  # guards running
        self._service = Service(
            self._transport, self.pool, self._dispatch, self._maintain, lambda: self.running > options.num_worker_threads
        )

    def start(self) -> None:
        """Starts to answer calls, and gives autograd its way to other workers."""
        contexts.registry.connect(
            self.me.id, lambda rank, function, arguments: self.call(self.workers.find(rank), function, arguments, timeout_s=0)
        )
        self._service.start()

    # -- [1] call ------------------------------------------------------------------------------------------------------

    def call(
        self,
        worker: WorkerInfo,
        function: Callable[..., Any],
        arguments: Any,
        keywords: Any = None,
        timeout_s: float | None = None,
        name: str = "",
    ) -> PendingCall:
        """Calls ``function`` on a worker and returns a future of the answer, which fails at once if the worker has left.

        Raises what else `Transport.send` raises. ``timeout_s``: seconds until the future fails; 0: never; None: the agent's.
        ``name``: of the function, for errors.
        """
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        call = PendingCall(self._service.help, worker, name or name_of(function), timeout_s)
        number = 0
        try:
            number = self.calls.add(call)
            self._transport.send(wire.CALL, worker, number, (function, arguments, keywords or {}))
        except BaseException as error:
            self.calls.take(number)
            if not isinstance(error, WorkerLeft):
                raise
            call.fail(error.with_traceback(None))  # its frames hold the call
        return call

    def notify(self, worker: WorkerInfo, function: Callable[..., Any], *arguments: Any) -> None:
        """Calls ``function`` on a worker without an answer. Does nothing if the worker has left or RPC has ended."""
        with contextlib.suppress(MpicollError):
            self._transport.send(wire.CALL, worker, 0, (function, arguments, {}))

    def live_users(self) -> list[Any]:
        """Returns the RRefs on this worker to objects on other workers."""
        return [rref for reference in self.users.valuerefs() if (rref := reference()) is not None]

    # -- what libraries ask, as of torch's RpcAgent --------------------------------------------------------------------

    def get_worker_info(self, worker: str | int | None = None) -> WorkerInfo:
        """Returns the worker of this name or rank; None: this one. Raises RuntimeError if there is none."""
        return self.me if worker is None else self.workers.find(worker)

    def get_worker_infos(self) -> list[WorkerInfo]:
        return list(self.workers.all)

    def get_metrics(self) -> dict[str, str]:
        """Returns the numbers of pending and running calls, and of threads."""
        return {
            "agent.client_active_calls": str(self.counts()[2]),
            "agent.server_active_calls": str(self.running),
            "agent.thread_pool_size": str(self.pool.threads),
            "agent.num_idle_threads": str(self.pool.idle()),
        }

    get_debug_info = get_metrics

    # -- messages that arrive ------------------------------------------------------------------------------------------

    def _maintain(self) -> None:
        if self.notices:
            self.pool.submit(self._tidy)
        self.calls.expire(self.pool.submit)
        for rank in self.mailbox.dead[self._dead :]:
            self._dead += 1
            self.pool.submit(partial(self.calls.lose, self.workers.find(rank), "its process has died"))
        if len(self.calls) and time.monotonic() > self._look_at:
            self._look_for_ended_processes()

    def _look_for_ended_processes(self) -> None:
        """Fails the calls to a process that had ended a look ago: what it sent before has arrived meanwhile."""
        self._look_at = time.monotonic() + LOOK_S
        before, self._ended = self._ended, self.calls.of_ended_processes()
        for rank in before & self._ended:
            self.pool.submit(partial(self.calls.lose, self.workers.find(rank), self.workers.process(rank)))

    def _dispatch(self, message: wire.IncomingMessage) -> Task:
        if message.kind == wire.ANSWER:
            call = self.calls.find(message.call)
            return Task(partial(self._settle, message), is_quick=call is None or not call.watched)
        if message.kind == wire.LEAVING:
            return Task(partial(self.calls.lose, self.workers.find(message.source), HAS_LEFT), is_quick=True)
        if message.kind == wire.READY:
            return Task(partial(self.ready.add, message.source), is_quick=True)
        with self._guard:
            self.running += 1
        return Task(partial(self._run, message), is_quick=False)

    # -- [2] run, [3] answer --------------------------------------------------------------------------------------------

    def _run(self, message: wire.IncomingMessage) -> None:
        """[2] Unpacks and calls. Never raises: an error, SystemExit included, is the answer to the caller."""
        try:
            function, arguments, keywords = wire.unpack(message)
            message.context = contexts.of(message.extra)
            for confirmation in message.unconfirmed:
                with contextlib.suppress(WorkerLeft):  # raised again where the function uses the reference
                    confirmation.wait()
            with contexts.entered(message.context):
                result = function(*arguments, **keywords)
            if is_async_execution(function):
                checked_future(function, result).add_done_callback(partial(self._answer_with_value, message))
                return
        except BaseException as error:  # noqa: BLE001  raised at the caller
            result = report(error, self.me)
        self._answer(message, result)

    def _answer_with_value(self, message: wire.IncomingMessage, future: Future[Any]) -> None:
        error = error_of(future)
        self._answer(message, future.value() if error is None else describe(error, self.me))

    def _answer(self, message: wire.IncomingMessage, result: Any) -> None:
        """[3] Sends the result, or a RemoteError, back."""
        try:
            # suppress: the caller has left, or RPC has ended here, and all calls with it
            with contextlib.suppress(MpicollError), contexts.entered(message.context):
                if message.call:
                    self._send_back(message, result)
        finally:
            self._transport.count_received()
            with self._guard:
                self.running -= 1

    def _send_back(self, message: wire.IncomingMessage, result: Any) -> None:
        caller = self.workers.find(message.source)
        try:
            self._transport.send(wire.ANSWER, caller, message.call, result)
        except Exception as error:  # noqa: BLE001  the result cannot be pickled: raised at the caller
            self._transport.send(wire.ANSWER, caller, message.call, describe(error, self.me))

    # -- [4] settle ----------------------------------------------------------------------------------------------------

    def _settle(self, message: wire.IncomingMessage) -> None:
        call = self.calls.take(message.call)
        try:
            if call is None:
                return  # its timeout has passed
            try:
                # This thread may be in inference mode; the one that waits for the answer need not be.
                with torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext():
                    value = wire.unpack(message)
            except BaseException as error:
                call.fail(error if isinstance(error, Exception) else describe(error, self.me).exception())
                if isinstance(error, KeyboardInterrupt):  # of this thread, which waits for another answer
                    raise
                return
            if isinstance(value, RemoteError):
                call.fail(value.exception())
            else:
                call.settle(value)
        finally:
            self._transport.count_received()

    # -- the end -------------------------------------------------------------------------------------------------------

    def counts(self) -> tuple[int, int, int]:
        """Returns the numbers of messages sent, of messages received (see `Transport`), and of pending calls."""
        self._tidy()
        return self._transport.sent, self._transport.received, len(self.calls)

    def _tidy(self) -> None:
        while True:
            try:
                run = self.notices.popleft()
            except IndexError:  # not `while self.notices`: several threads may be here
                return
            run()

    def stop(self, graceful: bool) -> None:
        """Ends the threads. Calls that have not been answered fail."""
        if not graceful:
            self.tell_others(wire.LEAVING)
            self._transport.flush(1.0)
        self.calls.close(f"RPC has been shut down on this worker ({self.me.name!r}); call init_rpc first")
        self.pool.close()
        self._service.stop()
        if graceful:
            self.mailbox.free()
            self._runtime.free()

    def tell_others(self, kind: int) -> None:
        """Sends READY or LEAVING to every other worker that has not left."""
        for worker in self.workers.all:
            if worker.id != self.me.id:
                with contextlib.suppress(MpicollError):
                    self._transport.send(kind, worker, 0, None)

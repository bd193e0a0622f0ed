"""Runs the calls of other workers and answers them: steps [2] and [3] of the drawing in agent.py."""

from __future__ import annotations

import contextlib
import threading
from functools import partial
from typing import Any

from torch import Tensor
from torch.futures import Future

from mpicoll.autograd import contexts
from mpicoll.errors import MpicollError, WorkerLeft
from mpicoll.rpc import wire
from mpicoll.rpc.functions import checked_future, is_async_execution
from mpicoll.rpc.messenger import Messenger
from mpicoll.rpc.workers import WorkerInfo, Workers, describe, report


class Handler:
    """Runs calls, each in the thread that calls `run`."""

    def __init__(self, me: WorkerInfo, workers: Workers, messenger: Messenger) -> None:
        self.running = 0  # calls that have begun and have not been answered
        self._me, self._workers, self._messenger = me, workers, messenger
        self._guard = threading.Lock()  # guards running

    def begin(self) -> None:
        """Counts a call that is going to run."""
        with self._guard:
            self.running += 1

    def run(self, message: wire.IncomingMessage) -> None:
        """[2] Unpacks and calls. Never raises: an error, SystemExit included, is the answer to the caller."""
        context: contexts.Context | None = None

        def accept(tensors: list[Tensor], extra: contexts.Extra) -> list[Tensor]:
            nonlocal context
            if extra is not None:
                context = contexts.registry.find_or_make(extra[0])
            return contexts.accept(tensors, extra, message.source)

        try:
            function, arguments, keywords = wire.unpack(message, accept)
            for confirmation in message.unconfirmed:
                with contextlib.suppress(WorkerLeft):  # raised again where the function uses the reference
                    confirmation.wait()
            with contexts.entered(context):
                result = function(*arguments, **keywords)
            if is_async_execution(function):
                checked_future(function, result).add_done_callback(partial(self._answer_with_value, message, context))
                return
        except BaseException as error:  # noqa: BLE001  raised at the caller
            self._answer(message, context, wire.ERROR, report(error, self._me))
        else:
            self._answer(message, context, wire.RESULT, result)

    def _answer_with_value(self, message: wire.IncomingMessage, context: contexts.Context | None, future: Future[Any]) -> None:
        try:
            result = future.value()
        except Exception as error:  # noqa: BLE001  raised at the caller
            self._answer(message, context, wire.ERROR, describe(error, self._me))
        else:
            self._answer(message, context, wire.RESULT, result)

    def _answer(self, message: wire.IncomingMessage, context: contexts.Context | None, kind: int, result: Any) -> None:
        """[3] Sends the result or the error back."""
        try:
            if message.kind == wire.NOTICE:
                return
            caller = self._workers.find(message.source)
            with contexts.entered(context):
                try:
                    self._messenger.send(kind, caller, message.call, result)
                except WorkerLeft:
                    return
                except Exception as error:  # noqa: BLE001  the result cannot be pickled: raised at the caller
                    self._messenger.send(wire.ERROR, caller, message.call, describe(error, self._me))
        except MpicollError:
            return  # RPC has ended here, and all calls with it
        finally:
            self._messenger.count_received()
            with self._guard:
                self.running -= 1

"""The adapter for torch >= 2.14, which takes a subclass of Backend and keeps the ProcessGroup to itself.

    dist.all_reduce ──► ProcessGroup.allreduce (C++: dispatcher, profiler spans, hooks) ──► MpiBackend.allreduce ──► engine
                                      │                                                            │
                 PyWorkHolder ◄───────┘  calls wait() and get_future() of our Work, nothing else ◄─┘

# Note [The Work behind the Work]
# The Work that comes back through C++ is a holder: is_completed() is False for ever, result() and source_rank() raise, and
# exception() is None after a failure. So Python callers get our own Work instead. The methods of ProcessGroup that return a
# Work are wrapped when the first mpicoll group is made. The wrapper tells `_last_work`, a slot of this thread, that it waits
# for a Work; our backend puts it there. If the slot stays empty (a Gloo group), the wrapper returns what C++ returned. Calls
# from C++ do not pass the wrapper.

# Note [The completed Work]
# A synchronous operation returns None to Python and `_COMPLETED`, always the same Work, to C++. Without a Work the flight
# recorder (torch >= 2.15) would show the operation as running for ever. Costs 0.3 us.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch._C._distributed_c10d import Backend
from torch.distributed import ProcessGroup
from torch.distributed import Work as TorchWork

from mpicoll._c10d import dynamo, hooks, names, patches, torch_world
from mpicoll._c10d.names import WORK_METHODS
from mpicoll._c10d.operations import Answer, Operations
from mpicoll._c10d.windows import Window
from mpicoll._engine.work import Work

if TYPE_CHECKING:
    from mpicoll._engine.communicator import Communicator

MakeChild = Callable[["Communicator", Sequence[int], str, float], Backend]  # parent, its ranks, the child's name, timeout in s


class _LastWork(threading.local):
    """The Work of the operation that this thread has just started."""

    expected = False  # a Python caller in this thread wants the Work
    work: TorchWork | None = None


_last_work = _LastWork()
_COMPLETED = Work("a synchronous operation", [], timeout_s=0)  # see Note [The completed Work]
_COMPLETED._complete()


class MpiBackend(Operations, Backend):
    """One backend of one of torch's process groups.

    The constants shadow C++ properties that would call back into Python without end.
    """

    supports_splitting = True
    supports_coalescing = False
    supports_shrinking = False
    supports_reconfigure = False
    supports_window = True
    supports_abort_hooks = True
    supports_completion_hooks = False
    _supports_time_estimate = False

    def __init__(self, communicator: Communicator, on_close: Callable[[Communicator], None], make_child: MakeChild) -> None:
        Backend.__init__(self, communicator.rank, communicator.size)
        self.communicator, self.on_close, self._make_child = communicator, on_close, make_child
        _wrap_methods()

    def __repr__(self) -> str:
        return f"<MpiBackend over {self.communicator!r}>"

    @property
    def options(self) -> Any:
        """New options; torch sets name and timeout in a copy and calls `split` with it."""
        return Backend.Options("mpi", timedelta(seconds=self.communicator.timeout_s))

    def split(self, store: Any, ranks: list[int], opts: Any) -> Backend:
        """Makes the backend of these ranks within this group, for ``dist.split_group`` (collective over them).

        The other ranks get a stand-in, which `_splitting` drops, because C++ does not take None.
        """
        if self.communicator.rank not in ranks:
            return _Nobody(0, 1)
        return self._make_child(self.communicator, ranks, opts.group_name, opts._timeout.total_seconds())

    def perform_nocolor_split(self, device: Any) -> None:
        """Does nothing: members make a group alone. Called outside a new group if the world is bound to a device."""

    def eager_connect_single_device(self, device: Any) -> None:
        """Does nothing: MPI is connected. Called if the world is bound to a device."""

    def _answer(self, work: TorchWork | None) -> Answer:
        work = super()._answer(work) or _COMPLETED
        if _last_work.expected:
            _last_work.work = work
        return work

    def end_coalescing(self, device: Any = None) -> Answer:
        work = super().end_coalescing(device)
        if _last_work.expected:
            _last_work.work = work
        return work


def _wrap_methods() -> None:
    """Wraps methods of torch's ProcessGroup, once; see Note [The Work behind the Work]."""
    for name in WORK_METHODS:
        patches.wrap(f"{patches.GROUP}.{name}", functools.partial(_handing_over, name))
    for name in ("gather_single", "gather_into_tensor"):
        patches.wrap(f"{patches.GROUP}.{name}", _straight)
    patches.wrap(f"{patches.GROUP}.split_group", _splitting)
    patches.wrap(f"{patches.GROUP}.new_window", _windows)
    hooks.watch()


def _handing_over(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapped(self: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        _last_work.expected = True
        try:
            answer = method(self, *args, **kwargs)
            if _last_work.work is _COMPLETED:
                return None
            if _last_work.work is None or answer is None:
                return answer
            work = _last_work.work
            if isinstance(work, Work):
                for argument in (*args, *kwargs.values()):
                    if isinstance(argument, timedelta):
                        work.limit(argument)
            return work
        finally:
            _last_work.expected, _last_work.work = False, None

    # pybind11 decides by the name of the calling function whether a base class's method or its override is called
    inner: Any = wrapped
    inner.__code__ = inner.__code__.replace(co_name=name)
    dynamo.disable(wrapped)
    return wrapped


def _straight(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapped(self: ProcessGroup, output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        backend = self._get_backend(input.device)
        if isinstance(backend, MpiBackend):
            work = backend.gather_single(output, input, *args, **kwargs)
            return None if work is _COMPLETED else work
        return method(self, output, input, *args, **kwargs)

    dynamo.disable(wrapped)
    return wrapped


class _Nobody(Backend):
    """Stands for the backend of a group on a rank outside it."""


def _splitting(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapped(self: ProcessGroup, ranks: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        group = method(self, ranks, *args, **kwargs)
        return group if self.rank() in ranks else None

    return wrapped


def _windows(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapped(self: ProcessGroup, tensor: Tensor | None = None) -> Any:
        backends = torch_world.world.pg_backend_config.get(self, "").split(",")
        served = [backend for backend in backends if tensor is None or backend.startswith(f"{tensor.device.type}:")]
        return Window(tensor, self) if all(map(names.translate, served)) else method(self, tensor)

    return wrapped

"""The adapter for torch >= 2.14, which takes a subclass of Backend and keeps the ProcessGroup to itself.

    dist.all_reduce ──► ProcessGroup.allreduce (C++: dispatcher, profiler spans, hooks) ──► MpiBackend.allreduce ──► engine
                                      │                                                            │
                 PyWorkHolder ◄───────┘  knows wait() and get_future() of our Work, nothing else ◄─┘

# Note [The Work behind the Work]
# The Work that comes back through C++ is a holder whose is_completed() is False for ever, whose result() and
# source_rank() raise and whose exception() is None after a failure. So Python callers get our own Work instead: the
# methods of ProcessGroup that return a Work are wrapped once, when the first group of ours is made. The wrapper expects
# a Work on this thread's `_desk`, the backend lays it there, and what no backend of ours answered (a Gloo group, C++
# callers, which never come this way) passes unchanged.

# Note [What has ended]
# A synchronous operation gives C++ one and the same completed Work, and Python None. With no Work at all, the flight recorder
# (torch >= 2.15) shows the operation as still under way, and so every program as hung. 0.3 us.
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

from mpicoll._c10d import dynamo, patches
from mpicoll._c10d.names import WORK_METHODS
from mpicoll._c10d.operations import Answer, Operations
from mpicoll._progress.work import Work

if TYPE_CHECKING:
    from mpicoll._engine.communicator import Communicator

__all__ = ["MpiBackend"]

MakeChild = Callable[["Communicator", Sequence[int], str, float], Backend]  # parent, its ranks, the child's name, timeout in s


class _Desk(threading.local):
    expecting = False  # a Python caller is waiting for a Work in this thread
    work: TorchWork | None = None


_desk = _Desk()
_ended = Work("a synchronous operation", [], timeout_s=0)  # see Note [What has ended]
_ended._complete()


class MpiBackend(Operations, Backend):
    """One backend of one of torch's process groups.

    The constants shadow C++ properties that would call back into Python without end.

    Args:
        communicator: The engine's group.
        on_close: Called with the communicator before torch gives the group up.
        make_child: Makes the backend of a part of the group.
    """

    supports_splitting = True
    supports_coalescing = False
    supports_shrinking = False
    supports_reconfigure = False
    supports_window = False
    supports_abort_hooks = False
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
        """What torch copies, name and timeout changed, for `split`; made anew each time."""
        return Backend.Options("mpi", timedelta(seconds=self.communicator.timeout_s))

    def split(self, store: Any, ranks: list[int], opts: Any) -> Backend:
        """The backend of a new group of these ranks of this one, in this order (collective over them); for ``dist.split_group``.

        Args:   opts: our `options`, with the new group's name and timeout.
        Returns: on other ranks a stand-in, which `_splitting` throws away: C++ does not take None.
        """
        if self.communicator.rank not in ranks:
            return _Nobody(0, 1)
        return self._make_child(self.communicator, ranks, opts.group_name, opts._timeout.total_seconds())

    def perform_nocolor_split(self, device: Any) -> None:
        """Called, where the world is bound to a device, on who is no member of a new group: nothing, members make it alone."""

    def eager_connect_single_device(self, device: Any) -> None:
        """Called where the world is bound to a device: nothing, MPI is connected."""

    def _answer(self, work: TorchWork | None) -> Answer:
        work = super()._answer(work) or _ended
        if _desk.expecting:
            _desk.work = work
        return work

    def end_coalescing(self, device: Any = None) -> Answer:
        work = super().end_coalescing(device)
        if _desk.expecting:
            _desk.work = work
        return work


def _wrap_methods() -> None:
    """Wraps methods of torch's ProcessGroup, once; see Note [The Work behind the Work]."""
    for name in WORK_METHODS:
        patches.wrap(f"{patches.GROUP}.{name}", functools.partial(_handing_over, name))
    for name in ("gather_single", "gather_into_tensor"):
        patches.wrap(f"{patches.GROUP}.{name}", _straight)
    patches.wrap(f"{patches.GROUP}.split_group", _splitting)


def _handing_over(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapped(self: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        _desk.expecting = True
        try:
            answer = method(self, *args, **kwargs)
            if _desk.work is _ended:
                return None
            return answer if _desk.work is None or answer is None else _desk.work
        finally:
            _desk.expecting, _desk.work = False, None

    # pybind11 tells a call of the base class's method from a call of an override by the name of the calling function
    inner: Any = wrapped
    inner.__code__ = inner.__code__.replace(co_name=name)
    dynamo.close(wrapped)
    return wrapped


def _straight(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapped(self: ProcessGroup, output: Tensor, tensor: Tensor, *args: Any) -> Any:
        backend = self._get_backend(tensor.device)
        if isinstance(backend, MpiBackend):
            work = backend.gather_single(output, tensor, *args)
            return None if work is _ended else work
        return method(self, output, tensor, *args)

    dynamo.close(wrapped)
    return wrapped


class _Nobody(Backend):
    """Of a group that this rank is no member of."""


def _splitting(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapped(self: ProcessGroup, ranks: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        group = method(self, ranks, *args, **kwargs)
        return group if self.rank() in ranks else None

    return wrapped

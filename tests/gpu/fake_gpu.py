"""A GPU that is not there, for tests: what `mpicoll._device` does with one, on memory that nobody else may touch.

A tensor of its says an address at which there is nothing: whoever copies from there without asking (memmove, or an MPI that was
not told to) ends in a segmentation fault. Kernels of the program's run only when somebody waits for them, as late as they may;
copies to pinned memory arrive only when they are waited for. A kernel on tensors of two devices is an error, as on a GPU.
"""

import math
import mmap
import os
import pickle
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from mpicoll._algorithms import native
from mpicoll._device import ipc, streams
from mpicoll._mpi import datatypes

FAR = 1 << 47  # above all addresses that a process can have
COPIES = {"copy_", "to", "__get__", "as_subclass", "detach", "cpu", "eq", "equal"}  # what may see tensors of two devices


WRITE = {"copy_", "clone", "cat", "contiguous", "add", "mul", "div_", "add_"}


class OnGpu(Tensor):
    """A tensor that says it is on a GPU. Its values are an ordinary tensor's, see `plain`."""

    index = 0
    written: ClassVar[Callable[[], None]] = staticmethod(lambda: None)

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", self.index)

    def data_ptr(self) -> int:
        return plain(self).data_ptr() + FAR

    def to(self, what: Any, *_: Any, **__: Any) -> Tensor:  # type: ignore[override]
        return plain(self).to(what).as_subclass(type(self)) if isinstance(what, torch.dtype) else there(plain(self), what)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        kinds = {type(tensor) for tensor in tensors_in(args)}
        if not kinds <= {cls} and name not in COPIES:
            raise RuntimeError(f"Expected all tensors to be on the same device, but {name} got {kinds}")
        if name in WRITE:
            OnGpu.written()
        return super().__torch_function__(func, types, args, kwargs or {})


class OnGpu1(OnGpu):
    """The same on another one."""

    index = 1


def tensors_in(items: Iterable[Any]) -> Iterator[Tensor]:
    for item in items:
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, (list, tuple)):
            yield from tensors_in(item)


def plain(tensor: Tensor) -> Tensor:
    """The same memory as an ordinary tensor."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)


def there(values: Tensor, device: torch.device) -> Tensor:
    """The same values, a copy of them, on a device."""
    kind = {None: OnGpu, 0: OnGpu, 1: OnGpu1}[device.index] if device.type == "cuda" else Tensor
    return values.clone().as_subclass(kind)


class Event:
    """Of a copy, which it makes when it is waited for; the second time that it is asked, it has been made."""

    def __init__(self, copy: Callable[[], object]) -> None:
        self._copy: Callable[[], object] | None = copy
        self._asked = 0
        self._guard = threading.Lock()

    def arrive(self, wait: bool) -> bool:
        with self._guard:
            self._asked += 1
            if self._copy is not None and (wait or self._asked > 1):
                self._copy()
                self._copy = None
            return self._copy is None


class Gpu:
    """One stream of the program's. ``counts``: calls, by name."""

    def __init__(self) -> None:
        self.launched: list[Callable[[], object]] = []
        self.done = 0
        self._here = threading.local()
        self._running = threading.RLock()
        self.captured = False
        self.counts = dict.fromkeys(("marks", "fetch", "push", "share", "opened", "wait_for_internal"), 0)
        self.can_share = self.can_open = True

    def later(self, kernel: Callable[[], object]) -> None:
        """Launches a kernel of the program's."""
        self.launched.append(kernel)

    def run(self, until: int) -> None:
        """All that was launched up to here; it has ended when this returns, whichever thread runs it."""
        with self._running:
            while self.done < until:
                self.launched[self.done]()
                self.done += 1

    @property
    def inside(self) -> int:
        """How often this thread is inside `internal_streams`."""
        return getattr(self._here, "inside", 0)

    # -- as _device/streams.py --------------------------------------------------------------------------------------------

    def capturing(self) -> bool:
        return self.captured

    def marks(self, devices: Iterable[torch.device]) -> list[tuple[torch.device, Any]]:
        self.counts["marks"] += 1
        until = len(self.launched)
        return [(device, Event(lambda: self.run(until))) for device in dict.fromkeys(devices)]

    def passed(self, marks: Sequence[tuple[torch.device, Event]]) -> bool:
        return all(event.arrive(wait=not self.launched) for _, event in marks)

    @contextmanager
    def internal_streams(self, marks: Sequence[tuple[torch.device, Event]]) -> Iterator[None]:
        for _, event in marks:
            event.arrive(wait=True)
        self._here.inside, self._here.apart = self.inside + 1, False
        OnGpu.written = self.written
        try:
            yield
        finally:
            self._here.inside -= 1
            self._here.apart = False

    def written(self) -> None:
        """A kernel, or a copy, was launched."""
        self._here.apart = self.inside > 0

    def wait_for_launched(self, devices: Iterable[torch.device]) -> None:
        list(devices)
        self._here.apart = False

    def fetch(self, memory: Tensor, stream: int = streams.OUT) -> tuple[Tensor, Event]:
        assert not memory.is_cpu
        assert stream == (streams.OUT if self.inside else streams.MESSAGES_OUT)
        assert not (self.inside and self._here.apart), "what was launched on our stream may not have run yet"
        self.counts["fetch"] += 1
        values = self.pinned(memory.shape, memory.dtype)
        return values, Event(lambda: values.copy_(plain(memory)))

    def arrived(self, event: Event, wait: bool = True) -> bool:
        return event.arrive(wait)

    def push(self, memory: Tensor, values: Tensor, stream: int = streams.INTERNAL) -> Event:
        assert not memory.is_cpu
        assert (stream == streams.INTERNAL) == bool(self.inside)
        self.counts["push"] += 1
        plain(memory).copy_(plain(values))
        return Event(lambda: None)

    def launch(self, device: torch.device, kernels: Callable[[], object], stream: int) -> Event:
        kernels()
        return Event(lambda: None)

    def pinned(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        with torch.inference_mode(False):
            nbytes = math.prod(shape) * dtype.itemsize
            return torch.full((nbytes,), 0xA5, dtype=torch.uint8, device="cpu").view(dtype).view(tuple(shape))

    def onto(self, device: torch.device, memory: Tensor) -> Tensor:
        return memory if memory.device == device else there(plain(memory), device)

    def on(self, device: torch.device) -> AbstractContextManager[object]:
        return nullcontext()

    def settle_in(self) -> None:
        pass

    def caller(self, device: torch.device) -> str:
        return "the program's"

    def keep_for(self, stream: str, memory: Tensor) -> None:
        assert stream == "the program's"

    def wait_for_internal(self, device: torch.device) -> None:
        self.counts["wait_for_internal"] += 1

    # -- as _device/ipc.py ------------------------------------------------------------------------------------------------

    def allocate(self, device: torch.device, nbytes: int) -> Tensor | None:
        file = os.memfd_create("gpu")
        os.ftruncate(file, nbytes)
        return mapped(file, nbytes, device)

    def share(self, buffer: Tensor) -> bytes | None:
        self.counts["share"] += 1
        return pickle.dumps((os.getpid(), buffer.file, buffer.nbytes)) if self.can_share else None  # type: ignore[attr-defined]

    def opened(self, record: bytes, device: torch.device) -> Tensor | None:
        self.counts["opened"] += 1
        if not self.can_open:
            return None
        pid, file, nbytes = pickle.loads(record)
        return mapped(os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR), nbytes, device)


def mapped(file: int, nbytes: int, device: torch.device) -> Tensor:
    kind = OnGpu1 if device.index == 1 else OnGpu
    with torch.inference_mode(False):
        tensor = torch.frombuffer(mmap.mmap(file, nbytes), dtype=torch.uint8).as_subclass(kind)
    tensor.file = file  # type: ignore[attr-defined]
    return tensor


def take_its_place(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what `mpicoll._device` asks of torch."""
    for module in (streams, ipc):
        for name in vars(Gpu).keys() & vars(module).keys():
            if not name.startswith("_"):
                monkeypatch.setattr(module, name, getattr(gpu, name))


def make_mpi_aware(monkeypatch: pytest.MonkeyPatch) -> None:
    """The MPI at hand finds what lies in the GPU's memory."""
    found = datatypes.fromaddress

    def fromaddress(address: int, nbytes: int, *more: Any) -> Any:
        return found(address - FAR if address >= FAR else address, nbytes, *more)

    for module in (datatypes, native):
        monkeypatch.setattr(module, "fromaddress", fromaddress)

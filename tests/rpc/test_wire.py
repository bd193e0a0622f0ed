"""Objects to messages and back, within one process."""

import math
import threading
import time
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies
from torch import Tensor, nn

from mpicoll.rpc import wire
from mpicoll.rpc.futures import PendingCalls
from mpicoll.rpc.options import DeviceMaps
from mpicoll.rpc.transport import Transport
from mpicoll.rpc.workers import Workers, this_process

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
    torch.bool, torch.complex64, torch.complex128, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn,
]  # fmt: skip


def there(obj: Any) -> Any:
    """What arrives."""
    message = wire.pack(0, 0, 0, obj, wire.PicklingState(0, {}))
    return wire.unpack(wire.copied(0, message))


def alike(a: Tensor, b: Tensor) -> bool:
    same = a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride() and a.requires_grad == b.requires_grad
    plain = [t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return same and torch.equal(*plain)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (5, 7), (100, 200)], ids=str)
def test_dtypes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Inside the envelope and beside it."""
    tensor = torch.arange(math.prod(shape)).remainder(100).reshape(shape).to(dtype)
    assert alike(tensor, there(tensor))


BASE = torch.arange(40_000.0).reshape(200, 200)
LAYOUTS = {
    "transposed": BASE.t(),
    "columns": BASE[:, 3:150:7],
    "a row": BASE[7],
    "expanded": BASE[0].expand(5, 200),
    "one element expanded": torch.tensor(3.0).expand(100, 100),
    "permuted": torch.arange(60).reshape(3, 4, 5).permute(2, 0, 1),
    "diagonal": BASE.diagonal(),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "conjugated": torch.randn(4, dtype=torch.complex64).conj(),
    "imaginary part of a conjugate": torch.randn(4, dtype=torch.complex64).conj().imag,
    "empty, strided": BASE[5:5, ::2],
    "bytes at an odd place": torch.arange(100, dtype=torch.uint8)[13:57],
    "requires grad": torch.ones(3, requires_grad=True),
    "not a leaf": torch.ones(3, requires_grad=True) * 2,
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name: str) -> None:
    """Values, strides and whether it requires grad; a part of a large tensor takes only the memory that it spans."""
    arrived = there(LAYOUTS[name])
    assert alike(LAYOUTS[name], arrived)
    assert not arrived.requires_grad or arrived.is_leaf


def test_only_what_is_used_travels() -> None:
    message = wire.pack(0, 0, 0, BASE[7], wire.PicklingState(0, {}))
    assert not message.blocks
    assert len(message.envelope) < 2000
    message = wire.pack(0, 0, 0, [BASE, BASE[3:9], BASE.t()], wire.PicklingState(0, {}))
    assert [nbytes for _, nbytes in message.blocks] == [BASE.nbytes]


def test_shared_memory_is_shared_again() -> None:
    """Within a message: views see each other's writes, and a tensor that occurs twice is one."""
    base = torch.zeros(10_000)
    whole, part, again, integers = there([base, base[5:8], base, base.view(torch.int32)])
    whole[6] = 1.0
    assert part.tolist() == [0, 1, 0]
    assert again is whole
    assert integers[6].item() == 0x3F800000
    module = nn.Linear(3, 3)
    module.register_parameter("twice", module.weight)
    arrived = there(module)
    assert arrived.twice is arrived.weight
    assert isinstance(arrived.weight, nn.Parameter)
    assert torch.equal(arrived.weight, module.weight)


def test_what_is_not_a_plain_tensor() -> None:
    """Sparse and quantized tensors, NumPy arrays small and large, long strings."""
    sparse = torch.tensor([[0, 2.0], [3.0, 0]]).to_sparse()
    assert torch.equal(there(sparse).to_dense(), sparse.to_dense())
    arrays = {"small": np.arange(5), "large": np.arange(100_000.0).reshape(100, 1000), "strided": np.arange(100)[::3]}
    found = there(arrays)
    assert all(np.array_equal(found[key], array) and found[key].dtype == array.dtype for key, array in arrays.items())
    found["large"][0] = 1  # its memory is its own
    text = "ä" * (2 << 20)
    assert there((text, torch.ones(1)))[0] == text


@hypothesis.given(strategies.lists(strategies.integers(0, 30_000), max_size=6), strategies.booleans())
def test_any_mixture_of_sizes(sizes: list[int], text: bool) -> None:
    tensors = [torch.arange(n) + i for i, n in enumerate(sizes)]
    found, said = there((tensors, "x" * (2 << 20) if text else ""))
    assert all(torch.equal(a, b) for a, b in zip(found, tensors, strict=True))
    assert len(said) == text * (2 << 20)


def test_a_device_without_a_map() -> None:
    if not torch.cuda.is_available():
        meta = torch.empty(3, device="meta")
        assert there(meta).device.type == "meta"
        return
    with pytest.raises(RuntimeError, match="device_maps"):
        there(torch.ones(3, device="cuda"))


class _Slow:
    """A mailbox whose sends take a while."""

    def __init__(self) -> None:
        self.dead: list[int] = []
        self.kept: list[Any] = []

    def send(self, *message: Any) -> list[int]:
        return [3]

    def ended(self, requests: list[int], tests: int = 1) -> bool:
        time.sleep(1e-5)
        requests[0] -= 1
        return requests[0] <= 0

    def take(self) -> None:
        return None

    def keep(self, requests: list[int], memory: Any) -> None:
        self.kept.append(memory)


def transport_over(mailbox: _Slow) -> tuple[Transport, PendingCalls]:
    """That of worker 0 of two."""
    calls = PendingCalls(Workers(["a", "b"], [this_process("here")] * 2, 0))
    return Transport(mailbox, 0, calls, DeviceMaps("a", {"a": {}, "b": {}})), calls  # type: ignore[arg-type]


def test_flush_beside_who_looks() -> None:
    """It waits until all has left, and takes nothing away from the other."""
    for _ in range(50):
        transport, _ = transport_over(_Slow())
        for _ in range(5):
            transport.post(1, wire.PackedMessage(b"", [], 0, []))
        stop = threading.Event()
        errors: list[Exception] = []

        def look(transport: Transport = transport, stop: threading.Event = stop, errors: list[Exception] = errors) -> None:
            try:
                while not stop.is_set():
                    transport.arrived()
            except Exception as error:  # noqa: BLE001  the test's
                errors.append(error)

        thread = threading.Thread(target=look)
        thread.start()
        transport.flush(10)
        left = transport._sending or transport._receiving
        stop.set()
        thread.join()
        assert not errors
        assert not left


def test_what_a_lost_worker_will_not_take() -> None:
    """It is not tested any more, but its memory is kept: MPI may still read it."""
    mailbox = _Slow()
    mailbox.ended = lambda requests, tests=1: False  # type: ignore[method-assign]
    transport, calls = transport_over(mailbox)
    message = wire.PackedMessage(b"", [], 0, [])
    transport.post(1, message)
    transport.arrived()
    assert transport._sending
    calls.left[1] = "for a reason"
    transport.arrived()
    assert not transport._sending
    assert mailbox.kept == [message]


# -- large pages are asked for where they pay


SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
has_large_pages = pytest.mark.skipif(not SETTING.exists(), reason="this kernel has no transparent huge pages")


def asked(address: int) -> bool:
    """What the kernel has noted of the memory there: "hg" is madvise(MADV_HUGEPAGE)."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            first, last = (int(end, 16) for end in head.split("-"))
            inside = first <= address < last
        elif inside and head == "VmFlags:":
            return "hg" in line.split()
    raise AssertionError(f"no memory at {address:#x}")


@has_large_pages
def test_large_pages_for_what_a_message_brings() -> None:
    tensor = torch.rand(16 << 20)
    packed = wire.pack(0, 1, 2, tensor, wire.PicklingState(0, {}))
    message = wire.copied(0, packed)
    assert asked(message.storages[0].data_ptr() + (8 << 20))
    assert torch.equal(wire.unpack(message), tensor)

"""Objects to messages and back: small things pickled, the memory of tensors as it lies.

    envelope    header | sizes of the blocks | pickle | blocks that are small enough to go along
    blocks      the memory of each storage that the tensors of the message use, once, from its first used byte to its last;
                then what pickle (protocol 5) would rather not copy: NumPy arrays, say

The pickle holds, in a tensor's place, which storage it lies in, and how. (Of a sparse tensor: its indices and its values.) So
tensors that share memory share it again on arrival, strides are what they were, and no byte of a large tensor passes through
pickle.
"""

from __future__ import annotations

import ctypes
import io
import itertools
import pickle
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from mpicoll._base import huge_pages
from mpicoll.autograd import contexts

if TYPE_CHECKING:
    from mpicoll._mpi.mailbox import Block

# Kinds of messages. LEAVING: the sender ends RPC without waiting for the others. READY: the sender has come to its shutdown after
# another worker has left.
CALL, ANSWER, LEAVING, READY = range(4)

HEADER = struct.Struct("<BIIQIQ")  # kind, storages, other blocks, bytes of the pickle, number of the message, number of the call
INLINE_BYTES = 16 * 1024  # bytes; a block that is smaller travels inside the envelope: one message costs less than two
ROW_WISE = (torch.sparse_csr, torch.sparse_bsr)
LAYOUTS = (torch.strided, torch.sparse_coo, *ROW_WISE, torch.sparse_csc, torch.sparse_bsc)  # tensors of others are pickled
SCRIPTED = (torch.jit.ScriptFunction, torch.jit.ScriptModule)
INLINE_PICKLE_BYTES = 1 << 20  # bytes; a longer pickle becomes a block, so that the envelope is short

_local = threading.local()  # of the message that this thread is pickling: pickling_state; unpickling: tensors, unconfirmed


@dataclass
class PackedMessage:
    """A message that is ready to be sent. ``kept``: whose memory the blocks are."""

    envelope: bytes
    blocks: list[Block]
    number: int
    kept: list[Any]


@dataclass
class IncomingMessage:
    """A message whose envelope is here; ``blocks``: where the memory that follows belongs. ``call``: 0: no answer is wanted."""

    source: int
    kind: int
    call: int
    number: int
    pickled: Any
    storages: list[torch.UntypedStorage]
    buffers: list[Any]
    blocks: list[Block]
    extra: contexts.Extra = None  # what the sender's autograd has added, once unpacked
    context: contexts.Context | None = None  # that the call runs in
    unconfirmed: list[Any] = field(default_factory=list)  # of its references: futures that end when the owner knows of them


@dataclass
class PicklingState:
    """What is found while one object is pickled. ``to``: the worker that it goes to."""

    to: int
    device_map: dict[torch.device, torch.device]
    tensors: list[Tensor] = field(default_factory=list)
    undo: list[Callable[[], None]] = field(default_factory=list)  # take back what has been given away, if pickling fails


def pickling_state() -> PicklingState | None:
    """The message that this thread is pickling, if it is."""
    return getattr(_local, "pickling_state", None)


def unconfirmed() -> list[Any]:
    """For the references of the message that this thread is unpickling."""
    return _local.unconfirmed  # type: ignore[no-any-return]


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, state: PicklingState, buffers: list[pickle.PickleBuffer]) -> None:
        super().__init__(file, 5, buffer_callback=buffers.append)
        self.state, self.tracked = state, contexts.current() is not None
        self.of_modules: set[int] = set()  # parameters that arrive with their module, and stay parameters

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, SCRIPTED):
            raise TypeError(
                f"a {type(obj).__name__} cannot be pickled: mpicoll.rpc carries no TorchScript, which torch has retired; pass "
                "the Python function or module, and compile it with torch.compile where it runs"
            )
        if isinstance(obj, nn.Module):
            self.of_modules.update(map(id, _parameters(obj)))
            return NotImplemented
        plain = type(obj) is Tensor
        if type(obj) is nn.Parameter and self.tracked:  # by itself it is a tensor like any other, with its gradient
            plain = id(obj) not in self.of_modules
        if not plain or obj.layout not in LAYOUTS or obj.is_quantized or obj.device.type not in ("cpu", "cuda"):
            return NotImplemented
        self.state.tensors.append(obj)
        return _tensor_of_message, (len(self.state.tensors) - 1,)


def _parameters(module: nn.Module) -> Iterator[nn.Parameter | None]:
    """Its own and its children's, where a child refuses to name them (RemoteModule), too."""
    yield from module._parameters.values()
    for child in module._modules.values():
        if child is not None:
            yield from _parameters(child)


def _tensor_of_message(index: int) -> Tensor:
    return _local.tensors[index]  # type: ignore[no-any-return]


def pack(kind: int, call: int, number: int, obj: Any, state: PicklingState) -> PackedMessage:
    """A message of this object.

    Raises: whatever pickling raises; RuntimeError: a CUDA tensor, and no device map says where it belongs.
    """
    file = io.BytesIO()
    found: list[pickle.PickleBuffer] = []
    before = pickling_state()
    _local.pickling_state = state
    try:
        _Pickler(file, state, found).dump(obj)
        forms, parts = zip(*map(_taken_apart, state.tensors), strict=True) if state.tensors else ((), ())
        layouts, storages, kept = _lay_out(state, itertools.chain.from_iterable(parts))
        head = pickle.dumps((layouts, forms if any(forms) else None, contexts.attach(state.tensors, state.to)), 5)
    except BaseException:
        for take_back in state.undo:
            take_back()
        raise
    finally:
        _local.pickling_state = before
    pickled = struct.pack("<I", len(head)) + head + file.getvalue()
    kept.append(found)
    blocks = [*storages, *map(_block_of, found)]
    inline = pickled
    if len(pickled) > INLINE_PICKLE_BYTES:
        kept.append(pickled)
        blocks.append(_block_of(pickle.PickleBuffer(pickled)))
        inline = b""
    header = HEADER.pack(kind, len(storages), len(found), len(pickled), number, call)
    sizes = struct.pack(f"<{len(blocks)}Q", *(nbytes for _, nbytes in blocks))
    along = b"".join(ctypes.string_at(address, nbytes) for address, nbytes in blocks if 0 < nbytes < INLINE_BYTES)
    return PackedMessage(header + sizes + inline + along, [block for block in blocks if block[1] >= INLINE_BYTES], number, kept)


# How a tensor lies: index of its storage, dtype, offset, shape, stride, requires_grad, conj, neg, device
Layout = tuple[int, torch.dtype, int, tuple[int, ...], tuple[int, ...], bool, bool, bool, str | None]


def _lay_out(state: PicklingState, strided: Iterable[Tensor]) -> tuple[list[Layout], list[Block], list[Any]]:
    """How each tensor lies in the storages of the message, and the part of each that is used."""
    used: dict[int, list[int]] = {}  # by storage: index in the message, first byte, byte after the last
    views = []
    for tensor in strided:
        target = None
        if tensor.is_cuda:
            target = state.device_map.get(tensor.device)
            if target is None:
                raise RuntimeError(
                    f"device mapping is not available for destination worker {state.to}, and a tensor is on "
                    f"{tensor.device}: please move your tensors to CPU before sending them over RPC, or call "
                    "`set_device_map` on `TensorPipeRpcBackendOptions` to explicitly configure device mapping"
                )
        with torch.no_grad():
            plain = tensor.detach() if target is None else tensor.detach().cpu()
            conj, neg = plain.is_conj(), plain.is_neg()
            plain = torch._neg_view(plain) if neg else plain
            plain = plain.conj() if conj else plain
        storage, size = plain.untyped_storage(), plain.element_size()
        first = int(plain.storage_offset()) * size
        span = 1 + int(sum((n - 1) * s for n, s in zip(plain.shape, plain.stride(), strict=True))) if plain.numel() else 0
        last = first + span * size
        place = used.setdefault(storage._cdata, [len(used), first, last])
        place[1], place[2] = min(place[1], first), max(place[2], last)
        views.append((place, first, plain, tensor.requires_grad, conj, neg, target))
    layouts: list[Layout] = []
    blocks: list[Block] = [(0, 0)] * len(used)
    for (index, start, end), first, plain, requires_grad, conj, neg, target in views:
        aligned = start // 16 * 16  # every dtype's size divides it
        offset = (first - aligned) // plain.element_size()
        device = str(target) if target is not None else None
        layouts.append((index, plain.dtype, offset, tuple(plain.shape), plain.stride(), requires_grad, conj, neg, device))
        blocks[index] = (plain.untyped_storage().data_ptr() + aligned, end - aligned)
    return layouts, blocks, [plain for _, _, plain, *_ in views]


def _block_of(buffer: pickle.PickleBuffer) -> Block:
    with buffer.raw() as raw:
        return (np.frombuffer(raw, np.uint8).ctypes.data if raw.nbytes else 0), raw.nbytes


def open_envelope(source: int, envelope: bytearray) -> IncomingMessage:
    """Makes room for what the envelope announces."""
    kind, storages, others, pickle_bytes, number, call = HEADER.unpack_from(envelope)
    at = HEADER.size
    count = storages + others + (pickle_bytes > INLINE_PICKLE_BYTES)
    sizes = struct.unpack_from(f"<{count}Q", envelope, at)
    at += 8 * count
    memory: list[Any] = [torch.UntypedStorage(nbytes) for nbytes in sizes[:storages]]
    memory += [np.empty(nbytes, np.uint8) for nbytes in sizes[storages:]]
    pickled: Any = memory[-1] if pickle_bytes > INLINE_PICKLE_BYTES else memoryview(envelope)[at : at + pickle_bytes]
    at += pickle_bytes if pickle_bytes <= INLINE_PICKLE_BYTES else 0
    blocks = []
    for place, nbytes in zip(memory, sizes, strict=True):
        address = place.data_ptr() if isinstance(place, torch.UntypedStorage) else place.ctypes.data
        huge_pages.ask(address, nbytes)
        if nbytes >= INLINE_BYTES:
            blocks.append((address, nbytes))
        elif nbytes:
            ctypes.memmove(address, (ctypes.c_char * nbytes).from_buffer(envelope, at), nbytes)
            at += nbytes
    return IncomingMessage(source, kind, call, number, pickled, memory[:storages], memory[storages : storages + others], blocks)


def unpack(message: IncomingMessage) -> Any:
    """The object that was packed. Raises whatever unpickling raises."""
    (head,) = struct.unpack_from("<I", message.pickled)
    layouts, forms, message.extra = pickle.loads(message.pickled[4 : 4 + head])
    strided = [_tensor_in(message.storages, layout) for layout in layouts]
    tensors = contexts.accept(_joined(forms, strided) if forms else strided, message.extra, message.source)
    before = getattr(_local, "tensors", None), getattr(_local, "unconfirmed", None)
    _local.tensors, _local.unconfirmed = tensors, message.unconfirmed
    try:
        return pickle.loads(message.pickled[4 + head :], buffers=message.buffers)
    except AttributeError as error:
        raise RuntimeError(
            f"{error}. Default RPC pickler does not serialize function code. Ensure that UDFs are defined on both caller and "
            "callee modules."
        ) from error
    finally:
        _local.tensors, _local.unconfirmed = before


def _tensor_in(storages: list[torch.UntypedStorage], layout: Layout) -> Tensor:
    index, dtype, offset, shape, stride, requires_grad, conj, neg, device = layout
    tensor = torch.empty(0, dtype=dtype, device="cpu").set_(storages[index], offset, shape, stride)
    if device is not None:
        tensor = tensor.to(device)
    if conj:
        tensor = tensor.conj()
    if neg:
        tensor = torch._neg_view(tensor)
    return tensor.requires_grad_() if requires_grad else tensor


def copied(source: int, packed: PackedMessage) -> IncomingMessage:
    """What arrives of a message to oneself. Its memory is taken now, as a send takes it."""
    message = open_envelope(source, bytearray(packed.envelope))
    for (target, nbytes), (address, _) in zip(message.blocks, packed.blocks, strict=True):
        ctypes.memmove(target, address, nbytes)
    return message


# -- sparse tensors, as the strided ones that they consist of ------------------------------------------------------------


# How a number of strided tensors make a sparse one
Form = tuple[Callable[..., Tensor], int]


def _taken_apart(tensor: Tensor) -> tuple[Form | None, list[Tensor]]:
    """The strided tensors that it consists of, their memory as it is, and how they make it again. None: it is strided itself."""
    if tensor.layout is torch.strided:
        return None, [tensor]
    plain = tensor.detach()
    options: dict[str, Any] = {"size": tuple(tensor.shape), "requires_grad": tensor.requires_grad, "check_invariants": False}
    if tensor.layout is torch.sparse_coo:
        make = partial(torch.sparse_coo_tensor, is_coalesced=tensor.is_coalesced(), **options)
        return (make, 2), [plain._indices(), plain._values()]
    compressed, others = (
        (plain.crow_indices(), plain.col_indices()) if tensor.layout in ROW_WISE else (plain.ccol_indices(), plain.row_indices())
    )
    return (partial(torch.sparse_compressed_tensor, layout=tensor.layout, **options), 3), [compressed, others, plain.values()]


def _joined(forms: list[Form | None], strided: list[Tensor]) -> list[Tensor]:
    """The tensors of these forms, which use up the strided ones in turn."""
    left = iter(strided)
    return [next(left) if form is None else form[0](*itertools.islice(left, form[1])) for form in forms]

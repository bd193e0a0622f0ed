"""What only travels, in every dtype and memory layout on both sides: bits arrive as they left, where the receiver put its
tensor, whatever lies between its elements."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

import mpicoll as dist
from tests.support import agree
from tests.support.tensors import EVERY_DTYPE, MOVABLE, bits_of_rank, layouts, of_rank, raw, same

pytestmark = [
    pytest.mark.usefixtures("world"),
    pytest.mark.filterwarnings("ignore:ComplexHalf"),
    pytest.mark.filterwarnings("ignore:BComplex32"),
]
SHAPE = (2, 3, 2, 2)  # every layout can have it
Layout = Callable[[Tensor], Tensor]


Values = Callable[..., Tensor]  # rank, dtype, shape, salt -> what that rank contributes


def crossed(dtype: torch.dtype) -> Iterator[tuple[str, tuple[int, ...], Values, Layout, Layout]]:
    """(name, shape, values, the sender's layout, the receiver's): every layout as the receiver's, beside a different one."""
    kinds = layouts(dtype)
    general = [name for name, (shape, _) in kinds.items() if shape not in ((), (0,), (3, 0))]
    for number, name in enumerate(general):
        other = general[(number * 5 + 1) % len(general)]
        # torch itself makes a signalling NaN a quiet one when it resolves a lazy minus
        values = of_rank if {name.split()[0], other.split()[0]} & {"neg", "conj"} else bits_of_rank
        yield f"{dtype} {other} -> {name}", SHAPE, values, kinds[other][1], kinds[name][1]
    for name in ("scalar", "strided scalar", "empty", "no columns"):
        yield f"{dtype} {name}", kinds[name][0], bits_of_rank, kinds["contiguous"][1], kinds[name][1]


class Receiver:
    """A tensor in some layout, and whether it is later the same tensor with other values, and counted as written."""

    def __init__(self, layout: Layout, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.tensor = layout(bits_of_rank(99, dtype, shape))
        self.place = (self.tensor.data_ptr(), self.tensor.stride())
        self.version = self._version()

    def _version(self) -> int:
        return -1 if self.tensor.is_inference() else self.tensor._version

    def got(self, expected: Tensor) -> bool:
        written = self.tensor.is_inference() or self._version() > self.version
        return same(self.tensor, expected) and self.place == (self.tensor.data_ptr(), self.tensor.stride()) and written


def finish(answer: object, async_op: bool) -> None:
    if async_op:
        assert isinstance(answer, dist.Work)
        answer.wait()
    else:
        assert answer is None


def test_broadcast(rank: int, size: int) -> None:
    wrong = []
    cases = [(dtype, *case) for dtype in MOVABLE for case in crossed(dtype)]
    for number, (dtype, name, shape, values_of, of_sender, of_receiver) in enumerate(cases):
        src = number % size
        values = values_of(src, dtype, shape)
        receiver = Receiver(of_receiver, shape, dtype)
        mine = of_sender(values) if rank == src else receiver.tensor
        before = -1 if mine.is_inference() else mine._version
        finish(dist.broadcast(mine, src, async_op=number % 2 == 0), number % 2 == 0)
        if rank == src:
            good = same(mine, values) and (mine.is_inference() or mine._version == before)
        else:
            good = receiver.got(values)
        if not good:
            wrong.append(name)
    agree(not wrong, wrong)


@pytest.mark.min_ranks(2)
def test_send_and_recv(rank: int, size: int) -> None:
    """trap 18: in a ring, blocking and immediate."""
    wrong = []
    after, before = (rank + 1) % size, (rank - 1) % size
    for dtype in MOVABLE:
        for number, (name, shape, values_of, of_sender, of_receiver) in enumerate(crossed(dtype)):
            values, expected = values_of(rank, dtype, shape), values_of(before, dtype, shape)
            receiver, mine = Receiver(of_receiver, shape, dtype), of_sender(values)
            if number % 2 and rank:
                assert dist.recv(receiver.tensor, before, tag=number) == before
                assert dist.send(mine, after, tag=number) is None
            elif number % 2:
                dist.send(mine, after, tag=number)
                dist.recv(receiver.tensor, before, tag=number)
            else:
                works = [dist.irecv(receiver.tensor, before), dist.isend(mine, after)]
                assert all(work.wait() for work in works)
            if not receiver.got(expected) or not same(mine, values):
                wrong.append(name)
    agree(not wrong, wrong)


def test_all_gather(rank: int, size: int) -> None:
    """trap 34: outputs in a layout of their own, and slices of one tensor."""
    wrong = []
    for dtype in MOVABLE:
        for number, (name, shape, values_of, of_sender, of_receiver) in enumerate(crossed(dtype)):
            given = [values_of(r, dtype, shape) for r in range(size)]
            mine, receivers = of_sender(given[rank]), [Receiver(of_receiver, shape, dtype) for _ in range(size)]
            outputs = [receiver.tensor for receiver in receivers]
            finish(dist.all_gather(outputs, mine, async_op=number % 2 == 0), number % 2 == 0)
            if not all(receiver.got(values) for receiver, values in zip(receivers, given, strict=True)):
                wrong.append(name)
    agree(not wrong, wrong)


def test_all_gather_single(rank: int, size: int) -> None:
    """trap 35: concatenated and stacked; the output in every layout."""
    wrong = []
    for dtype in MOVABLE:
        for number, (name, shape, values_of, of_sender, of_receiver) in enumerate(crossed(dtype)):
            given = [values_of(r, dtype, shape) for r in range(size)]
            stacked = number % 2 or not shape
            whole = (size, *shape) if stacked else (size * shape[0], *shape[1:])
            if name.endswith("channels last") and stacked:
                continue
            receiver = Receiver(of_receiver, whole, dtype)
            finish(dist.all_gather_single(receiver.tensor, of_sender(given[rank]), async_op=number % 3 == 0), number % 3 == 0)
            expected = torch.cat([values.reshape(-1) for values in given]).view(whole)
            if not receiver.got(expected):
                wrong.append(name)
    agree(not wrong, wrong)


def test_gather_and_scatter(rank: int, size: int) -> None:
    """trap 39: the root's own part arrives too."""
    wrong = []
    for dtype in MOVABLE:
        for number, (name, shape, values_of, of_sender, of_receiver) in enumerate(crossed(dtype)):
            root, async_op = number % size, number % 2 == 0
            given = [values_of(r, dtype, shape) for r in range(size)]
            receivers = [Receiver(of_receiver, shape, dtype) for _ in range(size)] if rank == root else []
            outputs = [receiver.tensor for receiver in receivers] or None
            finish(dist.gather(of_sender(given[rank]), outputs, dst=root, async_op=async_op), async_op)
            good = all(receiver.got(values) for receiver, values in zip(receivers, given, strict=rank == root))
            part = Receiver(of_receiver, shape, dtype)
            parts = [of_sender(values) for values in given] if rank == root else None
            finish(dist.scatter(part.tensor, parts, src=root, async_op=async_op), async_op)
            if not (good and part.got(given[rank])):
                wrong.append(name)
    agree(not wrong, wrong)


def test_all_to_all(rank: int, size: int) -> None:
    wrong = []
    for dtype in MOVABLE:
        for number, (name, shape, values_of, of_sender, of_receiver) in enumerate(crossed(dtype)):
            async_op = number % 2 == 0
            mine = [of_sender(values_of(rank, dtype, shape, salt=to)) for to in range(size)]
            receivers = [Receiver(of_receiver, shape, dtype) for _ in range(size)]
            finish(dist.all_to_all([receiver.tensor for receiver in receivers], mine, async_op=async_op), async_op)
            expected = [values_of(source, dtype, shape, salt=rank) for source in range(size)]
            if not all(receiver.got(values) for receiver, values in zip(receivers, expected, strict=True)):
                wrong.append(name)
    agree(not wrong, wrong)


def test_all_to_all_single(rank: int, size: int) -> None:
    wrong = []
    for dtype in MOVABLE:
        for number, (name, shape, values_of, of_sender, of_receiver) in enumerate(crossed(dtype)):
            if not shape:
                continue
            async_op, whole = number % 2 == 0, (size * shape[0], *shape[1:])
            given = [values_of(r, dtype, whole) for r in range(size)]
            receiver = Receiver(of_receiver, whole, dtype)
            finish(dist.all_to_all_single(receiver.tensor, of_sender(given[rank]), async_op=async_op), async_op)
            if not receiver.got(torch.cat([values.view(size, *shape)[rank] for values in given])):
                wrong.append(name)
    agree(not wrong, wrong)


def exotic() -> list[torch.dtype]:
    """Dtypes of this torch that have bits of their own (the quantized ones do not) and are not tested above."""
    quantized = {"quint8", "qint8", "qint32", "quint4x2", "quint2x4"}
    return [dtype for dtype in EVERY_DTYPE if dtype not in MOVABLE and str(dtype).removeprefix("torch.") not in quantized]


def test_every_other_dtype_travels(rank: int, size: int) -> None:
    """Even those that torch itself cannot copy: contiguous and strided."""
    wrong = []
    for dtype in exotic():
        try:
            bits_of_rank(0, dtype, (8,))
        except (RuntimeError, TypeError):
            continue  # this torch cannot make one
        for strided in (False, True):

            def of(values: Tensor, strided: bool = strided) -> Tensor:
                if not strided:
                    return values
                wide = bits_of_rank(98, values.dtype, (2 * values.numel(),))
                wide.view(torch.uint8).view(-1, 2, values.itemsize)[:, 0] = values.view(torch.uint8).view(-1, values.itemsize)
                return wide[::2]

            given = [bits_of_rank(r, dtype, (8,)) for r in range(size)]
            bits = [raw(values) for values in given]
            found = [of(bits_of_rank(99, dtype, (8,))) for _ in range(size)]
            everywhere = of(given[0] if rank == 0 else bits_of_rank(99, dtype, (8,)))
            try:
                dist.all_gather(found, of(given[rank]))
                dist.broadcast(everywhere, 0)
                work = dist.isend(of(given[rank]), (rank + 1) % size)
                neighbour = of(bits_of_rank(99, dtype, (8,)))
                dist.irecv(neighbour, (rank - 1) % size).wait()
                work.wait()
            except NotImplementedError as error:
                wrong.append(f"{dtype} strided={strided}: {error}")
                continue
            got = [content(t) for t in [*found, everywhere, neighbour]]
            if got != [*bits, bits[0], bits[(rank - 1) % size]]:
                wrong.append(f"{dtype} strided={strided}")
    agree(not wrong, wrong)


def content(tensor: Tensor) -> bytes:
    """``raw`` for dtypes that torch cannot copy."""
    return b"".join(raw(tensor[i : i + 1]) for i in range(tensor.numel()))

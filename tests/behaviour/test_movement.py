"""What only travels, in every dtype and memory layout on both sides: bits arrive as they left, where the receiver put its
tensor, whatever lies between its elements."""

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


def version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


class Crossing:
    """One case: makes the tensors that this rank sends and receives, and looks at them when they have been moved."""

    def __init__(self, case: tuple[str, tuple[int, ...], Values, Layout, Layout], number: int, dtype: torch.dtype) -> None:
        self.name, self.shape, self.values_of, self._sender, self._receiver = case
        self.number, self.dtype = number, dtype
        self.how = {"async_op": number % 2 == 0}
        self._sent: list[tuple[Tensor, Tensor, int]] = []  # tensor, values, version
        self._received: list[tuple[Tensor, Tensor, int, object]] = []  # tensor, expected, version, place

    def values(self, rank: int, salt: int = 0) -> Tensor:
        return self.values_of(rank, self.dtype, self.shape, salt=salt)

    def sender(self, values: Tensor) -> Tensor:
        tensor = self._sender(values)
        self._sent.append((tensor, values, version(tensor)))
        return tensor

    def receiver(self, expected: Tensor) -> Tensor:
        tensor = self._receiver(bits_of_rank(99, self.dtype, expected.shape))
        self._received.append((tensor, expected, version(tensor), (tensor.data_ptr(), tensor.stride())))
        return tensor

    def right(self) -> bool:
        """What was sent is as it was; what was received is the same tensor with other values, and counted as written."""
        kept = all(same(tensor, values) and version(tensor) == before for tensor, values, before in self._sent)
        return kept and all(
            same(tensor, expected) and place == (tensor.data_ptr(), tensor.stride())
            and (tensor.is_inference() or version(tensor) > before)
            for tensor, expected, before, place in self._received
        )  # fmt: skip


def broadcast(c: Crossing, rank: int, size: int) -> object:
    src = c.number % size
    values = c.values(src)
    return dist.broadcast(c.sender(values) if rank == src else c.receiver(values), src, **c.how)


def message(c: Crossing, rank: int, size: int) -> object:
    """trap 18: in a ring, blocking and immediate."""
    after, before = (rank + 1) % size, (rank - 1) % size
    mine, other = c.sender(c.values(rank)), c.receiver(c.values(before))
    if c.how["async_op"] or size == 1:
        works = [dist.irecv(other, before), dist.isend(mine, after)]
        assert all(work.wait() for work in works)
        return works[0] if c.how["async_op"] else None
    if rank:
        assert dist.recv(other, before, tag=c.number) == before
    assert dist.send(mine, after, tag=c.number) is None
    if not rank:
        dist.recv(other, before, tag=c.number)
    return None


def all_gather(c: Crossing, rank: int, size: int) -> object:
    """trap 34: outputs in a layout of their own."""
    outputs = [c.receiver(c.values(r)) for r in range(size)]
    return dist.all_gather(outputs, c.sender(c.values(rank)), **c.how)


def all_gather_single(c: Crossing, rank: int, size: int) -> object:
    """trap 35: concatenated and stacked; the output in every layout."""
    everybody = [c.values(r) for r in range(size)]
    stacked = not c.shape or (c.number % 2 and not c.name.endswith("channels last"))
    output = c.receiver(torch.stack(everybody) if stacked else torch.cat(everybody))
    return dist.all_gather_single(output, c.sender(c.values(rank)), **c.how)


def gather(c: Crossing, rank: int, size: int) -> object:
    """trap 39: the root's own part arrives too."""
    root = c.number % size
    outputs = [c.receiver(c.values(r)) for r in range(size)] if rank == root else None
    return dist.gather(c.sender(c.values(rank)), outputs, root, **c.how)


def scatter(c: Crossing, rank: int, size: int) -> object:
    """trap 39"""
    root = c.number % size
    parts = [c.sender(c.values(r)) for r in range(size)] if rank == root else None
    return dist.scatter(c.receiver(c.values(rank)), parts, root, **c.how)


def all_to_all(c: Crossing, rank: int, size: int) -> object:
    outputs = [c.receiver(c.values(source, salt=rank)) for source in range(size)]
    return dist.all_to_all(outputs, [c.sender(c.values(rank, salt=to)) for to in range(size)], **c.how)


def all_to_all_single(c: Crossing, rank: int, size: int) -> object:
    if not c.shape:
        return dist.barrier(**c.how)  # it splits dim 0
    output = c.receiver(torch.cat([c.values(source, salt=rank) for source in range(size)]))
    return dist.all_to_all_single(output, c.sender(torch.cat([c.values(rank, salt=to) for to in range(size)])), **c.how)


MOVES = [broadcast, message, all_gather, all_gather_single, gather, scatter, all_to_all, all_to_all_single]


@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.__name__)
def test_bits_arrive_as_they_left(move: Callable[[Crossing, int, int], object], rank: int, size: int) -> None:
    wrong = []
    for dtype in MOVABLE:
        for number, case in enumerate(crossed(dtype)):
            crossing = Crossing(case, number, dtype)
            answer = move(crossing, rank, size)
            assert isinstance(answer, dist.Work) and answer.wait() if crossing.how["async_op"] else answer is None
            if not crossing.right():
                wrong.append(crossing.name)
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

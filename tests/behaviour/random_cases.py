"""Operations drawn at random, each with the result that one process computes; see random_operations.py."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import ReduceOp

import mpicoll

Look = Callable[[Tensor], Tensor]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
COMPLEX = [torch.complex64, torch.complex128]
DTYPES = [*INTEGERS, *FLOATS, *COMPLEX, torch.bool]
REDUCTIONS = {
    **{dtype: ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"] for dtype in INTEGERS},
    **{dtype: ["SUM", "AVG", "PRODUCT", "MIN", "MAX"] for dtype in FLOATS},
    **{dtype: ["SUM", "AVG"] for dtype in COMPLEX},
    torch.bool: ["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"],
}
POOL = 65_537  # values
LARGEST = 2 << 20  # bytes


def layouts(shape: tuple[int, ...]) -> dict[str, tuple[int, Look]]:
    """For each layout: the elements of its base, and the tensor of this shape that lies in the base."""
    count = torch.Size(shape).numel()
    return {
        "contiguous": (count, lambda base: base.view(shape)),
        "offset": (count + 3, lambda base: base[3:].view(shape)),
        "strided": (2 * count, lambda base: base.view(*shape, 2)[..., 0]),
        "transposed": (count, lambda base: base.view(shape[::-1]).permute(tuple(range(len(shape)))[::-1])),
    }


class Placed:
    """A tensor of some layout in a larger piece of memory, of which an operation must change the tensor only."""

    def __init__(self, values: Tensor, layout: str) -> None:
        elements, self.look = layouts(tuple(values.shape))[layout]
        self.base = torch.ones(elements, dtype=values.dtype, device="cpu")
        self.tensor = self.look(self.base)
        self.tensor.copy_(values)
        self.expected = self.base
        self.rounded = False
        self.wants(values)

    def wants(self, values: Tensor, rounded: bool = False) -> Placed:
        """Sets what the tensor must hold at the end. ``rounded``: up to one rounding."""
        self.expected = torch.ones_like(self.base)
        self.look(self.expected).copy_(values)
        self.rounded = rounded
        return self

    def right(self) -> bool:
        if not self.rounded:
            return torch.equal(self.base, self.expected)
        wide = torch.complex128 if self.base.is_complex() else torch.float64
        got, expected = self.base.to(wide), self.expected.to(wide)
        return bool(((got - expected).abs() <= 2 * torch.finfo(self.base.dtype).eps * expected.abs()).all())


@dataclass
class Case:
    """One operation, as this rank sees it. All ranks draw alike from ``plan``; ``own`` is for choices of this rank.

    The CPU is named where tensors are made, so that a default device is one for mpicoll's tensors only.
    """

    plan: random.Random
    own: random.Random
    pools: dict[torch.dtype, Tensor]
    ranks: list[int]
    group: Any
    rank: int  # group rank
    number: int  # of all operations
    door: ModuleType = field(init=False)
    asynchronous: bool = field(init=False)
    placed: list[Placed] = field(default_factory=list)
    words: str = ""  # what is wrong, of results that are no tensors

    def __post_init__(self) -> None:
        self.door = self.plan.choice([mpicoll, torch.distributed])
        self.asynchronous = self.own.random() < 0.5
        self.dtype = self.plan.choice(DTYPES)
        self.reduction = self.plan.choice(REDUCTIONS[self.dtype])
        self.key = self.plan.randrange(POOL)
        self.size = len(self.ranks)
        self.root = self.plan.randrange(self.size)

    @property
    def how(self) -> dict[str, Any]:
        return {"group": self.group, "async_op": self.asynchronous}

    def by_rank(self, kind: str, rank: int) -> dict[str, Any]:
        """The argument that means a group rank: ``kind`` with the global rank, or group_``kind``."""
        return {kind: self.ranks[rank]} if self.own.random() < 0.5 else {f"group_{kind}": rank}

    @property
    def op(self) -> Any:
        return getattr(ReduceOp, self.reduction)

    def count(self, blocks: int = 1) -> int:
        """A number of elements of a block, of ``blocks`` that have LARGEST bytes together at most."""
        most = self.plan.choices([1, 64, 4096, 65_536, 524_288, LARGEST], [10, 50, 20, 15, 4, 1])[0]
        return self.plan.randint(0 if most > 1 else 1, most // self.dtype.itemsize // blocks if most > 64 else most)

    def shape(self, count: int) -> tuple[int, ...]:
        if count == 1 and self.plan.random() < 0.5:
            return ()
        rows = self.plan.choice([1, 2, 3, 5])
        return (rows, count // rows) if count % rows == 0 else (count,)

    def values(self, rank: int, shape: tuple[int, ...], part: int = 0) -> Tensor:
        """What a rank brings; equal on all ranks."""
        count, begin = torch.Size(shape).numel(), (self.key + 7919 * rank + 104_729 * part) % POOL
        pool = self.pools[self.dtype]
        if begin + count > POOL:
            pool = pool.repeat(2 + count // POOL)
        return pool[begin : begin + count].view(shape)

    def place(self, values: Tensor) -> Placed:
        self.placed.append(Placed(values, self.own.choice(["contiguous", "contiguous", "offset", "strided", "transposed"])))
        return self.placed[-1]

    def empty(self, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device="cpu")

    def reduced(self, shape: tuple[int, ...], part: int = 0) -> Tensor:
        inputs = torch.stack([self.values(rank, shape, part) for rank in range(self.size)])
        if self.dtype is torch.bool:
            same = {"SUM": "any", "MAX": "any", "BOR": "any", "PRODUCT": "all", "MIN": "all", "BAND": "all"}
            name = same.get(self.reduction)
            return inputs.sum(0) % 2 == 1 if name is None else getattr(inputs, name)(0)
        wide = torch.int64 if self.dtype in INTEGERS else torch.complex128 if self.dtype.is_complex else torch.float64
        inputs = inputs.to(wide)
        if self.reduction in ("SUM", "AVG"):
            total = inputs.sum(0)
            if self.reduction == "AVG":
                total = torch.div(total, self.size, rounding_mode="trunc") if wide is torch.int64 else total / self.size
            return total.to(self.dtype)
        if self.reduction in ("MIN", "MAX"):
            return (inputs.amin(0) if self.reduction == "MIN" else inputs.amax(0)).to(self.dtype)
        steps = {"PRODUCT": torch.mul, "BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}
        result = inputs[0]
        for other in inputs[1:]:
            result = steps[self.reduction](result, other)
        return result.to(self.dtype)

    @property
    def rounded(self) -> bool:
        return self.reduction == "AVG" and self.dtype not in INTEGERS

    def known(self, got: object, expected: object) -> None:
        if got != expected:
            self.words = f"got {got!r:.300}, expected {expected!r:.300}"


# Each operation returns what it must be waited for: a Work, a Future, None, or a list of those.


def all_reduce(c: Case) -> Any:
    shape = c.shape(c.count())
    target = c.place(c.values(c.rank, shape)).wants(c.reduced(shape), c.rounded)
    return c.door.all_reduce(target.tensor, c.op, **c.how)


def all_reduce_coalesced(c: Case) -> Any:
    shapes = [c.shape(c.count(4)) for _ in range(c.plan.randint(1, 4))]
    targets = [c.place(c.values(c.rank, s, i)).wants(c.reduced(s, i), c.rounded) for i, s in enumerate(shapes)]
    return c.door.all_reduce_coalesced([target.tensor for target in targets], c.op, **c.how)


def reduce(c: Case) -> Any:
    shape = c.shape(c.count())
    target = c.place(c.values(c.rank, shape))
    if c.rank == c.root:
        target.wants(c.reduced(shape), c.rounded)
    return c.door.reduce(target.tensor, op=c.op, **c.by_rank("dst", c.root), **c.how)


def broadcast(c: Case) -> Any:
    shape = c.shape(c.count())
    target = c.place(c.values(c.rank, shape)).wants(c.values(c.root, shape))
    return c.door.broadcast(target.tensor, **c.by_rank("src", c.root), **c.how)


def shapes_of_blocks(c: Case) -> list[tuple[int, ...]]:
    """A shape for each rank's block: all alike, or not."""
    if c.plan.random() < 0.5:
        return [c.shape(c.count(c.size))] * c.size
    return [c.shape(c.count(c.size)) for _ in range(c.size)]


def all_gather(c: Case) -> Any:
    shapes = shapes_of_blocks(c)
    source = c.place(c.values(c.rank, shapes[c.rank]))
    targets = [c.place(c.empty(s)).wants(c.values(r, s)) for r, s in enumerate(shapes)]
    return c.door.all_gather([target.tensor for target in targets], source.tensor, **c.how)


def all_gather_single(c: Case) -> Any:
    shape = (c.plan.randint(1, 3), c.count(3 * c.size))
    source = c.place(c.values(c.rank, shape))
    total = torch.cat([c.values(rank, shape) for rank in range(c.size)])
    target = c.place(torch.zeros_like(total)).wants(total)
    function = getattr(c.door, "all_gather_single", c.door.all_gather_into_tensor)
    return function(target.tensor, source.tensor, **c.how)


def reduce_scatter(c: Case) -> Any:
    shapes = shapes_of_blocks(c)
    sources = [c.place(c.values(c.rank, s, part)) for part, s in enumerate(shapes)]
    own = shapes[c.rank]
    target = c.place(c.empty(own)).wants(c.reduced(own, c.rank), c.rounded)
    return c.door.reduce_scatter(target.tensor, [source.tensor for source in sources], c.op, **c.how)


def reduce_scatter_single(c: Case) -> Any:
    shape = (c.plan.randint(1, 3), c.count(3 * c.size))
    source = c.place(torch.cat([c.values(c.rank, shape, part) for part in range(c.size)]))
    target = c.place(c.empty(shape)).wants(c.reduced(shape, c.rank), c.rounded)
    function = getattr(c.door, "reduce_scatter_single", c.door.reduce_scatter_tensor)
    return function(target.tensor, source.tensor, c.op, **c.how)


def gather(c: Case) -> Any:
    shapes = shapes_of_blocks(c)
    source, targets = c.place(c.values(c.rank, shapes[c.rank])), None
    if c.rank == c.root:
        targets = [c.place(c.empty(s)).wants(c.values(r, s)).tensor for r, s in enumerate(shapes)]
    return c.door.gather(source.tensor, targets, **c.by_rank("dst", c.root), **c.how)


def scatter(c: Case) -> Any:
    shapes = shapes_of_blocks(c)
    sources = [c.place(c.values(c.root, s, r)).tensor for r, s in enumerate(shapes)] if c.rank == c.root else None
    target = c.place(c.empty(shapes[c.rank])).wants(c.values(c.root, shapes[c.rank], c.rank))
    return c.door.scatter(target.tensor, sources, **c.by_rank("src", c.root), **c.how)


def all_to_all(c: Case) -> Any:
    even = c.plan.random() < 0.3
    one = c.count(c.size)
    counts = [[one if even else c.count(c.size) for _ in range(c.size)] for _ in range(c.size)]  # of sender, of receiver
    sources = [c.place(c.values(c.rank, (n,), to)).tensor for to, n in enumerate(counts[c.rank])]
    arriving = [c.values(source, (counts[source][c.rank],), c.rank) for source in range(c.size)]
    targets = [c.place(torch.zeros_like(values)).wants(values).tensor for values in arriving]
    return c.door.all_to_all(targets, sources, **c.how)


def all_to_all_single(c: Case) -> Any:
    even = c.plan.random() < 0.3
    width, one = c.plan.randint(1, 3), c.count(4 * c.size)
    rows = [[one if even else c.count(4 * c.size) for _ in range(c.size)] for _ in range(c.size)]
    source = c.place(torch.cat([c.values(c.rank, (n, width), to) for to, n in enumerate(rows[c.rank])]))
    arriving = torch.cat([c.values(sender, (rows[sender][c.rank], width), c.rank) for sender in range(c.size)])
    target = c.place(torch.zeros_like(arriving)).wants(arriving)
    receives, sends = [rows[sender][c.rank] for sender in range(c.size)], rows[c.rank]
    splits = [] if even and c.own.random() < 0.5 else [receives, sends]
    return c.door.all_to_all_single(target.tensor, source.tensor, *splits, **c.how)


def barrier(c: Case) -> Any:
    return c.door.barrier(**c.how)


def thing(c: Case, rank: int) -> Any:
    return {"rank": rank, "text": "x" * (c.key % 5000), "list": [c.key] * (rank + c.key % 7)}


def all_gather_object(c: Case) -> None:
    results: list[Any] = [None] * c.size
    c.door.all_gather_object(results, thing(c, c.rank), group=c.group)
    c.known(results, [thing(c, rank) for rank in range(c.size)])


def broadcast_object_list(c: Case) -> None:
    things = [thing(c, c.rank), c.rank]
    c.door.broadcast_object_list(things, group=c.group, **c.by_rank("src", c.root))
    c.known(things, [thing(c, c.root), c.root])


def gather_object(c: Case) -> None:
    results: list[Any] | None = [None] * c.size if c.rank == c.root else None
    c.door.gather_object(thing(c, c.rank), results, group=c.group, **c.by_rank("dst", c.root))
    c.known(results, [thing(c, rank) for rank in range(c.size)] if c.rank == c.root else None)


def scatter_object_list(c: Case) -> None:
    result = [None]
    things = [thing(c, rank) for rank in range(c.size)] if c.rank == c.root else None
    c.door.scatter_object_list(result, things, group=c.group, **c.by_rank("src", c.root))
    c.known(result, [thing(c, c.rank)])


def message(c: Case) -> Any:
    """One message, blocking or not at each end. Some have the tag of others, in whose order they come."""
    to, shape, surplus = c.plan.randrange(c.size), c.shape(c.count()), c.plan.choice([0, 0, 5])
    tag = c.plan.choice([0, 7, 100 + c.number])
    anybody = tag >= 100 and c.own.random() < 0.3
    works, blocking = [], to != c.root and not c.asynchronous
    values = c.values(c.root, shape)
    if c.rank == to:
        flat = torch.cat([values.reshape(-1), c.values(to, (surplus,))])
        target = c.place(torch.cat([torch.zeros_like(values).reshape(-1), c.values(to, (surplus,))])).wants(flat)
        sender = {} if anybody else c.by_rank("src", c.root)
        if blocking:
            c.known(c.door.recv(target.tensor, group=c.group, tag=tag, **sender), c.ranks[c.root])
        else:
            works.append(c.door.irecv(target.tensor, group=c.group, tag=tag, **sender))
    if c.rank == c.root:
        source, receiver = c.place(values), c.by_rank("dst", to)
        if blocking:
            c.known(c.door.send(source.tensor, group=c.group, tag=tag, **receiver), None)
            source.wants(torch.zeros_like(values)).tensor.zero_()  # the program may use its memory anew
        else:
            works.append(c.door.isend(source.tensor, group=c.group, tag=tag, **receiver))
    return works


def batch_isend_irecv(c: Case) -> Any:
    """Each rank sends to the rank ``step`` further, and receives from the one before; in an order of its own."""
    step, shape = c.plan.randrange(c.size), c.shape(c.count(2))
    after, before = (c.rank + step) % c.size, (c.rank - step) % c.size
    source = c.place(c.values(c.rank, shape))
    target = c.place(c.empty(shape)).wants(c.values(before, shape))
    operations = [
        c.door.P2POp(c.door.isend, source.tensor, group=c.group, tag=3, **c.by_rank("peer", after)),
        c.door.P2POp(c.door.irecv, target.tensor, group=c.group, tag=3, **c.by_rank("peer", before)),
    ]
    c.own.shuffle(operations)
    return c.door.batch_isend_irecv(operations)


OPERATIONS: list[Callable[[Case], Any]] = [
    all_reduce, all_reduce_coalesced, reduce, broadcast, all_gather, all_gather_single, reduce_scatter, reduce_scatter_single,
    gather, scatter, all_to_all, all_to_all_single, barrier, all_gather_object, broadcast_object_list, gather_object,
    scatter_object_list, message, message, batch_isend_irecv,
]  # fmt: skip

"""A node's shared window: any sequence of operations, sizes on both sides of every edge, and what happens where there is none."""

import os
import random
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from mpi4py import MPI

from mpicoll._algorithms import blocks, shared_memory
from mpicoll._algorithms.blocks import block
from mpicoll._algorithms.window import LEFT, LINE, Window
from mpicoll._mpi import shared_segment
from mpicoll._mpi.backoff import Backoff
from mpicoll._tensors import combine
from tests.support import agree, everyone

CHUNK = 4096  # bytes
EDGES = [1, LINE // 4, CHUNK // 4 - 1, CHUNK // 4, CHUNK // 4 + 1, CHUNK // 2, 3 * CHUNK // 4 + 5, 5 * CHUNK // 4 - 3]  # elements

pytestmark = pytest.mark.min_ranks(2)


def add(parts: list[torch.Tensor], out: torch.Tensor) -> None:
    kernel = combine.TABLE.get((torch.float32, torch.distributed.ReduceOp.SUM))
    assert kernel is not None
    kernel.combine(parts, out)


@pytest.fixture(params=["ordered", "fenced", "threads"])
def window(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Window:
    comm, threads = MPI.COMM_WORLD, 2 if request.param == "threads" else 1
    segment = shared_segment.create(comm, Window.nbytes(comm.size, CHUNK), ordered=request.param != "fenced")
    assert segment is not None
    made = Window(segment, comm.rank, comm.size, CHUNK, lambda _: Backoff().pause, 10, threads)
    if threads > 1:
        monkeypatch.setattr(blocks, "BY_THREADS_FROM", 64)
        made.copy = blocks.copy
    return made


def test_a_fence_needs_no_window_of_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open MPI 4.1 on Arm: MPI_ERR_WIN, so that init_process_group failed."""

    def no_window(*_: object, **__: object) -> None:
        raise MPI.Exception(MPI.ERR_WIN)

    monkeypatch.setattr(MPI, "Win", SimpleNamespace(Create=no_window))
    segment = shared_segment.create(MPI.COMM_WORLD, LINE, ordered=False)
    agree(segment is not None and segment.fence is not None)
    assert segment is not None
    assert segment.fence is not None
    began_s = time.perf_counter()
    for _ in range(1000):
        segment.fence()
    agree(time.perf_counter() - began_s < 0.5)


@pytest.mark.parametrize(("machine", "fenced"), [("aarch64", True), ("ppc64le", True), ("x86_64", False)])
def test_processors_that_exchange_writes_get_a_fence(machine: str, fenced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_segment, "ORDERED", frozenset({"x86_64"}))  # --as-if-arm empties it
    monkeypatch.setattr("platform.machine", lambda: machine)
    segment = shared_segment.create(MPI.COMM_WORLD, LINE)
    agree(segment is not None and (segment.fence is not None) == fenced)


def of_rank(rank: int, count: int, seed: int) -> torch.Tensor:
    """Small whole numbers, so that sums are exact in any order."""
    return torch.randint(-50, 50, (count,), generator=torch.Generator().manual_seed(1000 * seed + rank)).float()


def all_reduce(window: Window, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    mine = of_rank(window.rank, count, seed)
    shared_memory.all_reduce(window, mine, add)
    return mine, sum(of_rank(r, count, seed) for r in range(window.size))


def all_reduce_flat(window: Window, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    mine = of_rank(window.rank, count, seed)
    shared_memory.reduce_flat(window, mine, mine, add)
    return mine, sum(of_rank(r, count, seed) for r in range(window.size))


def reduce_flat(window: Window, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    mine, root = of_rank(window.rank, count, seed), seed % window.size
    shared_memory.reduce_flat(window, mine, mine, add, root=root)
    whole = sum(of_rank(r, count, seed) for r in range(window.size))
    return mine, whole if window.rank == root else of_rank(window.rank, count, seed)


def reduce_scatter_flat(window: Window, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    mine, output = of_rank(window.rank, count * window.size, seed), torch.zeros(count)
    shared_memory.reduce_flat(window, output, mine, add, window.rank * output.nbytes)
    whole = sum(of_rank(r, count * window.size, seed) for r in range(window.size))
    return output, whole[window.rank * count :][:count]


def reduce(window: Window, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    mine, root = of_rank(window.rank, count, seed), seed % window.size
    shared_memory.all_reduce(window, mine, add, root)
    whole = sum(of_rank(r, count, seed) for r in range(window.size))
    return mine, whole if window.rank == root else of_rank(window.rank, count, seed)


def reduce_scatter(window: Window, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    mine, output = of_rank(window.rank, count * window.size, seed), torch.zeros(count)
    shared_memory.reduce_scatter(window, output, mine, add)
    whole = sum(of_rank(r, count * window.size, seed) for r in range(window.size))
    return output, whole[window.rank * count :][:count]


def all_gather(window: Window, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    counts = [count + 3 * r for r in range(window.size)]
    mine, output = of_rank(window.rank, counts[window.rank], seed), torch.zeros(sum(counts))
    shared_memory.all_gather(window, [block(part) for part in output.split(counts)], block(mine))
    return output, torch.cat([of_rank(r, n, seed) for r, n in enumerate(counts)])


def all_gather_in_place(window: Window, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    output = torch.zeros(window.size, count)
    output[window.rank] = of_rank(window.rank, count, seed)
    shared_memory.all_gather(window, blocks.blocks(output, window.size), block(output[window.rank]))
    return output, torch.stack([of_rank(r, count, seed) for r in range(window.size)])


def broadcast(window: Window, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    root = seed % window.size
    mine = of_rank(window.rank, count, seed)
    shared_memory.broadcast(window, block(mine), root)
    return mine, of_rank(root, count, seed)


def all_to_all(window: Window, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    rank, size = window.rank, window.size
    counts = [[(count * (i + 2 * j + seed)) % (count + 1) for j in range(size)] for i in range(size)]
    sources = [of_rank(rank, counts[rank][j], seed + j) for j in range(size)]
    targets = [torch.zeros(counts[i][rank]) for i in range(size)]
    assert shared_memory.all_to_all(window, [block(t) for t in targets], [block(s) for s in sources]) == []
    return torch.cat(targets), torch.cat([of_rank(i, counts[i][rank], seed + rank) for i in range(size)])


def barrier(window: Window, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    assert shared_memory.barrier(window, 30.0)
    return torch.zeros(1), torch.zeros(1)


Operation = Callable[[Window, int, int], tuple[torch.Tensor, torch.Tensor]]
OPERATIONS: list[Operation] = [
    all_reduce, all_reduce_flat, reduce, reduce_flat, reduce_scatter, reduce_scatter_flat, all_gather, all_gather_in_place,
    broadcast, all_to_all, barrier,
]  # fmt: skip


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
def test_sizes_on_both_sides_of_every_edge(window: Window, operation: Operation) -> None:
    wrong = []
    for seed, count in enumerate(EDGES):
        got, expected = operation(window, count, seed)
        if not torch.equal(got, expected):
            wrong.append(f"{count}: {got} is not {expected}")
    agree(not wrong, wrong)


class Words:
    """The words of a window, with a note of what stands where no fence orders it."""

    def __init__(self, window: Window) -> None:
        self.words, self.wrong = window._words, []
        self.announce = {window._my_laid, window._my_taken}  # written after what they announce
        self.announced = {*window._laid, *window._taken}  # read before what they announce
        self.left = {at + LEFT for at in (*self.announce, *self.announced)}
        self.written = self.read = False  # no fence since

    def fence(self) -> None:
        self.written = self.read = False

    def __setitem__(self, at: int, value: int) -> None:
        if at in self.announce and self.written:
            self.wrong.append(f"word {at} is written without a fence after what it announces")
        self.written, self.words[at] = at not in self.announce, value

    def __getitem__(self, at: int) -> int:
        if at in self.announced:
            self.read = True
        elif self.read and at not in self.left:
            self.wrong.append(f"word {at} is read without a fence after what announces it")
        return self.words[at]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
def test_fences_stand_between_words_and_what_they_announce(window: Window, operation: Operation) -> None:
    """A processor of Arm may read the word of a barrier before the one that announces it: the barrier had no fence there."""
    watched = Words(window)
    window._words, window._fence = watched, watched.fence
    got, expected = operation(window, CHUNK, 1)
    if watched.read:
        watched.wrong.append("the operation ends without a fence after what it has read last")
    agree(not watched.wrong and torch.equal(got, expected), watched.wrong)


def test_any_sequence_of_operations(window: Window) -> None:
    """Halves are written again while the slowest rank still reads; a rank that sleeps now and then shows it."""
    choice, wrong = random.Random(7), []
    for seed in range(300):
        operation, count = choice.choice(OPERATIONS), choice.choice(EDGES)
        if choice.random() < 0.1 and seed % window.size == window.rank:
            Backoff().pause()
            os.sched_yield()
        window.call = seed
        got, expected = operation(window, count, seed)
        if not torch.equal(got, expected):
            wrong.append(f"#{seed} {operation.__name__} {count}")
    agree(not wrong, wrong)


def test_sizes_that_do_not_match_are_named_on_all_ranks(window: Window) -> None:
    sources = [torch.zeros(3) for _ in range(window.size)]
    targets = [torch.zeros(4 if window.rank == 0 and r == 1 else 3) for r in range(window.size)]
    wrong = shared_memory.all_to_all(window, [block(t) for t in targets], [block(s) for s in sources])
    agree(wrong == [(1, 0)], wrong)


def test_a_barrier_ends_when_its_time_is_up(window: Window) -> None:
    came = True
    if window.rank == 0:
        came = shared_memory.barrier(window, 0.05)
    said = everyone(came)
    agree(said == [False] + [True] * (window.size - 1), said)


@pytest.mark.parametrize("failing", [0, 1])
def test_no_window_on_any_rank_where_one_cannot_have_it(monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    comm = MPI.COMM_WORLD

    def refuse(*arguments: object) -> None:
        raise OSError("no memory")

    if comm.rank == failing:
        monkeypatch.setattr(shared_segment, "_mapped", refuse)
    made = shared_segment.create(comm, 8192)
    agree(made is None, made)


def test_a_file_of_another_process_is_not_taken_for_the_segment() -> None:
    """A number of a process means another one in another container."""
    file = os.memfd_create("other")
    os.ftruncate(file, 8192)
    try:
        agree(shared_segment._mapped_from(8192, os.getpid(), file, b"x" * 16) is None)
        agree(shared_segment._mapped_from(4096, os.getpid(), file, bytes(16)) is None)
        agree(shared_segment._mapped_from(8192, os.getpid(), 10_000, bytes(16)) is None)
    finally:
        os.close(file)

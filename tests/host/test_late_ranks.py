"""Ranks of a window that are late: what others have announced meanwhile is never taken for something else."""

import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from mpi4py import MPI

from mpicoll._algorithms import hierarchical, shared_memory
from mpicoll._algorithms.blocks import block, blocks
from mpicoll._algorithms.window import Window
from mpicoll._mpi import shared_segment
from mpicoll._mpi.backoff import Backoff
from mpicoll._tensors.calls import DifferentCalls
from tests.host.test_window import CHUNK, EDGES, add

pytestmark = pytest.mark.ranks(1)  # threads are the ranks


def windows_of(size: int) -> list[Window]:
    """The windows of the ranks of one node."""
    segment = shared_segment.create(MPI.COMM_SELF, Window.nbytes(size, CHUNK))
    assert segment is not None
    return [Window(segment, rank, size, CHUNK, lambda _: Backoff().pause, 10) for rank in range(size)]


@contextmanager
def ahead(program: Callable[..., None], *arguments: object) -> Iterator[None]:
    """Runs the program of a rank that gets as far as it can before the body begins, and must end after the body."""
    with ThreadPoolExecutor() as pool:
        ended = pool.submit(program, *arguments)
        wait([ended], 0.3)
        yield
        ended.result(30)


def test_a_rank_that_is_late_in_a_barrier() -> None:
    """Another rank has left the barrier, and lays down what comes next. (The late one took that for another collective.)"""
    waiting, late = threading.Event(), threading.Event()

    def pause() -> None:
        waiting.set()
        late.wait(10)

    windows = windows_of(2)
    windows[1].pause, windows[1].spins = lambda _: pause, 0
    sent, received = torch.arange(2.0 * CHUNK), torch.zeros(2 * CHUNK)

    def program(window: Window, tensor: torch.Tensor) -> None:
        assert shared_memory.barrier(window, 30)
        window.call = 7
        shared_memory.broadcast(window, block(tensor), 0)

    with ahead(program, windows[1], received):
        assert waiting.wait(10)
        with ahead(program, windows[0], sent):
            late.set()
    assert received.equal(sent)


def test_a_rank_that_comes_to_a_broadcast_when_the_root_is_in_the_next_barrier() -> None:
    """The root waits for nobody before its barrier. (The late rank took the barrier for the broadcast, and raised.)"""
    root, other = windows_of(2)
    sent, received = torch.arange(CHUNK / 4), torch.zeros(CHUNK // 4)

    def program(window: Window, tensor: torch.Tensor) -> None:
        window.call = 7
        shared_memory.broadcast(window, block(tensor), 0)
        assert shared_memory.barrier(window, 30)

    with ahead(program, root, sent):
        assert root.turn == 3, "two turns of the broadcast and the barrier"
        program(other, received)
    assert received.equal(sent)


@pytest.mark.parametrize("broadcasts", [1, 2])
def test_a_rank_that_is_late_in_a_barrier_while_another_one_is_in_a_later_barrier(broadcasts: int) -> None:
    """A root waits for nobody. (The late rank took the word of the later barrier for data, and raised.)"""
    fast, late = windows_of(2)
    sent, received = torch.arange(CHUNK / 8), torch.zeros(CHUNK // 8)
    late.turn = 1
    late.lay_barrier(0)
    late.take(0)

    def program() -> None:
        assert shared_memory.barrier(fast, 30)
        fast.call = 7
        for _ in range(broadcasts):
            shared_memory.broadcast(fast, block(sent), 0)
        assert shared_memory.barrier(fast, 30)

    with ahead(program):
        assert fast.turn == 2 + broadcasts
        late.check_barrier(0)
        late.call = 7
        for _ in range(broadcasts):
            shared_memory.broadcast(late, block(received), 0)
            assert received.equal(sent)
        assert shared_memory.barrier(late, 30)


def test_a_rank_that_is_late_while_the_others_raise_in_the_next_collective() -> None:
    """The others had ended this one. (The late rank raised in this one, which all had called alike.)"""
    windows = late, *others = windows_of(3)
    for step in ("free", "lay", "await_laid", "take"):
        for window in windows:
            getattr(window, step)(0)
    for number, window in enumerate(others):
        window.await_taken(0)
        window.call = 6 + number
        window.free(1)
        window.lay(1)
    for window in others:
        with pytest.raises(DifferentCalls):
            window.await_laid_by(3 - window.rank, 1)
    late.await_taken(0)
    late.call = 6
    late.free(1)
    late.lay(1)
    with pytest.raises(DifferentCalls):
        late.await_laid(1)
    with pytest.raises(DifferentCalls):
        late.await_taken(1)


def test_a_barrier_that_a_rank_has_left_already() -> None:
    """It raised in the next collective. The rank that is late in the barrier ends it, and raises in the next collective."""
    late, gone, slow = windows_of(3)
    for window in (gone, late):
        window.turn = 1
        window.lay_barrier(0)
        window.take(0)
    with pytest.raises(DifferentCalls):
        gone._leave()
    late.left(0)
    with pytest.raises(DifferentCalls):
        late.left(1)
    assert shared_memory.barrier(slow, 10)
    late.check_barrier(0)
    with pytest.raises(DifferentCalls):
        shared_memory.barrier(slow, 10)


def test_a_rank_that_comes_to_a_broadcast_when_its_root_is_two_broadcasts_on() -> None:
    """Over nodes; the third broadcast is from another node. (The late rank took it for the first one, and raised.)"""
    rail = SimpleNamespace(broadcast=lambda memory, root: None)
    late, root = (hierarchical.Nodes(window, rail, [[0, 1], [2]], node=0) for window in windows_of(2))
    roots, sent, received = [1, 1, 2], [torch.arange(3.0) for _ in range(3)], [torch.zeros(3) for _ in range(3)]

    def program(nodes: hierarchical.Nodes, tensors: list[torch.Tensor]) -> None:
        for number, rank in enumerate(roots):
            nodes.window.call = number
            hierarchical.broadcast(nodes, block(tensors[number]), rank)

    with ahead(program, root, sent):
        program(late, received)
    assert all(tensor.equal(sent[0]) for tensor in received[:2])


def test_any_sequence_over_nodes_with_ranks_that_are_late() -> None:
    """No rank takes another's turn for one of another collective. (There is no other node here, so results are not compared.)"""
    windows, ranks = windows_of(3), [[0, 1, 2], [3, 4, 5]]
    interval, errors = sys.getswitchinterval(), []

    def program(place: int) -> None:
        own, common = random.Random(place), random.Random(3)

        def pause(*arguments: object) -> None:
            if own.random() < 0.3:
                time.sleep(own.random() * 1e-3)

        def started(*arguments: object) -> Callable[[], None]:
            pause()
            return pause

        blocking, starting = dict.fromkeys(("broadcast", "all_reduce", "reduce"), pause), ("reduce_scatter", "all_gather")
        rail = SimpleNamespace(**blocking, **dict.fromkeys(starting, started))
        window = windows[place]
        window.pause = lambda _: pause
        nodes = hierarchical.Nodes(window, rail, ranks, node=0)
        stages = hierarchical.Stages(add, torch.float32, MPI.FLOAT, MPI.SUM, None)
        for number in range(1000):
            pause()
            window.call = number
            kind, root, count = common.randrange(6), common.randrange(6), common.choice([0, 1, 3, *EDGES])
            tensor, wide = torch.zeros(count), torch.zeros(6, count)
            if kind == 0:
                hierarchical.all_reduce(nodes, tensor, stages, common.choice([None, root]))
            elif kind == 1:
                hierarchical.reduce_scatter(nodes, tensor, wide.view(-1), stages)
            elif kind == 2:
                hierarchical.all_gather(nodes, blocks(wide, 6), block(tensor))
            elif kind == 3:
                assert shared_memory.barrier(window, 30)
            else:
                hierarchical.broadcast(nodes, block(tensor), root)

    def caught(place: int) -> None:
        try:
            program(place)
        except BaseException as error:  # noqa: BLE001  shown by the assertion below
            errors.append(error)

    threads = [threading.Thread(target=caught, args=(place,)) for place in range(3)]
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(50)
    finally:
        sys.setswitchinterval(interval)
    assert not errors, errors
    assert not any(thread.is_alive() for thread in threads)

"""The queue of a group runs one operation at a time, whichever threads start them."""

import os
import threading

import pytest
import torch

from mpicoll._engine.queue import CollectiveQueue
from mpicoll._engine.work import Work


def test_a_queued_operation_waits_for_one_in_the_callers_thread() -> None:
    """MPI would mix the messages of two collectives of one group."""
    queue, begun, may_end, order = CollectiveQueue("test"), threading.Event(), threading.Event(), []

    def first() -> None:
        begun.set()
        may_end.wait(20)
        order.append("first")

    caller = threading.Thread(target=queue.run, args=(first,))
    caller.start()
    assert begun.wait(20)
    work = queue.start(lambda: order.append("second"), Work("second", [], 20))
    assert not work._finished.acquire(timeout=0.1)
    may_end.set()
    work.wait()
    caller.join()
    assert order == ["first", "second"]
    assert queue.close(20)


@pytest.mark.skipif("OpenMP" not in torch.__config__.parallel_info(), reason="this torch has no OpenMP")
def test_the_thread_of_a_queue_makes_no_pool_of_threads() -> None:
    """Beside the pool of the program's thread, a second one made each of the program's parallel kernels three times as slow."""
    threads, queue, large, found = torch.get_num_threads(), CollectiveQueue("test"), torch.ones(1 << 20), []

    def operation() -> None:
        before = len(os.listdir("/proc/self/task"))
        large.add_(large)
        found.append((torch.get_num_threads(), len(os.listdir("/proc/self/task")) - before))

    torch.set_num_threads(3)
    try:
        queue.start(operation, Work("test", [], 20)).wait()
        assert found == [(1, 0)]
        assert torch.get_num_threads() == 3
        later: list[int] = []
        other = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
        other.start()
        other.join()
        assert later == [3]
    finally:
        torch.set_num_threads(threads)
        assert queue.close(20)

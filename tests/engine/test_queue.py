"""The queue of a group runs one operation at a time, whichever threads start them."""

import threading

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

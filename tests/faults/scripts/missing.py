"""``missing.py DOOR LIMIT FORM OPERATION...``: rank 1 never comes to these operations of rank 0, whose limit is LIMIT seconds.

FORM: "blocking" makes one call; "raising" makes all of them at once: asynchronous ones, and those that raise by themselves.
Each operation has a group of its own.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

import mpicoll

DOOR, SECONDS, FORM, *OPERATIONS = sys.argv[1:]
LIMIT = timedelta(seconds=float(SECONDS))
api: Any = mpicoll if DOOR == "mpicoll" else torch.distributed
COUNT = 1 << 20  # elements: a message of this size waits for its receiver


def block(count: int = 2) -> torch.Tensor:
    return torch.zeros(count)


def calls(group: Any, **more: Any) -> dict[str, Callable[[], Any]]:
    """Calls of rank 0 that wait for rank 1. ``more``: async_op."""
    more["group"] = group
    return {
        "all_reduce": lambda: api.all_reduce(block(), **more),
        "all_reduce in shared memory": lambda: api.all_reduce(block(1 << 22), **more),
        "all_reduce_coalesced": lambda: api.all_reduce_coalesced([block(), block()], **more),
        "reduce": lambda: api.reduce(block(), 0, **more),
        "broadcast": lambda: api.broadcast(block(), 1, **more),
        "all_gather": lambda: api.all_gather([block(), block()], block(), **more),
        "all_gather_into_tensor": lambda: api.all_gather_into_tensor(block(4), block(), **more),
        "reduce_scatter": lambda: api.reduce_scatter(block(), [block(), block()], **more),
        "reduce_scatter_tensor": lambda: api.reduce_scatter_tensor(block(), block(4), **more),
        "gather": lambda: api.gather(block(), [block(), block()], 0, **more),
        "scatter": lambda: api.scatter(block(), None, 1, **more),
        "all_to_all": lambda: api.all_to_all([block(), block()], [block(), block()], **more),
        "all_to_all_single": lambda: api.all_to_all_single(block(4), block(4), **more),
        "barrier": lambda: api.barrier(**more),
        "blocking barrier": lambda: api.barrier(group),
        "monitored_barrier": lambda: mpicoll.monitored_barrier(group, LIMIT),
        "send": lambda: api.send(block(COUNT), 1, group),
        "recv": lambda: api.recv(block(), 1, group),
        "recv from anybody": lambda: api.recv(block(), group=group),
        "isend": lambda: api.isend(block(COUNT), 1, group),
        "irecv": lambda: api.irecv(block(), 1, group),
        "irecv from anybody": lambda: api.irecv(block(), group=group),
        "batch_isend_irecv": lambda: api.batch_isend_irecv([api.P2POp(api.irecv, block(), 1, group)])[0],
        "all_gather_object": lambda: api.all_gather_object([None, None], "object", group),
        "gather_object": lambda: api.gather_object("object", [None, None], 0, group),
        "broadcast_object_list": lambda: api.broadcast_object_list([None], 1, group),
        "scatter_object_list": lambda: api.scatter_object_list([None], None, 1, group),
        "send_object_list": lambda: api.send_object_list([block(COUNT)], 1, group),
        "recv_object_list": lambda: api.recv_object_list([None], 1, group),
    }


def wait(name: str, call: Callable[[], Any]) -> None:
    """Prints how the call ends, and when; the limit of a Work is that of its wait."""
    begun = time.monotonic()
    try:
        work = call()
        begun = time.monotonic()
        work.wait()
    except mpicoll.OperationTimeout as error:
        said = str(error).replace("\n", " ")
    else:
        said = "no error"
    print(f"{name} after {time.monotonic() - begun:.2f} s: {said}\n", end="", flush=True)


api.init_process_group("mpi")
groups = {name: api.new_group(timeout=LIMIT) for name in OPERATIONS}
for group in groups.values():
    api.all_reduce(block(1 << 22), group=group)  # makes the window
api.barrier()
if api.get_rank() == 1:
    time.sleep(100)
print(f"began {time.time()}", flush=True)
if FORM == "blocking":
    ((name, group),) = groups.items()
    calls(group)[name]()
    print("returned", flush=True)
    time.sleep(100)
threads = [threading.Thread(target=wait, args=(name, calls(group, async_op=True)[name])) for name, group in groups.items()]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
os._exit(9)

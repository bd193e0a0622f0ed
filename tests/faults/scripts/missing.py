"""``missing.py DOOR FORM OPERATION...``: rank 1 never comes to these operations of rank 0. Limits are 2 seconds.

FORM: "blocking" makes one call; "asynchronous" makes all of them at once. Each one has a group of its own.
"""

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

import mpicoll

DOOR, FORM = sys.argv[1:3]
LIMIT = timedelta(seconds=2)
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
        "monitored_barrier": lambda: api.monitored_barrier(group, LIMIT),
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


api.init_process_group("mpi")
groups = {name: api.new_group(timeout=LIMIT) for name in sys.argv[3:]}
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


def wait(call: Callable[[], Any]) -> str:
    try:
        call()
    except mpicoll.OperationTimeout as error:
        return str(error).replace("\n", " ")
    return "no error"


works = {name: calls(group, async_op=True)[name]() for name, group in groups.items()}
for name, work in works.items():
    begun = time.monotonic()  # the limit is that of the wait
    said = wait(work.wait)
    print(f"{name} after {time.monotonic() - begun:.2f} s: {said}", flush=True)
os._exit(9)

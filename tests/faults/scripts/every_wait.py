"""every_wait.py WAY FAULT LIMIT_S LATE_S: a rank waits by WAY for the other, which is late, ends, leaves, stops or is killed.

Rank 0 waits, and rank 1 in the store, which rank 0 keeps. It prints what came of it as JSON: "passed", or the name of the
exception and its words.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

import mpicoll
import mpicoll.rpc as rpc
from mpicoll._api import groups

way, fault, limit_s, late_s = sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4])
x, large = torch.ones(2), torch.ones(16 << 20)
if way == "rpc_sync":
    options = rpc.TensorPipeRpcBackendOptions(rpc_timeout=limit_s)
    first = int(os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", ""))))
    rpc.init_rpc(f"worker{first}", rpc_backend_options=options)
dist.init_process_group("mpi")
rank = dist.get_rank()
WINDOWS = "wait_signal", "put", "put, wait", "put, large", "get", "accumulate", "fence"
model = DistributedDataParallel(torch.nn.Linear(2, 2)) if way.startswith("ddp") else None
window = mpicoll.Window(torch.zeros(16 << 20)) if way in WINDOWS else None
store: Any = dist.distributed_c10d._get_default_store()


def start() -> Any:
    return dist.all_reduce(x, async_op=True)


def backward() -> None:
    assert model is not None
    model(torch.ones(1, 2)).sum().backward()


def without_sync() -> None:
    assert model is not None
    with model.no_sync():
        backward()
    backward()


def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future: Any = dist.all_reduce(bucket.buffer(), async_op=True).get_future()  # type: ignore[union-attr]
    return future.then(lambda done: done.value()[0] / 2)  # type: ignore[no-any-return]


def objects() -> None:
    dist.all_gather_object([None, None], rank)


def batch() -> None:
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, x.clone(), 1 - rank)]):
        work.wait()


def recv_objects() -> None:
    dist.recv_object_list([None], 1)


def access(name: str, *arguments: Any, **options: Any) -> Any:
    return getattr(window, name)(*arguments, **options)


# What rank 0 does, and rank 1 if it comes late; one entry: both do the same.
WAYS: dict[str, tuple[Callable[[], Any], ...]] = {
    "all_reduce": (lambda: dist.all_reduce(x),),
    "all_reduce of mpicoll": (lambda: mpicoll.all_reduce(x),),
    "all_reduce, large": (lambda: dist.all_reduce(large),),
    "broadcast": (lambda: dist.broadcast(x, 1),),
    "barrier": (dist.barrier,),
    "monitored_barrier": (lambda: mpicoll.monitored_barrier(wait_all_ranks=True),),
    "all_gather_object": (objects,),
    "wait": (lambda: start().wait(),),
    "future": (lambda: start().get_future().wait(),),
    "then": (lambda: start().get_future().then(lambda future: future.value()[0]).wait(),),
    "wait_all": (lambda: torch.futures.wait_all([start().get_future(), start().get_future()]),),
    "ddp": (backward,),
    "ddp, no_sync": (without_sync,),
    "ddp, hook": (backward,),
    "wait_tensor": (lambda: functional.wait_tensor(functional.all_reduce(x, "sum", dist.group.WORLD)),),  # type: ignore[attr-defined]
    "recv": (lambda: dist.recv(x, 1), lambda: dist.send(x, 0)),
    "recv of mpicoll": (lambda: mpicoll.recv(x, 1), lambda: dist.send(x, 0)),
    "recv from any": (lambda: dist.recv(x), lambda: dist.send(x, 0)),
    "recv from any of mpicoll": (lambda: mpicoll.recv(x), lambda: dist.send(x, 0)),
    "irecv": (lambda: dist.irecv(x, 1).wait(), lambda: dist.send(x, 0)),
    "irecv, then": (lambda: mpicoll.irecv(x, 1).get_future().then(lambda f: f.value()).wait(), lambda: dist.send(x, 0)),
    "send, large": (lambda: dist.send(large, 1), lambda: dist.recv(large, 0)),
    "send of mpicoll, large": (lambda: mpicoll.send(large, 1), lambda: dist.recv(large, 0)),
    "isend, large": (lambda: dist.isend(large, 1).wait(), lambda: dist.recv(large, 0)),
    "batch_isend_irecv": (batch,),
    "recv_object_list": (recv_objects, lambda: dist.send_object_list([1], 0)),
    "wait_signal": (lambda: access("wait_signal", 1), lambda: access("signal", 0)),
    "put": (lambda: access("put", x, 1), lambda: None),
    "put, wait": (lambda: access("put", x, 1, async_op=True).wait(), lambda: None),
    "put, large": (lambda: access("put", large, 1, async_op=True).wait(), lambda: None),
    "get": (lambda: access("get", x, 1), lambda: None),
    "accumulate": (lambda: access("accumulate", x, 1), lambda: None),
    "fence": (lambda: access("fence"),),
    "rpc_sync": (lambda: rpc.rpc_sync("worker1", max, args=(1, 2)), lambda: None),
    "store": (lambda: store.get("key"), lambda: store.set("key", "1")),
    "new_group": (lambda: dist.new_group(timeout=timedelta(seconds=limit_s)),),
    "destroy": (lambda: (start(), dist.destroy_process_group()),),
    "exit": (lambda: None,),
}

for _ in range(3):  # nothing is waited for the first time
    dist.all_reduce(x)
if model is not None:
    if way == "ddp, hook":
        model.register_comm_hook(None, hook)  # type: ignore[no-untyped-call]
    for _ in range(3):
        backward()
dist.barrier()
groups.of(None).set_timeout(limit_s)  # type: ignore[union-attr]
store.set_timeout(timedelta(seconds=limit_s))
if rank == (0 if way == "store" else 1):
    if fault == "late":
        time.sleep(late_s)
        WAYS[way][-1]()
    elif fault == "left":
        dist.destroy_process_group()
        time.sleep(4 * limit_s)
    elif fault == "stopped":
        subprocess.Popen(["/bin/sh", "-c", f"sleep {4 * limit_s}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit()  # also "ended"
print(f"began {time.time()}", flush=True)
if way in WINDOWS or way == "rpc_sync":  # a thread of the other rank answers at once, until that rank has ended or is stopped
    time.sleep(0.5)
began = time.time()
said: dict[str, Any] = {"came": "passed", "words": ""}
try:
    WAYS[way][0]()
except Exception as error:  # noqa: BLE001  whatever the wait raises
    said = {"came": type(error).__name__, "words": str(error).split("\n")[0]}
print(json.dumps({**said, "after_s": round(time.time() - began, 1)}), flush=True)
if way != "exit":
    os._exit(3)  # the program has seen it; how a job ends after that is another test's

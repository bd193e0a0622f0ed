"""stalled.py COLLECTIVES SEED: correct collectives, while ranks stall at random. Every rank is a node, and asks one at a time.

A rank stalls in one of three ways: a thread keeps the interpreter's lock in one call of C; the program comes late; the process is
stopped by SIGSTOP.
"""

import os
import random
import signal
import subprocess
import sys
import threading
import time

os.environ["_MPICOLL_NODE_SIZE"] = "1"

import torch

import mpicoll as dist
from mpicoll._faults import inquiries

inquiries.MOST_ASKED = 1  # stands for more than 33 ranks
collectives, seed = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
groups = [dist.group.WORLD, dist.new_group([0, size - 1]), dist.new_group(range(size))]
began = time.perf_counter()
sum(range(1_000_000))
PER_STEP_S = (time.perf_counter() - began) / 1_000_000
own = random.Random(seed * size + rank)  # differs between ranks
alike = random.Random(seed)


def keep_the_interpreter(seconds: float) -> None:
    sum(range(int(seconds / PER_STEP_S)))


def stall() -> None:
    seconds = own.uniform(0.2, 2.5)
    way = own.choice(["thread", "late", "stopped"])
    if way == "thread":
        threading.Thread(target=keep_the_interpreter, args=(seconds,), daemon=True).start()
    elif way == "late":
        time.sleep(seconds)
    else:
        with subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"]):
            os.kill(os.getpid(), signal.SIGSTOP)


for number in range(collectives):
    if own.random() < 40 / collectives:
        stall()
    group, numel = alike.choice(groups), alike.choice([1, 2, 3, 5000])
    operation = alike.choice(["all_reduce", "broadcast", "barrier", "all_gather"])
    if dist.get_rank(group) < 0:
        continue
    members, x = dist.get_world_size(group), torch.ones(numel)
    if operation == "all_reduce":
        dist.all_reduce(x, group=group)
        right = bool((x == members).all())
    elif operation == "broadcast":
        dist.broadcast(x * rank, 0, group=group)
        right = True
    elif operation == "all_gather":
        gathered = [torch.zeros(numel) for _ in range(members)]
        dist.all_gather(gathered, x, group=group)
        right = all(bool((part == 1).all()) for part in gathered)
    else:
        dist.barrier(group=group)
        right = True
    assert right, (number, operation)
dist.destroy_process_group()
print(f"rank {rank}: {collectives} collectives")

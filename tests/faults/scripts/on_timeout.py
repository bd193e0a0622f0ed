"""A rank is late, and the others do not end with MPICOLL_ON_TIMEOUT=raise: ``on_timeout.py mpicoll|torch [options]``.

With ``options`` only the groups to which a rank is late have this setting.
"""

import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed

import mpicoll

LIMIT = timedelta(seconds=1)
OWN = {"MPICOLL_ON_TIMEOUT": "raise"} if sys.argv[2:] else None
dist = mpicoll if sys.argv[1] == "mpicoll" else torch.distributed
mpicoll.init_process_group(timeout=timedelta(seconds=60))
rank, size = dist.get_rank(), dist.get_world_size()
others = torch.distributed.new_group(list(range(1, size)))


def say(text: object) -> None:
    print(f"rank {rank}: {text}", flush=True)


def late(name: str, operation: Callable[[torch.distributed.ProcessGroup], object]) -> None:
    """Rank 0 does not come to it in time."""
    group = torch.distributed.new_group(list(range(size)), timeout=LIMIT, pg_options=OWN)
    mpicoll.barrier()
    if rank != 0:
        began = time.monotonic()
        try:
            operation(group)
            say(f"{name} has ended")
        except mpicoll.OperationTimeout as error:
            say(f"{name} raised after {time.monotonic() - began:.1f} s: {error}")
        try:
            mpicoll.all_reduce(torch.ones(1), group=group)
            say("the group can be used")
        except mpicoll.GroupFailed:
            pass
        tensor = torch.ones(2)
        dist.all_reduce(tensor, group=others)  # another group goes on
        assert tensor.tolist() == [size - 1.0] * 2
    mpicoll.barrier()


x = torch.ones(1000)
late("all_reduce", lambda group: dist.all_reduce(x, group=group))
late("all_gather_into_tensor", lambda group: dist.all_gather_into_tensor(torch.ones(size * 1000), x, group=group))
late("broadcast", lambda group: dist.broadcast(x, src=0, group=group))
late("barrier", lambda group: dist.barrier(group))
late("recv", lambda group: dist.recv(x, src=0, group=group))
late("send", lambda group: dist.send(torch.ones(1 << 20), dst=0, group=group))
total = torch.full((3,), rank + 1.0)
mpicoll.all_reduce(total)
assert total.tolist() == [size * (size + 1) / 2] * 3
if rank == 0:
    time.sleep(0.5)
say("end")

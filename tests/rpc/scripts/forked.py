"""On 2 ranks: a process that a worker forks ends as Python programs do, after it has tried to call another worker."""

import os
import sys

import mpicoll as dist
from mpicoll import rpc

dist.init_process_group()
rank = dist.get_rank()
rpc.init_rpc(f"worker{rank}")
if rank == 1:
    if (pid := os.fork()) == 0:
        try:
            rpc.rpc_sync("worker0", abs, (-1,))
        except dist.ForkedProcess:
            sys.exit(7)
    print("child:", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
dist.barrier()
print(f"worker{rank}:", rpc.rpc_sync(f"worker{1 - rank}", abs, (-3,)), flush=True)
rpc.shutdown()

"""A communication hook for DDP, which wants real classes as annotations."""

from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed import ProcessGroup, ReduceOp
from torch.futures import Future

from mpicoll._c10d import torch_world


def shared_memory_hook(group: ProcessGroup | None, bucket: GradBucket) -> Future[Tensor]:
    """Averages the gradients of DDP in memory that all ranks share, without a copy in and out (collective).

    For models on the CPU and groups on one node; otherwise it averages as DDP does without a hook. A bucket of gradients moves
    into a file in /dev/shm when it comes for the second time. It stays where it is if /dev/shm has no room, or if the ranks
    cannot map each other's memory. A NumPy array that shares memory with a gradient must not be used after the move.

    Args:
        group: DDP's group. None means the default group.
        bucket: From DDP.

    Returns:
        A future of the averages.

    Example:
        >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
        >>> model.register_comm_hook(None, dist.shared_memory_hook)
        >>> model(torch.ones(3, 4)).sum().backward()
    """
    tensor = bucket.buffer()
    torch_world.communicator("shared_memory_hook", group).keep_shared(tensor)
    work: Any = torch.distributed.all_reduce(tensor, ReduceOp.AVG, group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])  # type: ignore[no-any-return]

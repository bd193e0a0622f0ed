"""Each kind of operation once, in any group of any backend, with what it must give."""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol


def total(group: Any = None, value: float = 1.0) -> float:
    tensor = torch.tensor([value])
    dist.all_reduce(tensor, group=group)
    return float(tensor)


def exercise(group: Any, rank: int, size: int) -> list[str]:
    """Each kind of collective once; what came out wrong."""
    wrong = []
    value = torch.tensor([rank + 1.0])
    if total(group, rank + 1.0) != size * (size + 1) / 2:
        wrong.append("all_reduce")
    parts = [torch.zeros(1) for _ in range(size)]
    dist.all_gather(parts, value, group=group)
    wrong += [] if [int(part) for part in parts] == list(range(1, size + 1)) else ["all_gather"]
    told = value.clone()
    dist.broadcast(told, group_src=size - 1, group=group)
    wrong += [] if told.item() == size else ["broadcast"]
    part = torch.zeros(1)
    dist.scatter(part, [torch.tensor([10.0 * r]) for r in range(size)] if rank == 0 else None, group_src=0, group=group)
    wrong += [] if part.item() == 10 * rank else ["scatter"]
    swapped = torch.zeros(size)
    dist.all_to_all_single(swapped, torch.arange(float(size)) + 100 * rank, group=group)
    wrong += [] if swapped.tolist() == [100.0 * r + rank for r in range(size)] else ["all_to_all_single"]
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "more": "x" * rank}, group=group)
    wrong += [] if [o["rank"] for o in objects] == list(range(size)) else ["all_gather_object"]
    gathered = funcol.all_gather_tensor(value, 0, group)
    wrong += [] if gathered.tolist() == [r + 1.0 for r in range(size)] else ["functional all_gather"]
    if size > 1:
        got = torch.zeros(3)
        to, source = (rank + 1) % size, (rank - 1) % size
        operations = [
            dist.P2POp(dist.isend, torch.full((3,), float(rank)), group=group, group_peer=to),
            dist.P2POp(dist.irecv, got, group=group, group_peer=source),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        wrong += [] if got.tolist() == [float(source)] * 3 else ["batch_isend_irecv"]
    dist.barrier(group=group)
    return wrong

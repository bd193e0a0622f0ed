"""python shrinking.py DOOR on 3 ranks that all live: ranks 0 and 1 leave rank 2 out, first of a group, then of the world."""

import sys

import torch

import mpicoll as dist

if sys.argv[1] == "torch":
    import torch.distributed as dist  # type: ignore[no-redef]

dist.init_process_group("mpi")
rank = dist.get_rank()
group = dist.new_group([0, 1, 2])
for wrong in (2, [], [3], [2, 2], [0, 1, 2]):
    try:
        dist.shrink_group(wrong, group)
        print(f"{wrong} is not refused")
    except (TypeError, ValueError) as error:
        if "ranks_to_exclude must" not in str(error):
            raise
dist.barrier()
if rank < 2:
    group = dist.shrink_group([2], group)
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    dist.all_reduce(total)
    assert dist.get_world_size() == 3
    world = dist.shrink_group([2], shrink_flags=1)
    dist.all_reduce(total)
    print(f"{total.item():g} of {dist.get_world_size()}, {world is dist.group.WORLD}\n", end="", flush=True)
else:
    dist.all_reduce(torch.ones(1))

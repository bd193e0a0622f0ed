# python -m mpicoll.run -n 4 examples/basics/groups.py
"""Two groups of ranks, each with a sum of its own.

All ranks make all groups, in the same order. Afterwards only the members of a group use it.
"""

import torch

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()

even = dist.new_group([0, 2])
odd = dist.new_group([1, 3])
name, group = ("even", even) if rank % 2 == 0 else ("odd", odd)

total = torch.tensor([rank])
dist.all_reduce(total, group=group)
print(f"rank {rank}: sum of the {name} ranks is {total.item()}")

dist.destroy_process_group()  # ends all groups

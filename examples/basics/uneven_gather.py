# python -m mpicoll.run -n 4 examples/basics/uneven_gather.py
"""Gathers tensors of a different length from each rank.

The tensors in the list must have the lengths of the other ranks' tensors. Where they are not known, an all_gather of the lengths
comes first.
"""

import torch

import mpicoll as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()

own = torch.full((rank + 1,), rank)
lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
dist.all_gather(lengths, torch.tensor([len(own)]))

places = [torch.zeros(int(length), dtype=torch.int64) for length in lengths]
dist.all_gather(places, own)

if rank == 0:
    print("lengths", torch.cat(lengths).tolist())
    for r in range(size):
        print(f"rank {r}: {places[r].tolist()}")

dist.destroy_process_group()

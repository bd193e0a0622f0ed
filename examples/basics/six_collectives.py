# python -m mpicoll.run -n 4 examples/basics/six_collectives.py
"""Six collectives. All ranks call each of them, in the same order."""

import torch

import mpicoll as dist

dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
own = torch.tensor([rank])
x, xs = torch.zeros_like(own), [torch.zeros_like(own) for _ in range(size)]
say = print if rank == 0 else lambda *words: None

dist.broadcast(x.copy_(own), src=3)  # all ranks get the tensor of rank 3
say("broadcast from rank 3:", x.tolist())
dist.scatter(x, [own + 7 + r for r in range(size)] if rank == 3 else None, src=3)  # each rank gets one tensor of the list
say("scatter from rank 3:", x.tolist())
dist.gather(own, xs if rank == 0 else None, dst=0)  # rank 0 gets the tensors of all ranks
say("gather to rank 0:", torch.cat(xs).tolist())
dist.all_gather(xs, own)  # all ranks get the tensors of all ranks
say("all_gather:", torch.cat(xs).tolist())
dist.reduce(x.copy_(own), dst=0)  # rank 0 gets the sum
say("reduce to rank 0:", x.tolist())
dist.all_reduce(x.copy_(own))  # all ranks get the sum
say("all_reduce:", x.tolist())

dist.destroy_process_group()

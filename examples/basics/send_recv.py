# python -m mpicoll.run -n 2 examples/basics/send_recv.py
"""Rank 0 sends a tensor to rank 1, which sends it back doubled.

The receiver needs a tensor of the right shape and dtype. The message overwrites it.
"""

import torch

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()

if rank == 0:
    tensor = torch.tensor([1.0, 2.0, 3.0])
    dist.send(tensor, dst=1)
    dist.recv(tensor, src=1)
    print(f"rank 0 received {tensor.tolist()}")
elif rank == 1:
    tensor = torch.zeros(3)
    dist.recv(tensor, src=0)
    print(f"rank 1 received {tensor.tolist()}")
    dist.send(tensor * 2, dst=0)

dist.destroy_process_group()

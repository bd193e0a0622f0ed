# python -m mpicoll.run -n 2 examples/basics/cuda_all_reduce.py
"""The sum of tensors on GPUs; on the CPU where there is no GPU.

The ranks of a node take its GPUs in turn. All ranks must have their tensors on the same kind of device.
"""

import torch

import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()

device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", dist.get_node_local_rank() % torch.cuda.device_count())
    torch.cuda.set_device(device)

x = torch.full((2,), rank + 1.0, device=device)
dist.all_reduce(x)
print(f"rank {rank}: {x.tolist()} on {x.device}")

dist.destroy_process_group()

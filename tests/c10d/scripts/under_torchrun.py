"""What a user meets who starts an mpi program by torchrun."""

import torch.distributed as dist

try:
    dist.init_process_group("mpi")
except RuntimeError as error:
    print(f"{type(error).__name__}: {error}", flush=True)

"""A training script for Hugging Face Accelerate that knows nothing of MPI. Each process prints one line of JSON.

python accelerate_train.py               one process, by whatever launcher
python accelerate_train.py --debug       two processes of debug_launcher before that
"""

import json
import os
import sys

import torch
from accelerate import Accelerator, debug_launcher
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader, TensorDataset


def train(name: str) -> None:
    """Three steps over batches that the processes share, so that any number of them has the same losses."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True))
    torch.manual_seed(0)
    inputs, model = torch.randn(24, 4), torch.nn.Linear(4, 1)
    data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8)
    model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), data)
    losses = []
    for x, y in data:
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
    rank = accelerator.process_index
    distributed = torch.distributed.is_initialized()
    report = {
        "name": name,
        "rank": rank,
        "size": accelerator.num_processes,
        "backend": torch.distributed.get_backend() if distributed else None,
        "available": torch.distributed.is_mpi_available(),
        "mpicoll": "mpicoll" in sys.modules,
        "gathered": accelerator.gather(torch.tensor([rank])).tolist(),
        "reduced": accelerator.reduce(torch.tensor([rank + 1.0]), "sum").tolist(),
        "losses": losses,
    }
    sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.flush()
    if distributed:
        torch.distributed.destroy_process_group()
        if "mpicoll" not in sys.modules:
            os._exit(0)  # see WITHOUT in test_accelerate.py


if __name__ == "__main__":
    if "--debug" in sys.argv:
        debug_launcher(train, ("debug_launcher",), num_processes=2)
    train("script")

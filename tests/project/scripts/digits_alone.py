"""Runs digits_*.py on all ranks, then trains on rank 0 alone, on whole batches: the losses of all steps are the same.

The arguments are names of examples.
"""

import sys
from types import ModuleType

import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import mpicoll as dist
from tests.project.scripts.example import imported
from tests.project.scripts.proofs import losses_alone, same

SAMPLED = "digits_torch_ddp"  # torch's sampler orders its batches


def together(name: str, example: ModuleType) -> torch.Tensor:
    torch.manual_seed(dist.get_rank())
    if name == "digits_by_hand":
        return torch.tensor(example.train(*example.load())[1])
    data = example.load()[:1] if name == SAMPLED else example.load()
    return example.train(DistributedDataParallel(example.network()), *data)


def alone(name: str, example: ModuleType) -> torch.Tensor:
    if name == SAMPLED:
        images, labels = example.load()[0].tensors
        batches = [part for epoch in range(example.EPOCHS) for part in order(epoch, len(labels)).split(example.BATCH)]
    else:
        images, labels = example.load()
        batches = example.batches()
    torch.manual_seed(0)
    model = example.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return losses_alone(model, cross_entropy, optimizer, [(images[batch], labels[batch]) for batch in batches])


def order(epoch: int, count: int) -> torch.Tensor:
    """DistributedSampler's order: its seed and the number of the epoch seed the generator."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(1 + epoch))


def main(names: list[str]) -> None:
    torch.set_default_dtype(torch.float64)
    dist.init_process_group()
    for name in names:
        example = imported(name)
        curve = together(name, example)
        if dist.get_rank() == 0:
            same(curve, alone(name, example))
            print(f"{name}: {len(curve)} losses as in one process")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])

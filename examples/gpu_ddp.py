# python -m mpicoll.run -n 2 examples/gpu_ddp.py
"""Data-parallel training on GPUs: torch's DistributedDataParallel over backend "mpi", on handwritten digits.

Each rank takes the GPU of its number on its node, which mpirun or srun tells it and `LOCAL_RANK` holds; ranks that outnumber
the GPUs share them (which NCCL refuses), and where there is no GPU all are on the CPU. The rest is the program of one GPU: the
network and the images are moved there once, and DDP and `all_reduce` take tensors where they are.

Any number of ranks. A test compares the weights after the last step: they are the same on all ranks, to the bit.
Needs `pip install scikit-learn` (the 1797 images come with it).
"""

import statistics
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import mpicoll as dist

EPOCHS, BATCH, TRAINING_IMAGES = 8, 120, 1440  # the other 357 images are the test


def own_device() -> torch.device:
    """This rank's GPU, made the current one; the CPU where torch sees no GPU."""
    if not torch.cuda.is_available():
        if dist.get_rank() == 0:
            print("no GPU here: on the CPU")
        return torch.device("cpu")
    device = torch.device("cuda", dist.get_node_local_rank(0) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def load(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (1797, 1, 8, 8) float32 in 0..1 and labels (1797,) int64, shuffled alike on every rank."""
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images = torch.from_numpy(pixels).view(-1, 1, 8, 8)[order].float() / 16
    return images.to(device), torch.from_numpy(labels)[order].to(device)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )  # fmt: skip


def train(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> tuple[list[float], list[float]]:
    """Trains ``model`` on this rank's share of every batch; that share's part of each batch's loss, and seconds per step."""
    rank, size = dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    random = torch.Generator().manual_seed(1)  # the same batches on every rank
    parts, seconds = [], []
    for batch in (batch for _ in range(EPOCHS) for batch in torch.randperm(TRAINING_IMAGES, generator=random).split(BATCH)):
        start = time.perf_counter()
        share = batch[rank::size].to(images.device)
        # Sum over the share, divided by the size of the *whole* batch: the parts add up to the mean over the batch,
        # whether or not the shares are of one size. DDP divides the sum of gradients by `size`: multiply by it first.
        part = cross_entropy(model(images[share]), labels[share], reduction="sum") / len(batch)
        optimizer.zero_grad()
        (part * size).backward()
        optimizer.step()
        parts.append(part.item())  # waits until the GPU has done the step
        seconds.append(time.perf_counter() - start)
    return parts, seconds


def test_accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """The share of test images that is recognised; the ranks count different images (collective)."""
    mine = slice(TRAINING_IMAGES + dist.get_rank(), None, dist.get_world_size())
    with torch.no_grad():
        hits = (model(images[mine]).argmax(dim=1) == labels[mine]).sum()
    dist.all_reduce(hits)
    return hits.item() / (len(labels) - TRAINING_IMAGES)


def main() -> None:
    dist.init_process_group()  # device_id is not needed
    device = own_device()
    images, labels = load(device)

    torch.manual_seed(dist.get_rank())  # other weights on every rank: DDP starts from those of rank 0
    model = DistributedDataParallel(network().to(device))
    parts, seconds = train(model, images, labels)
    curve = torch.tensor(parts, device=device)
    dist.all_reduce(curve)  # the loss of every whole batch
    accuracy = test_accuracy(model.module, images, labels)

    if dist.get_rank() == 0:
        where = f"{device}, {torch.cuda.get_device_name(device)}" if device.type == "cuda" else "the CPU"
        milliseconds = 1000 * statistics.median(seconds)
        print(f"loss {curve[0]:.3f} -> {curve[-1]:.3f} in {len(curve)} steps of {milliseconds:.1f} ms; rank 0 on {where}")
        print(f"gpu_ddp: test accuracy {accuracy:.1%} with {dist.get_world_size()} rank(s)")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

# python -m mpicoll.run -n 2 examples/digits_torch_ddp.py
"""A plain torch script: DistributedDataParallel with the "mpi" backend, on handwritten digits.

Nothing below is special: it is written for a torch that was built from source with MPI, and reads RANK and WORLD_SIZE
from the environment as scripts for torchrun do. Both work on a stock torch when it is installed beside this project.
The number of ranks must divide the batch (120). At the end rank 0 trains alone on whole batches and compares.
Needs `pip install scikit-learn tqdm` (the 1797 images come with scikit-learn), and matplotlib for `--plot curve.png`.
"""

import argparse
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from tqdm import tqdm

EPOCHS, BATCH, TRAINING_IMAGES = 8, 120, 1440  # the other 357 images are the test
# float64 on purpose: shares are added in another order than the whole batch, which changes a gradient by about 1e-16 of
# itself; over 96 steps that stays far below 1e-9, while any mistake in the averaging shows in the first digits.
TOLERANCE = 1e-9


def load() -> tuple[TensorDataset, TensorDataset]:
    """Training and test set: images (n, 1, 8, 8) float64 in 0..1, labels (n,) int64."""
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images, labels = torch.from_numpy(digits.images)[order].unsqueeze(1) / 16, torch.from_numpy(digits.target)[order]
    n = TRAINING_IMAGES
    return TensorDataset(images[:n], labels[:n]), TensorDataset(images[n:], labels[n:])


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    ).double()  # fmt: skip


def train(model: nn.Module, dataset: TensorDataset, rank: int, size: int) -> list[torch.Tensor]:
    """Trains ``model`` on the share of ``rank``; the mean loss of that share at every step."""
    sampler = DistributedSampler(dataset, num_replicas=size, rank=rank, seed=1)
    loader = DataLoader(dataset, batch_size=BATCH // size, sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for epoch in tqdm(range(EPOCHS), desc=f"{size} rank(s)", unit="epoch", disable=rank != 0):
        sampler.set_epoch(epoch)  # the same new order on every rank
        for images, labels in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return losses


def accuracy_of(model: nn.Module, dataset: TensorDataset) -> float:
    images, labels = dataset.tensors
    with torch.no_grad():
        return (model(images).argmax(dim=1) == labels).double().mean().item()


def plot(path: str, curve: torch.Tensor, alone: torch.Tensor, size: int) -> None:
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(8, 5), layout="constrained")).subplots()
    axes.semilogy(curve.numpy(), linewidth=4, alpha=0.4, label=f"{size} rank(s), DDP")
    axes.semilogy(alone.numpy(), linewidth=1, color="black", label="1 process")
    axes.set(title="Handwritten digits, DDP over MPI", xlabel="step", ylabel="loss of the whole batch")
    axes.legend()
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description="DistributedDataParallel over MPI")
    parser.add_argument("--plot", metavar="PNG", help="write the learning curve here")
    arguments = parser.parse_args()

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("mpi")
    assert (rank, size) == (dist.get_rank(), dist.get_world_size())
    if BATCH % size:
        raise SystemExit(f"digits_torch_ddp.py: {size} ranks do not divide a batch of {BATCH}" if rank == 0 else 1)
    training, test = load()

    torch.manual_seed(rank)  # other weights on every rank: DDP starts from those of rank 0
    model = DistributedDataParallel(network())
    losses = torch.stack(train(model, training, rank, size))
    dist.all_reduce(losses)  # shares are of one size, so the mean of their means is the mean of the batch
    curve = losses / size

    accuracy = accuracy_of(model.module, test)
    assert accuracy >= 0.95, f"rank {rank}: test accuracy {accuracy:.1%} is below 95 %"
    if rank == 0:
        torch.manual_seed(0)
        alone = torch.stack(train(network(), training, rank=0, size=1))
        difference = (curve - alone).abs().max().item()
        assert difference <= TOLERANCE, f"the loss curves differ by {difference:.1e}"
        if arguments.plot:
            plot(arguments.plot, curve, alone, size)
        print(f"loss {curve[0]:.3f} -> {curve[-1]:.3f} in {len(curve)} steps; one process: same to {difference:.0e}")
        print(f"digits_torch_ddp: test accuracy {accuracy:.1%} with {size} rank(s)")
    dist.barrier()  # the others wait for rank 0
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

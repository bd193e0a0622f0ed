# python -m mpicoll.run -n 2 examples/digits_torch_ddp.py
"""A plain torch script: DistributedDataParallel with the "mpi" backend, on handwritten digits.

Nothing below is special: it is written for a torch that was built from source with MPI, and reads RANK and WORLD_SIZE
from the environment as scripts for torchrun do. Both work on a stock torch when it is installed beside this project.
The number of ranks must divide the batch (120).
A test runs it in float64 and in one process: the losses of all steps differ by at most 1e-9.
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


def load() -> tuple[TensorDataset, TensorDataset]:
    """Training and test set: images (n, 1, 8, 8) in 0..1, labels (n,)."""
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(pixels, dtype=torch.get_default_dtype()).view(-1, 1, 8, 8)[order] / 16
    labels = torch.from_numpy(labels)[order]
    n = TRAINING_IMAGES
    return TensorDataset(images[:n], labels[:n]), TensorDataset(images[n:], labels[n:])


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )  # fmt: skip


def train(model: nn.Module, dataset: TensorDataset) -> torch.Tensor:
    """Trains ``model`` on this rank's share of every batch, and returns the losses of whole batches, (steps,)."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sampler = DistributedSampler(dataset, seed=1)
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
    curve = torch.stack(losses)
    dist.all_reduce(curve)  # shares are of one size, so the mean of their means is the mean of the batch
    return curve / size


def accuracy_of(model: nn.Module, dataset: TensorDataset) -> float:
    images, labels = dataset.tensors
    with torch.no_grad():
        return (model(images).argmax(dim=1) == labels).double().mean().item()


def plot(path: str, curve: torch.Tensor) -> None:
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(8, 5), layout="constrained")).subplots()
    axes.semilogy(curve.numpy())
    axes.set(title="Handwritten digits, DDP over MPI", xlabel="step", ylabel="loss of the whole batch")
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
    curve = train(model, training)
    accuracy = accuracy_of(model.module, test)
    if rank == 0:
        if arguments.plot:
            plot(arguments.plot, curve)
        print(f"loss {curve[0]:.3f} -> {curve[-1]:.3f} in {len(curve)} steps")
        print(f"digits_torch_ddp: test accuracy {accuracy:.1%} with {size} rank(s)")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

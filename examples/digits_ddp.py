# python -m mpicoll.run -n 2 examples/digits_ddp.py
"""Data-parallel training with DistributedDataParallel, on handwritten digits.

torch's own DDP works with `mpicoll` because both share the process groups: `dist.init_process_group()` is all it needs.
DDP broadcasts the weights of rank 0 at the start, and averages the gradients over the ranks while backward still runs.

Any number of ranks. A test runs it in float64 and in one process: the losses of all steps differ by at most 1e-9.
Needs `pip install scikit-learn tqdm` (the 1797 images come with scikit-learn), and matplotlib for `--plot curve.png`.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

import mpicoll as dist

EPOCHS, BATCH, TRAINING_IMAGES = 8, 120, 1440  # the other 357 images are the test


def load() -> tuple[torch.Tensor, torch.Tensor]:
    """Images (1797, 1, 8, 8) in 0..1 and labels (1797,), shuffled alike on every rank."""
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(pixels, dtype=torch.get_default_dtype()).view(-1, 1, 8, 8)
    return images[order] / 16, torch.from_numpy(labels)[order]


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )  # fmt: skip


def batches() -> list[torch.Tensor]:
    """The indices of every batch of the whole training, the same list on every rank."""
    random = torch.Generator().manual_seed(1)
    return [batch for _ in range(EPOCHS) for batch in torch.randperm(TRAINING_IMAGES, generator=random).split(BATCH)]


def train(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Trains ``model`` on this rank's share of every batch, and returns the losses of whole batches, (steps,) (collective)."""
    rank, size = dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    parts = []
    for batch in tqdm(batches(), desc=f"{size} rank(s)", disable=rank != 0):
        share = batch[rank::size]
        # Sum over the share, divided by the size of the *whole* batch: the parts add up to the mean over the batch,
        # whether or not the shares are of one size. DDP divides the sum of gradients by `size`: multiply by it first.
        part = cross_entropy(model(images[share]), labels[share], reduction="sum") / len(batch)
        optimizer.zero_grad()
        (part * size).backward()
        optimizer.step()
        parts.append(part.detach())
    curve = torch.stack(parts)
    dist.all_reduce(curve)
    return curve


def test_accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """The share of test images that is recognised; the ranks count different images (collective)."""
    share = slice(TRAINING_IMAGES + dist.get_rank(), None, dist.get_world_size())
    with torch.no_grad():
        hits = (model(images[share]).argmax(dim=1) == labels[share]).sum()
    dist.all_reduce(hits)
    return hits.item() / (len(labels) - TRAINING_IMAGES)


def plot(path: str, curve: torch.Tensor) -> None:
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(8, 5), layout="constrained")).subplots()
    axes.semilogy(curve.numpy())
    axes.set(title="Handwritten digits, DistributedDataParallel", xlabel="step", ylabel="loss of the whole batch")
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description="Data-parallel training with DistributedDataParallel")
    parser.add_argument("--plot", metavar="PNG", help="write the learning curve here")
    arguments = parser.parse_args()

    dist.init_process_group()
    images, labels = load()
    torch.manual_seed(dist.get_rank())  # other weights on every rank: DDP starts from those of rank 0
    model = DistributedDataParallel(network())
    curve = train(model, images, labels)
    accuracy = test_accuracy(model.module, images, labels)
    if dist.get_rank() == 0:
        if arguments.plot:
            plot(arguments.plot, curve)
        print(f"loss {curve[0]:.3f} -> {curve[-1]:.3f} in {len(curve)} steps")
        print(f"digits_ddp: test accuracy {accuracy:.1%} with {dist.get_world_size()} rank(s)")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

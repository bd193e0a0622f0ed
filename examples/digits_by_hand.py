# python -m mpicoll.run -n 2 examples/digits_by_hand.py
"""Data-parallel training by hand: handwritten digits, one copy of the network per rank.

    [1] broadcast the weights                 every copy starts equal
    [2] each rank takes its share of a batch  forward and backward as in any training loop
    [3] all_reduce the gradients              every copy now holds the gradient of the whole batch
    [4] step                                  every copy makes the same step, so they stay equal

Any number of ranks. A test runs it in float64 and in one process: the losses of all steps differ by at most 1e-9.
Needs `pip install scikit-learn tqdm` (the 1797 images come with scikit-learn), and matplotlib for `--plot curve.png`.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
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


def train(images: torch.Tensor, labels: torch.Tensor) -> tuple[nn.Module, list[float]]:
    """The trained network and the loss of every whole batch (collective)."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # each rank draws other weights ...
    model = network()
    for parameter in model.parameters():
        dist.broadcast(parameter.detach(), src=0)  # [1] ... and all continue with those of rank 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    curve = []
    for batch in tqdm(batches(), desc=f"{size} rank(s)", disable=rank != 0):
        share = batch[rank::size]  # [2]
        # Sum over the share, divided by the size of the *whole* batch: the sum over the ranks is then the mean over the
        # batch, also where the shares are not all of one size.
        loss = cross_entropy(model(images[share]), labels[share], reduction="sum") / len(batch)
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            assert parameter.grad is not None  # all parameters take part in the loss
            dist.all_reduce(parameter.grad)  # [3]
        optimizer.step()  # [4]
        whole = loss.detach()
        dist.all_reduce(whole)
        curve.append(whole.item())
    return model, curve


def test_accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """The share of test images that is recognised; the ranks count different images (collective)."""
    share = slice(TRAINING_IMAGES + dist.get_rank(), None, dist.get_world_size())
    with torch.no_grad():
        hits = (model(images[share]).argmax(dim=1) == labels[share]).sum()
    dist.all_reduce(hits)
    return hits.item() / (len(labels) - TRAINING_IMAGES)


def plot(path: str, curve: list[float]) -> None:
    from matplotlib.figure import Figure

    axes = (figure := Figure(figsize=(8, 5), layout="constrained")).subplots()
    axes.semilogy(curve)
    axes.set(title="Handwritten digits, gradients averaged by hand", xlabel="step", ylabel="loss of the whole batch")
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description="Data-parallel training by hand")
    parser.add_argument("--plot", metavar="PNG", help="write the learning curve here")
    arguments = parser.parse_args()

    dist.init_process_group()
    images, labels = load()
    model, curve = train(images, labels)
    accuracy = test_accuracy(model, images, labels)
    if dist.get_rank() == 0:
        if arguments.plot:
            plot(arguments.plot, curve)
        print(f"loss {curve[0]:.3f} -> {curve[-1]:.3f} in {len(curve)} steps")
        print(f"digits_by_hand: test accuracy {accuracy:.1%} with {dist.get_world_size()} rank(s)")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

# python -m mpicoll.run -n 1 examples/rpc_pipeline/master.py : -n 1 examples/rpc_pipeline/worker.py
"""ResNet50 as a pipeline of two shards in two programs, by remote calls: the master drives, the worker serves.

    master.py   images -> shard 0 --activations-->  worker.py   shard 1 -> scores -> master: loss
                                  <--gradients----

A batch is cut into micro-batches, so that shard 0 computes one while shard 1 computes the one before. On two machines:
`--hostfile hosts` after mpicoll.run, with `first slots=1` and `second slots=1` in the file. Layers: resnet.py.

Trains on handwritten digits (they come with scikit-learn) with 1, 2 and 4 micro-batches, and each time compares the
gradients of the first batch with those of one process. Small micro-batches are slow in themselves, each reads all
weights: with the default 16 images cutting costs more than it gains, with `--batch 64` it pays.

Batch norm takes mean and variance over a micro-batch, not over the batch: the number of micro-batches changes the function
that is trained, and its gradients, by as much as is printed. Therefore the one process cuts its batch alike. The running
statistics (for evaluation only) see more and noisier updates, in the order in which micro-batches come; they are not compared.
"""

import argparse
import time

import torch
from resnet import Shard, layers
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy, interpolate

import mpicoll.autograd as dist_autograd
from mpicoll import rpc
from mpicoll.optim import DistributedOptimizer
from mpicoll.rpc import RRef

HOMES = ("master", "worker")  # of the shards
EPOCHS = 3
TOLERANCE = 1e-4  # of a gradient's largest element; float32, summed over micro-batches in whatever order they end in


def batches(options: argparse.Namespace) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Images (batch, 3, pixels, pixels) in 0..1 and labels (batch,)."""
    digits = load_digits()
    grey = torch.from_numpy(digits.images).float()[: options.batches * options.batch, None] / 16
    images = interpolate(grey, size=options.pixels, mode="bilinear").expand(-1, 3, -1, -1)
    labels = torch.from_numpy(digits.target)[: len(images)]
    return list(zip(images.split(options.batch), labels.split(options.batch), strict=True))


class Pipeline:
    """Two shards, each where it lives; to be used within a `dist_autograd.context()`."""

    def __init__(self, width: int, micro_batches: int) -> None:
        self.shards = [rpc.remote(home, Shard, (index, width)) for index, home in enumerate(HOMES)]
        self.micro_batches = micro_batches

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """The scores (n, CLASSES) of images (n, 3, h, w)."""
        scores = []
        for piece in images.chunk(self.micro_batches):
            activations = self.shards[0].remote().forward(RRef(piece))  # an RRef, at once: the activations do not come here
            scores.append(self.shards[1].rpc_async().forward(activations))
        return torch.cat(torch.futures.wait_all(scores))

    def parameter_rrefs(self) -> list[RRef[torch.Tensor]]:
        return [rref for shard in self.shards for rref in shard.rpc_sync().parameter_rrefs()]

    def gradients(self, context_id: int) -> list[torch.Tensor]:
        return [gradient for shard in self.shards for gradient in shard.rpc_sync().gradients(context_id)]

    def weights(self) -> list[list[torch.Tensor]]:
        """Copies, by shard."""
        return [shard.rpc_sync().weights() for shard in self.shards]


def gradients_of_one_process(
    width: int, weights: list[list[torch.Tensor]], images: torch.Tensor, labels: torch.Tensor, micro_batches: int
) -> list[torch.Tensor]:
    """The same network with the same weights, here alone, without RPC."""
    model = nn.Sequential(layers(0, width), layers(1, width))
    for parameter, weight in zip(model.parameters(), weights[0] + weights[1], strict=True):
        parameter.data.copy_(weight)
    scores = torch.cat([model(piece) for piece in images.chunk(micro_batches)])
    return list(torch.autograd.grad(cross_entropy(scores, labels), list(model.parameters())))


def largest_difference(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Over all gradients: the largest difference, relative to the gradient's own largest element."""
    pairs = zip(found, expected, strict=True)
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def train(options: argparse.Namespace, micro_batches: int) -> None:
    """Trains a fresh network, checks it, and prints one line."""
    pipeline, data = Pipeline(options.width, micro_batches), batches(options)
    before = pipeline.weights()
    expected = gradients_of_one_process(options.width, before, *data[0], micro_batches)
    uncut = gradients_of_one_process(options.width, before, *data[0], 1)
    # Gradients are kept in the context: an optimizer of one's own on the worker would find every .grad None.
    optimizer = DistributedOptimizer(torch.optim.Adam, pipeline.parameter_rrefs(), lr=1e-3)

    losses: list[float] = []
    difference = start = 0.0
    for epoch in range(EPOCHS):
        if epoch == 1:  # the first warms up, and checks
            start = time.perf_counter()
        for images, labels in data:
            with dist_autograd.context() as context_id:
                loss = cross_entropy(pipeline(images), labels)
                dist_autograd.backward(context_id, [loss])
                if not losses:
                    difference = largest_difference(pipeline.gradients(context_id), expected)
                optimizer.step(context_id)
            losses.append(loss.item())
    speed = (EPOCHS - 1) * len(data) * options.batch / (time.perf_counter() - start)

    first, last = sum(losses[: len(data)]) / len(data), sum(losses[-len(data) :]) / len(data)
    assert difference <= TOLERANCE, f"gradients differ by {difference:.1e} from one process"
    assert last < first, f"the loss does not fall: {losses}"
    for index, (old, new) in enumerate(zip(before, pipeline.weights(), strict=True)):
        assert not any(torch.equal(a, b) for a, b in zip(old, new, strict=True)), f"shard {index} has weights that stay"
    flat, flat_uncut = (torch.cat([g.flatten() for g in gradients]) for gradients in (expected, uncut))
    print(
        f"{micro_batches} micro-batch(es): {speed:5.1f} images/s, loss {first:.3f} -> {last:.3f}; gradients as in one process "
        f"within {difference:.0e} (uncut batch: {(flat - flat_uncut).norm() / flat_uncut.norm():.0%} away, by batch norm)",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=64, help="channels of the first convolution; 64 is ResNet50")
    parser.add_argument("--pixels", type=int, default=64, help="height and width of the images")
    parser.add_argument("--batch", type=int, default=16, help="images in a batch")
    parser.add_argument("--batches", type=int, default=2, help="batches in an epoch")
    parser.add_argument("--splits", type=int, nargs="+", default=[1, 2, 4], help="numbers of micro-batches")
    options = parser.parse_args()

    rpc.init_rpc("master", rpc_backend_options=rpc.MPIRpcBackendOptions(rpc_timeout=300))
    for micro_batches in options.splits:
        train(options, micro_batches)
    rpc.shutdown()
    print("rpc_pipeline: both shards train, with the gradients of one process")


if __name__ == "__main__":
    main()

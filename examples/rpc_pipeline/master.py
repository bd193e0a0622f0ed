# python -m mpicoll.run -n 1 examples/rpc_pipeline/master.py : -n 1 examples/rpc_pipeline/worker.py
"""ResNet50 as a pipeline of two shards in two programs, by remote calls: the master drives, the worker serves.

    master.py   images -> shard 0 --activations-->  worker.py   shard 1 -> scores -> master: loss
                                  <--gradients----

A batch is cut into micro-batches, so that shard 0 computes one while shard 1 computes the one before. On two machines:
`--hostfile hosts` after mpicoll.run, with `first slots=1` and `second slots=1` in the file. Layers: resnet.py.

Trains on handwritten digits (they come with scikit-learn) with 1, 2 and 4 micro-batches. Small micro-batches are slow in
themselves, each reads all weights: with the default 16 images cutting costs more than it gains, with `--batch 64` it pays.

Batch norm takes mean and variance over a micro-batch, not over the batch: the number of micro-batches changes the function
that is trained, and its gradients. The running statistics (for evaluation only) see more and noisier updates, in the order in
which micro-batches come. A test compares the gradients with those of one process that cuts its batch alike.
"""

import argparse
import time

import torch
from resnet import Shard
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy, interpolate

import mpicoll.autograd as dist_autograd
from mpicoll import rpc
from mpicoll.optim import DistributedOptimizer
from mpicoll.rpc import RRef

HOMES = ("master", "worker")  # of the shards
EPOCHS = 3


def batches(options: argparse.Namespace) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Images (batch, 3, pixels, pixels) in 0..1 and labels (batch,)."""
    pixels, labels = load_digits(return_X_y=True)
    grey = torch.from_numpy(pixels).float()[: options.batches * options.batch].view(-1, 1, 8, 8) / 16
    images = interpolate(grey, size=options.pixels, mode="bilinear").expand(-1, 3, -1, -1)
    labels = torch.from_numpy(labels)[: len(images)]
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


def train(options: argparse.Namespace, micro_batches: int) -> None:
    """Trains a fresh network, and prints one line."""
    pipeline, data = Pipeline(options.width, micro_batches), batches(options)
    # Gradients are kept in the context: an optimizer of one's own on the worker would find every .grad None.
    optimizer = DistributedOptimizer(torch.optim.Adam, pipeline.parameter_rrefs(), lr=1e-3)

    losses: list[float] = []
    start = 0.0
    for epoch in range(EPOCHS):
        if epoch == 1:  # the first warms up
            start = time.perf_counter()
        for images, labels in data:
            with dist_autograd.context() as context_id:
                loss = cross_entropy(pipeline(images), labels)
                dist_autograd.backward(context_id, [loss])
                optimizer.step(context_id)
            losses.append(loss.item())
    speed = (EPOCHS - 1) * len(data) * options.batch / (time.perf_counter() - start)

    first, last = sum(losses[: len(data)]) / len(data), sum(losses[-len(data) :]) / len(data)
    print(f"{micro_batches} micro-batch(es): {speed:5.1f} images/s, loss {first:.3f} -> {last:.3f}", flush=True)


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
    print(f"rpc_pipeline: trained in two shards, with {', '.join(map(str, options.splits))} micro-batches")


if __name__ == "__main__":
    main()

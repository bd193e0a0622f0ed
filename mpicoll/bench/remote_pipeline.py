"""A training step of ResNet50 in two shards on two workers, with remote calls, autograd and optimizer of either library."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

PIXELS, BATCH, MICRO_BATCHES, CLASSES = 64, 8, 2, 10
TOLERANCE = 1e-3  # relative, of the norm of a gradient compared with one process; float32

_seeding = threading.Lock()  # all threads share one generator of torch, and calls run in different threads

Library = tuple[ModuleType, ModuleType, Callable[..., Any]]  # rpc, autograd, DistributedOptimizer


def library(name: str) -> Library:
    """ "ours" or "theirs"."""
    package = "mpicoll" if name == "ours" else "torch.distributed"
    rpc, autograd, optim = (importlib.import_module(f"{package}.{part}") for part in ("rpc", "autograd", "optim"))
    return rpc, autograd, optim.DistributedOptimizer


class Block(nn.Module):
    """A bottleneck of ResNet50, (n, c_in, h, w) -> (n, 4 * middle, h / stride, w / stride)."""

    def __init__(self, c_in: int, middle: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(_conv(c_in, middle, 1), nn.ReLU(), _conv(middle, middle, 3, stride), nn.ReLU())
        self.body.append(_conv(middle, 4 * middle, 1))
        same = stride == 1 and c_in == 4 * middle
        self.shortcut = nn.Identity() if same else _conv(c_in, 4 * middle, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def _conv(c_in: int, c_out: int, kernel: int, stride: int = 1) -> nn.Sequential:
    convolution = nn.Conv2d(c_in, c_out, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(c_out))


def _stage(c_in: int, middle: int, blocks: int, stride: int) -> nn.Sequential:
    return nn.Sequential(Block(c_in, middle, stride), *(Block(4 * middle, middle, 1) for _ in range(1, blocks)))


def layers(shard: int, width: int) -> nn.Sequential:
    """Half 0 or 1 of the network, with equal weights everywhere. ``width``: channels of the first convolution; 64 is ResNet50."""
    with _seeding, torch.random.fork_rng(devices=()):
        torch.manual_seed(shard)
        if shard == 0:
            stem = nn.Sequential(_conv(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
            return nn.Sequential(stem, _stage(width, width, 3, 1), _stage(4 * width, 2 * width, 4, 2))
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32 * width, CLASSES))
        return nn.Sequential(_stage(8 * width, 4 * width, 6, 2), _stage(16 * width, 8 * width, 3, 2), head)


class Shard(nn.Module):
    """A half of the network on its worker; called through an RRef of library ``name``."""

    def __init__(self, name: str, shard: int, width: int) -> None:
        super().__init__()
        self.name = name
        self.layers = layers(shard, width)
        self.lock = threading.Lock()  # one micro-batch at a time

    def forward(self, rref: Any) -> Tensor:
        x = rref.to_here()
        with self.lock:
            return self.layers(x)  # type: ignore[no-any-return]

    def parameter_rrefs(self) -> list[Any]:
        rpc, _, _ = library(self.name)
        return [rpc.RRef(parameter) for parameter in self.parameters()]

    def norms(self, context_id: int) -> list[float]:
        """The norms of all gradients."""
        _, autograd, _ = library(self.name)
        gradients = autograd.get_gradients(context_id)
        return [gradients[parameter].norm().item() for parameter in self.parameters()]


class Pipeline:
    """The pipeline, which the first of two workers drives."""

    def __init__(self, name: str, workers: list[str], width: int) -> None:
        self.rpc, self.autograd, optimizer = library(name)
        self.shards = [self.rpc.remote(worker, Shard, (name, i, width)) for i, worker in enumerate(workers)]
        generator = torch.Generator().manual_seed(0)
        self.images = torch.rand(BATCH, 3, PIXELS, PIXELS, generator=generator)
        self.labels = torch.arange(BATCH) % CLASSES
        self._check(width)
        rrefs = [rref for shard in self.shards for rref in shard.rpc_sync().parameter_rrefs()]
        self.optimizer = optimizer(torch.optim.SGD, rrefs, lr=1e-3)

    def _forward_and_backward(self, context_id: int) -> None:
        scores = []
        for piece in self.images.chunk(MICRO_BATCHES):
            between = self.shards[0].remote().forward(self.rpc.RRef(piece))
            scores.append(self.shards[1].remote().forward(between))  # rpc_async() of an RRef of torch loses the gradients
        loss = cross_entropy(torch.cat([score.to_here() for score in scores]), self.labels)
        self.autograd.backward(context_id, [loss])

    def step(self) -> None:
        """Forward, backward and SGD on one batch, whose micro-batches follow each other through the shards."""
        with self.autograd.context() as context_id:
            self._forward_and_backward(context_id)
            self.optimizer.step(context_id)

    def _check(self, width: int) -> None:
        """Raises AssertionError if the gradients differ from those of one process."""
        alone = nn.Sequential(layers(0, width), layers(1, width))
        scores = torch.cat([alone(piece) for piece in self.images.chunk(MICRO_BATCHES)])
        gradients = torch.autograd.grad(cross_entropy(scores, self.labels), list(alone.parameters()))
        expected = torch.tensor([gradient.norm().item() for gradient in gradients])
        with self.autograd.context() as context_id:
            self._forward_and_backward(context_id)
            actual = torch.tensor([norm for shard in self.shards for norm in shard.rpc_sync().norms(context_id)])
        if not torch.allclose(actual, expected, rtol=TOLERANCE, atol=1e-6):
            raise AssertionError(f"{self.rpc.__name__}: gradients differ from one process by {(actual - expected).abs().max()}")

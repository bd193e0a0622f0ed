"""The networks that are trained. All ranks make the same weights, and the same batch of a number."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from mpicoll.bench.formulas import spell

HEAD = 64  # features of a head of attention


@dataclass(frozen=True)
class Task:
    """A network and its batches. The loss is the mean of the squares of the output."""

    name: str
    unit: str  # "images", "tokens"
    per_batch: int  # units in a batch
    network: Callable[[], nn.Module]
    shape: tuple[int, ...]  # of a batch

    def model(self) -> nn.Module:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            return self.network()

    def batch(self, number: int) -> Tensor:
        return torch.rand(self.shape, generator=torch.Generator().manual_seed(1 + number))


def loss(output: Tensor) -> Tensor:
    return output.square().mean()


def mlp(side: int, depth: int, batch: int = 16) -> Task:
    """Square layers of ``side`` features."""
    return Task(f"MLP {spell(4 * side * side * depth)}", "images", batch, partial(_mlp, side, depth), (batch, side))


def _mlp(side: int, depth: int) -> nn.Module:
    linear = [nn.Linear(side, side, bias=False) for _ in range(depth)]
    return nn.Sequential(*(layer for pair in linear for layer in (pair, nn.ReLU())))


def transformer(features: int, depth: int = 2, sequences: int = 2, tokens: int = 64) -> Task:
    """Layers of a transformer without embedding: 12 * features ** 2 weights in each layer."""
    name = f"transformer {spell(48 * features * features * depth)}"
    return Task(name, "tokens", sequences * tokens, partial(blocks, features, depth), (sequences, tokens, features))


def blocks(features: int, depth: int) -> nn.Sequential:
    """The layers, by names that tell their number: "0", "1" ..."""
    return nn.Sequential(OrderedDict((str(i), Block(features)) for i in range(depth)))


class Block(nn.Module):
    """Attention, then two linear layers, each with a residual connection; (sequences, tokens, features) -> the same."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.before_attention, self.before_linear = nn.LayerNorm(features), nn.LayerNorm(features)
        self.query, self.key, self.value = (nn.Linear(features, features, bias=False) for _ in range(3))
        self.out = nn.Linear(features, features, bias=False)
        self.up, self.down = nn.Linear(features, 4 * features, bias=False), nn.Linear(4 * features, features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x))
        hidden: Tensor = self.down(torch.relu(self.up(self.before_linear(x))))
        return x + hidden

    def attention(self, x: Tensor) -> Tensor:
        """A rank of tensor parallelism has some of the heads."""
        heads = [part(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in (self.query, self.key, self.value)]
        mixed: Tensor = self.out(scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        return mixed

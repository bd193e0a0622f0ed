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
from mpicoll.bench.remote_pipeline import layers

MIB = 1 << 20
SIDES = {4 * MIB: 512, 64 * MIB: 1024, 256 * MIB: 1024}  # features of a layer of the MLP, by bytes of all gradients
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


def mlp(nbytes: int, batch: int = 16) -> Task:
    """Square layers with ``nbytes`` of weights in total; a key of `SIDES`."""
    side = SIDES[nbytes]
    return Task(f"MLP {spell(nbytes)}", "images", batch, partial(_mlp, side, nbytes // (4 * side * side)), (batch, side))


def _mlp(side: int, depth: int) -> nn.Module:
    linear = [nn.Linear(side, side, bias=False) for _ in range(depth)]
    return nn.Sequential(*(layer for pair in linear for layer in (pair, nn.ReLU())))


def resnet50(width: int = 16, images: int = 4, pixels: int = 32) -> Task:
    """ResNet50 with ``width`` channels after the first convolution, where the original has 64."""

    def network() -> nn.Module:
        return nn.Sequential(layers(0, width), layers(1, width))

    return Task(f"ResNet50, width {width}", "images", images, network, (images, 3, pixels, pixels))


def resnet18(width: int = 64, images: int = 4, pixels: int = 64) -> Task:
    """ResNet-18 for 1000 classes: 11.7 million weights if ``width`` is 64."""
    name = "ResNet-18" if width == 64 else f"ResNet-18, width {width}"
    return Task(name, "images", images, partial(_resnet18, width), (images, 3, pixels, pixels))


def _resnet18(width: int) -> nn.Module:
    stem = nn.Sequential(_convolution(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    stages = [_BasicBlock(width, width, 1), _BasicBlock(width, width, 1)]
    for channels in (2 * width, 4 * width, 8 * width):
        stages += [_BasicBlock(channels // 2, channels, 2), _BasicBlock(channels, channels, 1)]
    return nn.Sequential(stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, 1000))


class _BasicBlock(nn.Module):
    """(n, c_in, h, w) -> (n, c_out, h / stride, w / stride)."""

    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(_convolution(c_in, c_out, 3, stride), nn.ReLU(), _convolution(c_out, c_out, 3, 1))
        self.shortcut = nn.Identity() if c_in == c_out else _convolution(c_in, c_out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def _convolution(c_in: int, c_out: int, kernel: int, stride: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(c_in, c_out, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(c_out))


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

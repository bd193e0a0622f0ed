"""ResNet50 in two shards, for master.py and worker.py.

A module of its own since RPC pickles classes by name: both programs must find it under the same name. A class in master.py
would be `__main__.Shard`, and the worker's `__main__` is worker.py.
"""

import threading

import torch
from torch import nn

from mpicoll.rpc import RRef

EXPANSION = 4  # channels that leave a bottleneck block, over those in its middle
CLASSES = 10


class Bottleneck(nn.Module):
    """Residual block, (n, channels_in, h, w) -> (n, EXPANSION * middle, h / stride, w / stride)."""

    def __init__(self, channels_in: int, middle: int, stride: int = 1) -> None:
        super().__init__()
        channels_out = EXPANSION * middle
        self.body = nn.Sequential(
            nn.Conv2d(channels_in, middle, 1, bias=False), nn.BatchNorm2d(middle), nn.ReLU(),
            nn.Conv2d(middle, middle, 3, stride, padding=1, bias=False), nn.BatchNorm2d(middle), nn.ReLU(),
            nn.Conv2d(middle, channels_out, 1, bias=False), nn.BatchNorm2d(channels_out),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or channels_in != channels_out:
            projection = nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(channels_out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def stage(channels_in: int, middle: int, blocks: int, stride: int) -> nn.Sequential:
    first = Bottleneck(channels_in, middle, stride)
    return nn.Sequential(first, *(Bottleneck(EXPANSION * middle, middle) for _ in range(1, blocks)))


def layers(shard: int, width: int) -> nn.Sequential:
    """Shard 0 or 1 of a ResNet50 whose first convolution has ``width`` channels; 64 is the real one."""
    if shard == 0:
        stem = (nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        pool = nn.MaxPool2d(3, stride=2, padding=1)
        return nn.Sequential(*stem, pool, stage(width, width, 3, 1), stage(4 * width, 2 * width, 4, 2))
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32 * width, CLASSES))
    return nn.Sequential(stage(8 * width, 4 * width, 6, 2), stage(16 * width, 8 * width, 3, 2), *head)


class Shard(nn.Module):
    """One half of the network, where it lives. Its methods are called from elsewhere, through an RRef."""

    def __init__(self, shard: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(shard)
        self.layers = layers(shard, width)
        self.lock = threading.Lock()  # calls run in threads of their own: one micro-batch at a time here

    def forward(self, input_rref: RRef[torch.Tensor]) -> torch.Tensor:
        x = input_rref.to_here()  # straight from where it is; waits until it is there, and other micro-batches go on
        with self.lock:
            return self.layers(x)  # type: ignore[no-any-return]

    def parameter_rrefs(self) -> list[RRef[torch.Tensor]]:
        return [RRef(parameter) for parameter in self.parameters()]

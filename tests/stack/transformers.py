"""A small transformer, its plan for tensor parallelism with sequences split, and training beside one process."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.stack.meshes import whole

WORDS, WIDTH = 22, 8  # vocabulary, features


class Perceptron(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Attention(nn.Module):
    """As in torchtitan: the number of heads is what the local projection has."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, 4 * heads, bias=False) for _ in range(3))
        self.out = nn.Linear(4 * heads, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.perceptron = Attention(heads), Perceptron(4 * heads)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.perceptron(self.norm_2(x))


class Transformer(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(Block(heads), Block(heads))
        self.norm, self.out = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.norm(self.blocks(self.words(tokens))))


def made(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(4)
    return build().double()


def steps(model: nn.Module, loss_of: Callable[[nn.Module, int], Tensor], count: int = 3) -> list[float]:
    """Trains by AdamW; the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for step in range(count):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        losses.append(float(whole(loss.detach())))
        optimizer.step()
    return losses


def tokens(step: int, rows: int, length: int) -> Tensor:
    return torch.randint(WORDS, (rows, length), generator=torch.Generator().manual_seed(step))


def parallelize(model: Transformer, mesh: DeviceMesh, split_logits: bool) -> None:
    """The plan of a whole transformer with sequence parallelism."""
    parallelize_module(
        model,
        mesh,
        {
            "words": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "out": ColwiseParallel(
                input_layouts=Shard(1),
                output_layouts=Shard(-1) if split_logits else Replicate(),
                use_local_output=not split_logits,
            ),
        },
    )
    for block in model.blocks:
        parallelize_module(
            block,
            mesh,
            {
                "norm_1": SequenceParallel(),
                "norm_2": SequenceParallel(),
                "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "attention.q": ColwiseParallel(),
                "attention.k": ColwiseParallel(),
                "attention.v": ColwiseParallel(),
                "attention.out": RowwiseParallel(output_layouts=Shard(1)),
                "perceptron": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "perceptron.up": ColwiseParallel(),
                "perceptron.down": RowwiseParallel(output_layouts=Shard(1)),
            },
        )


def language_loss(model: nn.Module, rows: Tensor) -> Tensor:
    logits = model(rows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())

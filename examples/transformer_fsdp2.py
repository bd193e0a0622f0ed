# python -m mpicoll.run -n 2 examples/transformer_fsdp2.py
"""Trains a small GPT with FSDP2 (`fully_shard`): it learns to add. Saves a distributed checkpoint, and resumes from it.

Each rank keeps its share of every parameter, gradient and moment of Adam. FSDP2 gathers a block's parameters just before they are
used (all_gather), and sums its gradients to the ranks that keep them (reduce_scatter).

    [1] blocks are sharded one by one, then the rest; all ranks have drawn the same weights
    [2] ranks train on different sums; gradients are averaged
    [3] each rank writes and reads its shares; a checkpoint may be read on another number of ranks

After half of the steps, a new model takes over from the checkpoint. `--bf16` computes in bfloat16. Any number of ranks.
A test trains on without the checkpoint: the losses are the same to the last bit. Needs `pip install tqdm`.
"""

import argparse
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import log_softmax, nll_loss, scaled_dot_product_attention
from tqdm import tqdm

import mpicoll as dist

SUMS = [f"{a}+{b}={a + b}.".ljust(7) for a in range(10) for b in range(10)]  # the whole text: "3+4=7. ", "7+8=15."
LETTERS = "0123456789+=. "
WIDTH, HEADS, LAYERS, LENGTH = 48, 4, 3, 6  # LENGTH: of a sum without its last letter, which nothing follows
STEPS, BATCH = 240, 60  # BATCH: sums in a step, on all ranks together


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letters, self.places = nn.Embedding(len(LETTERS), WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(LETTERS))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.letters(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return log_softmax(self.head(self.norm(x)), dim=-1, dtype=torch.float32)


def encoded(texts: list[str]) -> Tensor:
    return torch.tensor([[LETTERS.index(letter) for letter in text] for text in texts])


def sharded(seed: int, dtype: torch.dtype) -> tuple[GPT, torch.optim.Optimizer]:
    """A new model and its optimizer, both sharded over all ranks (collective)."""
    torch.manual_seed(seed)
    model = GPT()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for part in [*model.blocks, model]:
        fully_shard(part, mesh=mesh, mp_policy=policy)  # [1]
    return model, torch.optim.AdamW(model.parameters(), lr=5e-3)


def train(model: GPT, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    """Trains from step ``first`` to ``last``; the loss of each step over all ranks (collective)."""
    rank, size = dist.get_rank(), dist.get_world_size()
    text, losses, began = encoded(SUMS), [], time.perf_counter()
    for step in (bar := tqdm(range(first, last), desc="training", disable=rank != 0)):
        chosen = torch.randperm(len(text), generator=torch.Generator().manual_seed(step))[:BATCH]
        batch = text[chosen[rank::size]]  # [2]
        loss = nll_loss(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / size
        dist.all_reduce(mean)
        losses.append(mean.item())
        bar.set_postfix(loss=f"{losses[-1]:.2f}", refresh=False)
    if rank == 0:
        speed = (last - first) * BATCH * LENGTH / (time.perf_counter() - began)
        print(f"step {last}: loss {losses[-1]:.2f}, {speed:,.0f} tokens/s")
    return losses


def save(folder: Path, model: GPT, optimizer: torch.optim.Optimizer) -> None:
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)  # [3]


def load(folder: Path, model: GPT, optimizer: torch.optim.Optimizer) -> None:
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)


@torch.no_grad()
def completed(model: GPT, prompts: list[str]) -> list[str]:
    """The prompts, which are of one length, with the letters that the model puts after them, up to the full stop (collective)."""
    tokens = encoded(prompts)
    while tokens.shape[1] < LENGTH + 1:
        tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(dim=-1)], dim=1)
    return ["".join(LETTERS[i] for i in row).partition(".")[0] for row in tokens.tolist()]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bf16", action="store_true", help="compute in bfloat16; weights and sums of gradients stay float32")
    parser.add_argument("--checkpoint", type=Path, help="a folder that all ranks see; default: a temporary one")
    options = parser.parse_args()
    dtype = torch.bfloat16 if options.bf16 else torch.float32
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    folder = [options.checkpoint or Path(tempfile.mkdtemp())]
    dist.broadcast_object_list(folder)  # that of rank 0

    model, optimizer = sharded(seed=0, dtype=dtype)
    if rank == 0:
        print(f"GPT with {sum(p.numel() for p in model.parameters()):,} parameters, {size} ranks, {dtype}")
    train(model, optimizer, 0, STEPS // 2)
    save(folder[0], model, optimizer)

    model, optimizer = sharded(seed=1, dtype=dtype)  # other weights: all comes from the checkpoint
    load(folder[0], model, optimizer)
    train(model, optimizer, STEPS // 2, STEPS)
    answers = completed(model, [text[:4] for text in SUMS])
    if rank == 0:
        right = sum(f"{answer}." == text.strip() for answer, text in zip(answers, SUMS, strict=True))
        print(f"the model says: {answers[34]}, {answers[78]}, {answers[99]}")
        print(f"transformer_fsdp2: {right} of {len(SUMS)} sums right")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

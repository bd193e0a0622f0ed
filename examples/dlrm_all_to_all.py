# python -m mpicoll.run -n 4 examples/dlrm_all_to_all.py
"""A recommendation model (DLRM): embedding tables on different ranks, uneven all_to_all with gradients, and DDP.

Embedding tables are too large for one rank, so each rank has some of them. The dense layers are small, so each rank has all of
them. A rank trains on its own samples, and needs rows of all tables:

                 tables                                   samples
    rank 0       A B        looked up                A B C D E   of samples 0..14
    rank 1       C          for all samples  ----->  A B C D E   of samples 15..29    all_to_all_single: each rank
    rank 2       D          <-----  gradients        A B C D E   of samples 30..44    sends to each the rows of its tables
    rank 3       E                                   A B C D E   of samples 45..59    for that rank's samples

    [1] 5 tables on 4 ranks: rank 0 sends twice as many rows as the others, so the splits are uneven
    [2] `mpicoll.nn.all_to_all_single` has gradients: in backward they go back to the rank of the table
    [3] DDP averages the gradients of the dense layers. Those of the tables are complete; dividing the loss by the number of ranks
        makes them the same kind of average

Any number of ranks up to 5. A test runs it in float64 and in one process: all losses differ by at most 1e-9.
"""

import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

import mpicoll as dist
from mpicoll.nn import all_to_all_single

TABLES = "ABCDE"
ROWS, WIDTH = 20, 8  # of a table
BATCH, STEPS = 60, 60


def dense_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(len(TABLES) * WIDTH, 32), nn.ReLU(), nn.Linear(32, 1))


def table(name: str) -> nn.Embedding:
    """The first weights of a table, the same wherever it is."""
    torch.manual_seed(ord(name))
    return nn.Embedding(ROWS, WIDTH)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Row numbers (samples, tables) and clicks (samples): small row numbers are popular."""
    generator = torch.Generator().manual_seed(step)
    rows = torch.randint(ROWS, (BATCH, len(TABLES)), generator=generator)
    return rows, torch.where(rows.sum(dim=1) < ROWS * len(TABLES) / 2, 1.0, 0.0)


def exchange(looked_up: Tensor, samples: list[int], tables: list[int]) -> Tensor:
    """From rows of this rank's tables for all samples to rows of all tables for this rank's samples (collective).

    looked_up: (tables of this rank, all samples, WIDTH). samples, tables: how many each rank has.
    Returns: (all tables, samples of this rank, WIDTH).
    """
    rank = dist.get_rank()
    parts = [part.reshape(-1, WIDTH) for part in looked_up.split(samples, dim=1)]  # for each rank, table by table
    received = looked_up.new_empty(len(TABLES) * samples[rank], WIDTH)
    received = all_to_all_single(  # [2]
        received,
        torch.cat(parts),
        output_split_sizes=[count * samples[rank] for count in tables],  # [1]
        input_split_sizes=[tables[rank] * count for count in samples],
    )
    return received.reshape(len(TABLES), samples[rank], WIDTH)


def shares(count: int, size: int) -> list[int]:
    """How many of ``count`` each rank has: 5 on 4 ranks is [2, 1, 1, 1]."""
    return [count // size + (rank < count % size) for rank in range(size)]


def train() -> Tensor:
    """The losses of all steps over the whole batch (collective)."""
    rank, size = dist.get_rank(), dist.get_world_size()
    samples, tables = shares(BATCH, size), shares(len(TABLES), size)
    first = sum(tables[:rank])
    own = range(first, first + tables[rank])
    embeddings = nn.ModuleList(table(TABLES[index]) for index in own)
    torch.manual_seed(0)
    dense = DistributedDataParallel(dense_layers())
    optimizer = torch.optim.Adam([*embeddings.parameters(), *dense.parameters()], lr=0.03)
    losses = []
    for step in range(STEPS):
        rows, clicks = batch(step)
        looked_up = torch.stack([embedding(rows[:, index]) for embedding, index in zip(embeddings, own, strict=True)])
        features = exchange(looked_up, samples, tables).transpose(0, 1).flatten(1)
        logits = dense(features).squeeze(1)
        loss = binary_cross_entropy_with_logits(logits, clicks.split(samples)[rank], reduction="sum") / BATCH
        optimizer.zero_grad()
        (loss * size).backward()
        for parameter in embeddings.parameters():
            assert parameter.grad is not None
            parameter.grad /= size  # [3]
        optimizer.step()
        losses.append(loss.detach())
    total = torch.stack(losses)
    dist.all_reduce(total)
    return total


def main() -> None:
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    if size > len(TABLES):
        sys.exit(f"dlrm_all_to_all: {size} ranks are too many for {len(TABLES)} tables" if rank == 0 else 1)
    losses = train()
    if rank == 0:
        names = iter(TABLES)
        owned = [" ".join(next(names) for _ in range(count)) for count in shares(len(TABLES), size)]
        print("tables: " + ", ".join(f"rank {owner}: {own}" for owner, own in enumerate(owned)))
        print(f"dlrm_all_to_all: loss {losses[0]:.3f} -> {losses[-1]:.3f} in {STEPS} steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

# python -m mpicoll.run -n 4 examples/tensor_parallel.py
"""Tensor parallelism and FSDP2 on a grid of ranks: `parallelize_module` and `fully_shard`.

With 4 ranks, the grid has two rows and two columns:

                 tensor parallel: one layer on two ranks
                +----------------+----------------+
      data      | rank 0         | rank 1         |   samples 0..11 of a batch
      parallel: | units 0..47    | units 48..95   |
      a batch   +----------------+----------------+
      on two    | rank 2         | rank 3         |   samples 12..23
      rows      | units 0..47    | units 48..95   |
                +----------------+----------------+

    [1] `up` by columns: each rank computes its share of the hidden units from the whole input, without a message
    [2] `down` by rows: from its hidden units each rank computes a summand of the output; one all_reduce adds them up.
        Going back it is the other way round: `up` needs the all_reduce, `down` none
    [3] the rows: FSDP2 shards what a rank of a row has once more, down the column

Any number of ranks; an even number makes two rows, an odd one makes one. A test runs it in float64 and in one process: all losses
differ by at most 1e-9.
"""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import log_softmax, nll_loss

import mpicoll as dist

FEATURES, HIDDEN, CLASSES = 16, 96, 4
SAMPLES, STEPS = 24, 40


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return log_softmax(self.down(torch.relu(self.up(x))), dim=-1)


def grid_of_ranks() -> DeviceMesh:
    size = dist.get_world_size()
    rows = 2 if size % 2 == 0 else 1
    return init_device_mesh("cpu", (rows, size // rows), mesh_dim_names=("data", "tensor"))


def parallelize(model: nn.Module, mesh: DeviceMesh) -> None:
    """Splits the model over the ranks of ``mesh`` (collective); they have drawn the same weights."""
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}  # [1] [2]
    parallelize_module(model, mesh["tensor"], plan)
    fully_shard(model, mesh=mesh["data"])  # [3]


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Samples of this step and their classes, the same on every rank: the quadrant of the first two features."""
    x = torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(step))
    return x, 2 * (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def train(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """Trains on the samples of this rank's row; the losses of all steps, over all rows (collective)."""
    rows, row = mesh["data"].size(), mesh.get_local_rank("data")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        x, classes = (part.chunk(rows)[row] for part in batch(step))
        loss = nll_loss(model(x), classes)
        optimizer.zero_grad()
        loss.backward()  # FSDP2 averages the gradients over the rows
        optimizer.step()
        losses.append(loss.detach() / rows)
    total = torch.stack(losses)
    dist.all_reduce(total, group=mesh.get_group("data"))  # the ranks of a row have the same loss: add up those of the rows
    return total


def shapes(weight: Tensor) -> str:
    assert isinstance(weight, DTensor)
    return f"{tuple(weight.shape)} is {tuple(weight.to_local().shape)}"


def main() -> None:
    dist.init_process_group()
    mesh = grid_of_ranks()
    torch.manual_seed(0)  # the same weights on every rank
    model = Perceptron()
    parallelize(model, mesh)
    losses = train(model, mesh)
    if dist.get_rank() == 0:
        rows, columns = mesh.shape
        up, down = shapes(model.up.weight), shapes(model.down.weight)
        print(f"{rows} x {columns} ranks: up.weight {up} on each rank, down.weight {down}")
        print(f"tensor_parallel: loss {losses[0]:.3f} -> {losses[-1]:.3f} in {STEPS} steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

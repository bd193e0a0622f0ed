"""Proves what the examples show: with their own functions, on all ranks, in one job.

The arguments are names of examples. Of each rank 0 prints one line, "name: ...". Checkpoints: proved.py.
"""

import sys
from collections.abc import Callable, Sequence
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, pad
from torch.nn.parallel import DistributedDataParallel

import mpicoll as dist
from tests.project.scripts.example import imported

# In float64, ranks that add up in another order than one process change a gradient by about 1e-16 of itself. Over some tens of
# steps that stays far below 1e-9, while a mistake in a schedule or an average shows in the first digits.
TOLERANCE = 1e-9
Forward = Callable[[Tensor], Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]
Batches = Sequence[tuple[Tensor, Tensor]]


def same(got: object, expected: object) -> None:
    """Fails if the numbers are not those of one process."""
    torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE)


def losses_alone(forward: Forward, loss_of: Loss, optimizer: torch.optim.Optimizer, data: Batches) -> Tensor:
    """Trains in this process, on whole batches; the loss of every step."""
    losses = []
    for inputs, targets in data:
        loss = loss_of(forward(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def halo_convolution(example: ModuleType) -> str:
    class Whole(example.Network):  # type: ignore[misc, name-defined]
        """The network on the whole field, which is a torus by circular padding."""

        def widened(self, x: Tensor) -> Tensor:
            return pad(x, (1, 1, 1, 1), mode="circular")

    grid = example.Grid(example.most_square(dist.get_world_size()), periodic=True)
    torch.manual_seed(0)
    network = example.Network(grid)
    whole = Whole(grid)
    whole.load_state_dict(network.state_dict())
    before = example.warm_spots()
    after = example.diffused(before)
    loss = example.backward(network, grid.part(before), grid.part(after))
    expected = (whole(before) - after).square().mean()
    expected.backward()
    torch.testing.assert_close(loss, expected.item(), rtol=1e-10, atol=0)
    gradients = [[parameter.grad for parameter in model.parameters()] for model in (network, whole)]
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-12)
    return "loss and gradients as in one process"


def resnet_pipeline(example: ModuleType) -> str:
    parts = example.resnet()
    model = nn.Sequential(*parts)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    expected = losses_alone(model, cross_entropy, optimizer, example.batches()).tolist()
    for schedule in (example.ScheduleGPipe, example.Schedule1F1B):
        stage = example.own_parts(example.resnet())
        losses = example.train(stage, schedule)
        if dist.get_rank() == dist.get_world_size() - 1:
            same(losses, expected)
        same(list(stage.parameters()), list(example.own_parts(parts).parameters()))
    return "losses and weights of both schedules as in one process"


def gpu_pipeline(example: ModuleType) -> str:
    rank, size, device = dist.get_rank(), dist.get_world_size(), example.own_device()
    stages = [stage.to(device) for stage in example.network(size)]
    model = nn.Sequential(*stages)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    expected = losses_alone(model, cross_entropy, optimizer, example.batches(size, device))
    stage = example.network(size)[rank].to(device)
    losses, _ = example.train(stage, device)
    same(losses, expected)
    same(list(stage.parameters()), list(stages[rank].parameters()))
    return "losses and weights as in one process"


def dlrm_all_to_all(example: ModuleType) -> str:
    embeddings = nn.ModuleList(map(example.table, example.TABLES))
    torch.manual_seed(0)
    dense = example.dense_layers()
    optimizer = torch.optim.Adam([*embeddings.parameters(), *dense.parameters()], lr=0.03)

    def forward(rows: Tensor) -> Tensor:
        features = torch.cat([embedding(rows[:, index]) for index, embedding in enumerate(embeddings)], dim=1)
        return dense(features).squeeze(1)

    data = [example.batch(step) for step in range(example.STEPS)]
    expected = losses_alone(forward, binary_cross_entropy_with_logits, optimizer, data)
    same(example.train(), expected)
    return f"{len(expected)} losses as in one process"


def tensor_parallel(example: ModuleType) -> str:
    mesh = example.grid_of_ranks()
    torch.manual_seed(0)
    model = example.Perceptron()
    example.parallelize(model, mesh)
    losses = example.train(model, mesh)
    torch.manual_seed(0)
    model = example.Perceptron()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = [example.batch(step) for step in range(example.STEPS)]
    same(losses, losses_alone(model, nn.functional.nll_loss, optimizer, data))
    return f"{len(losses)} losses as in one process"


def ring_all_reduce(example: ModuleType) -> str:
    rank, size = dist.get_rank(), dist.get_world_size()
    for count in example.COUNTS:
        own = torch.rand(count, generator=torch.Generator().manual_seed(rank)) + 1
        by_ring, by_mpi = own.clone(), own.clone()
        example.ring_all_reduce(by_ring)
        dist.all_reduce(by_mpi)
        # The two may add in different orders. A sum of n positive float32 numbers errs by n * 2^-24 of itself at most.
        difference = ((by_ring - by_mpi).abs() / by_mpi).max().item()
        assert difference <= 2 * size * 2**-24, f"rank {rank}: relative difference {difference}"
        assert same_bits_everywhere(by_ring), f"{count} numbers by the ring: the ranks hold different bits"
        assert same_bits_everywhere(by_mpi), f"{count} numbers by all_reduce: the ranks hold different bits"
    return "the sums of all_reduce, and the same bits on all ranks"


def gpu_ddp(example: ModuleType) -> str:
    device = example.own_device()
    torch.manual_seed(dist.get_rank())
    model = DistributedDataParallel(example.network().to(device))
    example.train(model, *example.load(device))
    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    assert same_bits_everywhere(weights), "after the last step the ranks have different weights"
    return "the same weights on all ranks"


def same_bits_everywhere(tensor: Tensor) -> bool:
    """Whether all ranks hold what rank 0 holds (collective): otherwise copies of a model would drift apart."""
    of_rank_0 = tensor.clone()
    dist.broadcast(of_rank_0, src=0)
    return torch.equal(tensor, of_rank_0)


def digits(example: ModuleType) -> str:
    """Of digits_*.py: the losses of all steps."""
    sampled = example.__name__ == "digits_torch_ddp"  # torch's sampler orders its batches
    torch.manual_seed(dist.get_rank())
    if example.__name__ == "digits_by_hand":
        losses = torch.tensor(example.train(*example.load())[1])
    else:
        losses = example.train(DistributedDataParallel(example.network()), *example.load()[: 1 if sampled else None])
    if sampled:
        images, labels = example.load()[0].tensors
        batches = [part for epoch in range(example.EPOCHS) for part in order(epoch, len(labels)).split(example.BATCH)]
    else:
        (images, labels), batches = example.load(), example.batches()
    torch.manual_seed(0)
    model = example.network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if dist.get_rank() == 0:
        same(losses, losses_alone(model, cross_entropy, optimizer, [(images[batch], labels[batch]) for batch in batches]))
    return f"{len(losses)} losses as in one process"


def order(epoch: int, count: int) -> Tensor:
    """DistributedSampler's order: the generator starts from the sampler's seed plus the number of the epoch."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(1 + epoch))


PROOFS = {
    "halo_convolution": (halo_convolution, torch.float64),
    "resnet_pipeline": (resnet_pipeline, torch.float64),
    "gpu_pipeline": (gpu_pipeline, torch.float64),
    "dlrm_all_to_all": (dlrm_all_to_all, torch.float64),
    "tensor_parallel": (tensor_parallel, torch.float64),
    "ring_all_reduce": (ring_all_reduce, torch.float32),
    "gpu_ddp": (gpu_ddp, torch.float32),
    "digits_by_hand": (digits, torch.float64),
    "digits_ddp": (digits, torch.float64),
    "digits_torch_ddp": (digits, torch.float64),
}


def main(names: list[str]) -> None:
    dist.init_process_group()
    for name in names:
        proof, dtype = PROOFS[name]
        torch.set_default_dtype(dtype)
        result = proof(imported(name))
        dist.barrier()  # all ranks have come through it
        if dist.get_rank() == 0:
            print(f"{name}: {result}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:] or list(PROOFS))

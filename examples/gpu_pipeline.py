# python -m mpicoll.run -n 2 examples/gpu_pipeline.py
"""A network as a pipeline over GPUs: a stage on each rank's, by torch.distributed.pipelining with the 1F1B schedule.

           rank 0 [stem, two blocks] --activations-->  rank 1 [two blocks, head] -> loss
                                     <--gradients----

The more ranks, the larger the network, as where it is too large for one GPU: each rank brings two blocks and two micro-batches.
Activations and gradients go from GPU to GPU as they are; ranks that outnumber the GPUs of their node share them, and where there
is no GPU all are on the CPU. Then rank 0 trains the whole network alone and compares losses and weights. Any number of ranks.
Needs `pip install scikit-learn` (the handwritten digits come with it).
"""

import statistics
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.functional import cross_entropy

import mpicoll as dist

STEPS, MICRO_BATCH, WIDTH = 24, 16, 64
# float64: micro-batches are added in another order than a whole batch, which changes a gradient by about 1e-16 of
# itself; over 24 steps that stays far below 1e-9, while a mistake in the schedule shows in the first digits.
TOLERANCE = 1e-9


class Block(nn.Module):
    """Residual block, (n, WIDTH) -> (n, WIDTH)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x)


def own_device() -> torch.device:
    """This rank's GPU, made the current one; the CPU where torch sees no GPU."""
    if not torch.cuda.is_available():
        if dist.get_rank() == 0:
            print("no GPU here: on the CPU")
        return torch.device("cpu")
    device = torch.device("cuda", dist.get_node_local_rank(0) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def network(stages: int) -> list[nn.Module]:
    """The stages that follow each other; (n, 64) -> (n, 10). The same weights on every rank."""
    torch.manual_seed(0)
    parts = [[Block(), Block()] for _ in range(stages)]
    parts[0].insert(0, nn.Linear(64, WIDTH))
    parts[-1].append(nn.Linear(WIDTH, 10))
    return [nn.Sequential(*part).double() for part in parts]


def batches(stages: int, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """STEPS batches of 2 * stages micro-batches: images (n, 64) and labels (n,)."""
    digits = load_digits()
    images, labels = torch.from_numpy(digits.data).to(device) / 16, torch.from_numpy(digits.target).to(device)
    shape = (STEPS, 2 * stages * MICRO_BATCH)
    picked = torch.randint(len(labels), shape, generator=torch.Generator().manual_seed(1)).to(device)
    return [(images[batch], labels[batch]) for batch in picked]


def train_pipeline(part: nn.Module, device: torch.device) -> tuple[torch.Tensor, float]:
    """Trains ``part`` as this rank's stage (collective); the loss of every step, on all ranks, and seconds per step."""
    rank, size = dist.get_rank(), dist.get_world_size()
    stage = PipelineStage(part, stage_index=rank, num_stages=size, device=device)
    schedule = Schedule1F1B(stage, n_microbatches=2 * size, loss_fn=cross_entropy)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.02, momentum=0.9)
    curve = torch.zeros(STEPS, dtype=torch.float64, device=device)
    seconds = []
    for step, (images, labels) in enumerate(batches(size, device)):
        start = time.perf_counter()
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []  # filled by the last stage, one per micro-batch
        inputs = (images,) if rank == 0 else ()
        if rank == size - 1:
            schedule.step(*inputs, target=labels, losses=losses)
            curve[step] = torch.stack(losses).detach().mean()
        else:
            schedule.step(*inputs)
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # for the clock alone
        seconds.append(time.perf_counter() - start)
    dist.broadcast(curve, src=size - 1)
    return curve, statistics.median(seconds)


def train_alone(model: nn.Module, stages: int, device: torch.device) -> torch.Tensor:
    """Trains ``model`` in this process on whole batches; the loss of every step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    curve = []
    for images, labels in batches(stages, device):
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        curve.append(loss.detach())
    return torch.stack(curve)


def weights(module: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(module.parameters()).detach()


def main() -> None:
    dist.init_process_group()  # device_id is not needed
    rank, size = dist.get_rank(), dist.get_world_size()
    device = own_device()

    mine = network(size)[rank].to(device)
    curve, seconds = train_pipeline(mine, device)

    whole = [part.to(device) for part in network(size)] if rank == 0 else []
    stages = [torch.empty_like(weights(part)) for part in whole]  # first and last are larger than the others
    dist.gather(weights(mine), stages if rank == 0 else None, dst=0)
    if rank == 0:
        expected = train_alone(nn.Sequential(*whole), size, device)
        difference = max((a - weights(b)).abs().max().item() for a, b in zip(stages, whole, strict=True))
        torch.testing.assert_close(curve, expected, rtol=0, atol=TOLERANCE)
        assert difference <= TOLERANCE, f"weights differ by {difference:.1e} from one process"
        where = f"{device}, {torch.cuda.get_device_name(device)}" if device.type == "cuda" else "the CPU"
        print(f"{size} stage(s), {2 * size} micro-batches: steps of {1000 * seconds:.1f} ms; rank 0 on {where}")
        print(f"gpu_pipeline: loss {curve[0]:.3f} -> {curve[-1]:.3f}; weights as in one process within {difference:.0e}")
    dist.barrier()  # the others wait for rank 0
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

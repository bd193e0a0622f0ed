# python -m mpicoll.run -n 2 examples/gpu_pipeline.py
"""A network as a pipeline over GPUs: a stage on each rank's, by torch.distributed.pipelining with the 1F1B schedule.

           rank 0 [stem, two blocks] --activations-->  rank 1 [two blocks, head] -> loss
                                     <--gradients----

The more ranks, the larger the network, as where it is too large for one GPU: each rank brings two blocks and two micro-batches.
Activations and gradients go from GPU to GPU as they are; ranks that outnumber the GPUs of their node share them, and where there
is no GPU all are on the CPU.

Any number of ranks. A test trains the whole network in one process, too, in float64: losses and weights differ by at most 1e-9.
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
    parts: list[list[nn.Module]] = [[Block(), Block()] for _ in range(stages)]
    parts[0].insert(0, nn.Linear(64, WIDTH))
    parts[-1].append(nn.Linear(WIDTH, 10))
    return [nn.Sequential(*part) for part in parts]


def batches(stages: int, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """STEPS batches of 2 * stages micro-batches: images (n, 64) and labels (n,)."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.get_default_dtype(), device=device) / 16
    labels = torch.from_numpy(labels).to(device)
    shape = (STEPS, 2 * stages * MICRO_BATCH)
    picked = torch.randint(len(labels), shape, generator=torch.Generator().manual_seed(1)).to(device)
    return [(images[batch], labels[batch]) for batch in picked]


def train(part: nn.Module, device: torch.device) -> tuple[torch.Tensor, float]:
    """Trains ``part`` as this rank's stage (collective); the loss of every step, on all ranks, and seconds per step."""
    rank, size = dist.get_rank(), dist.get_world_size()
    stage = PipelineStage(part, stage_index=rank, num_stages=size, device=device)
    schedule = Schedule1F1B(stage, n_microbatches=2 * size, loss_fn=cross_entropy)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.02, momentum=0.9)
    curve = torch.zeros(STEPS, device=device)
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


def main() -> None:
    dist.init_process_group()  # device_id is not needed
    rank, size = dist.get_rank(), dist.get_world_size()
    device = own_device()
    curve, seconds = train(network(size)[rank].to(device), device)
    if rank == 0:
        where = f"{device}, {torch.cuda.get_device_name(device)}" if device.type == "cuda" else "the CPU"
        print(f"{size} stage(s), {2 * size} micro-batches: steps of {1000 * seconds:.1f} ms; rank 0 on {where}")
        print(f"gpu_pipeline: loss {curve[0]:.3f} -> {curve[-1]:.3f} in {STEPS} steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

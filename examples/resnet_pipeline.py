# python -m mpicoll.run -n 2 examples/resnet_pipeline.py
"""A small ResNet as a pipeline: each rank holds some layers, micro-batches flow through, torch keeps the schedule.

    torch.distributed.pipelining decides who computes what and when (GPipe: all forward, then all backward;
    1F1B: one forward, one backward in turn, so that fewer activations are alive); mpicoll carries the tensors.

           rank 0 [stem block ...] --activations-->  rank 1 [... block head] -> loss
                                   <--gradients----

1 to 6 ranks. Each schedule trains on handwritten digits. A test trains the whole network in one process, too, in float64: losses
and weights differ by at most 1e-9. Needs `pip install scikit-learn` (the images come with it).
"""

import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.functional import cross_entropy

import mpicoll as dist

STEPS, BATCH, MICRO_BATCHES = 24, 64, 4


class Block(nn.Module):
    """Residual block, (n, channels_in, h, w) -> (n, channels_out, h / stride, w / stride).

    GroupNorm where ResNet has BatchNorm, which takes its mean over a micro-batch: cutting a batch would change the result.
    """

    def __init__(self, channels_in: int, channels_out: int, stride: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False),
            nn.GroupNorm(4, channels_out),
            nn.ReLU(),
            nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False),
            nn.GroupNorm(4, channels_out),
        )
        same = stride == 1 and channels_in == channels_out
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet() -> list[nn.Module]:
    """Six parts that follow each other; (n, 1, 8, 8) -> (n, 10). The same weights on every rank."""
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.GroupNorm(4, 16), nn.ReLU())
    head = nn.Sequential(nn.Flatten(), nn.Linear(32 * 4 * 4, 10))
    return [stem, Block(16, 16), Block(16, 32, stride=2), Block(32, 32), Block(32, 32), head]


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """STEPS batches of images (BATCH, 1, 8, 8) and labels (BATCH,)."""
    pixels, labels = load_digits(return_X_y=True)
    images = torch.tensor(pixels, dtype=torch.get_default_dtype()).view(-1, 1, 8, 8) / 16
    labels = torch.from_numpy(labels)
    return list(zip(images.split(BATCH)[:STEPS], labels.split(BATCH)[:STEPS], strict=True))


def train(part: nn.Module, kind: type[ScheduleGPipe] | type[Schedule1F1B]) -> list[float]:
    """Trains ``part`` as this rank's stage of the pipeline (collective); the losses of all steps, on the last rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    stage = PipelineStage(part, stage_index=rank, num_stages=size, device=torch.device("cpu"))
    schedule = kind(stage, n_microbatches=MICRO_BATCHES, loss_fn=cross_entropy)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.02, momentum=0.9)
    curve = []
    for images, labels in batches():
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []  # filled by the last stage, one per micro-batch
        inputs = (images,) if rank == 0 else ()
        if rank == size - 1:
            schedule.step(*inputs, target=labels, losses=losses)
            curve.append(torch.stack(losses).mean().item())
        else:
            schedule.step(*inputs)
        optimizer.step()
    return curve


def own_parts(parts: list[nn.Module]) -> nn.Sequential:
    """Those that this rank holds: as many as the others, or one more."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return nn.Sequential(*parts[len(parts) * rank // size : len(parts) * (rank + 1) // size])


def main() -> None:
    dist.init_process_group()
    rank, size, parts = dist.get_rank(), dist.get_world_size(), len(resnet())
    if size > parts:
        raise SystemExit(f"resnet_pipeline.py: {parts} parts are too few for {size} ranks" if rank == 0 else 1)
    for kind in (ScheduleGPipe, Schedule1F1B):
        dist.barrier()
        start = time.perf_counter()
        curve = train(own_parts(resnet()), kind)
        dist.barrier()
        if rank == size - 1:
            print(f"{kind.__name__:<14} loss {curve[0]:.3f} -> {curve[-1]:.3f} in {time.perf_counter() - start:.1f} s")
    if rank == size - 1:
        print(f"resnet_pipeline: {STEPS} steps by each schedule on {size} stage(s), {MICRO_BATCHES} micro-batches in a step")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

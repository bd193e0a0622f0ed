# python -m mpicoll.run -n 2 examples/resnet_pipeline.py
"""A small ResNet as a pipeline: each rank holds some layers, micro-batches flow through, torch keeps the schedule.

    torch.distributed.pipelining decides who computes what and when (GPipe: all forward, then all backward;
    1F1B: one forward, one backward in turn, so that fewer activations are alive); mpicoll carries the tensors.

           rank 0 [stem block ...] --activations-->  rank 1 [... block head] -> loss
                                   <--gradients----

1 to 6 ranks. Each schedule trains on handwritten digits (they come with scikit-learn); each rank then trains the whole
network alone and compares: losses, and the weights of its own stage after the last step.
"""

import copy
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.functional import cross_entropy

import mpicoll as dist

STEPS, BATCH, MICRO_BATCHES = 24, 64, 4
# float64: micro-batches are added in another order than a whole batch, which changes a gradient by about 1e-16 of
# itself; over 24 steps that stays far below 1e-9, while a mistake in the schedule shows in the first digits.
TOLERANCE = 1e-9


class Block(nn.Module):
    """Residual block, (n, channels_in, h, w) -> (n, channels_out, h / stride, w / stride).

    GroupNorm where ResNet has BatchNorm: BatchNorm would take its mean over a micro-batch, so that a pipeline could not
    give the same numbers as one process on the whole batch.
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
    parts = [stem, Block(16, 16), Block(16, 32, stride=2), Block(32, 32), Block(32, 32), head]
    return [part.double() for part in parts]


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """STEPS batches of images (BATCH, 1, 8, 8) and labels (BATCH,)."""
    digits = load_digits()
    images, labels = torch.from_numpy(digits.images).unsqueeze(1) / 16, torch.from_numpy(digits.target)
    return list(zip(images.split(BATCH)[:STEPS], labels.split(BATCH)[:STEPS], strict=True))


def train_alone(model: nn.Module) -> list[float]:
    """Trains ``model`` in this process on whole batches; the loss of every step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    curve = []
    for images, labels in batches():
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        curve.append(loss.item())
    return curve


def train_pipeline(part: nn.Module, kind: type[ScheduleGPipe] | type[Schedule1F1B]) -> list[float]:
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


def main() -> None:
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = resnet()
    if size > len(parts):
        raise SystemExit(f"resnet_pipeline.py: {len(parts)} parts are too few for {size} ranks" if rank == 0 else 1)
    cut = slice(len(parts) * rank // size, len(parts) * (rank + 1) // size)

    whole = copy.deepcopy(parts)
    expected_curve = train_alone(nn.Sequential(*whole))
    expected = nn.Sequential(*whole[cut])

    for kind in (ScheduleGPipe, Schedule1F1B):
        mine = nn.Sequential(*copy.deepcopy(parts)[cut])
        dist.barrier()
        start = time.perf_counter()
        curve = train_pipeline(mine, kind)
        dist.barrier()
        seconds = time.perf_counter() - start

        pairs = zip(mine.parameters(), expected.parameters(), strict=True)
        difference = torch.tensor(max(((a - b).abs().max().item() for a, b in pairs), default=0.0))
        if rank == size - 1:
            torch.testing.assert_close(curve, expected_curve, rtol=0, atol=TOLERANCE)
        dist.all_reduce(difference, op=dist.ReduceOp.MAX)
        assert difference <= TOLERANCE, f"{kind.__name__}: weights differ by {difference:.1e} from one process"
        if rank == 0:
            print(
                f"{kind.__name__:<14} {size} stage(s), {MICRO_BATCHES} micro-batches: loss {expected_curve[0]:.3f} -> "
                f"{expected_curve[-1]:.3f} in {seconds:.1f} s; weights as in one process within {difference:.0e}"
            )
    if rank == 0:
        print("resnet_pipeline: both schedules train like one process")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

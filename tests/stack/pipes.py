"""A model in parts, trained as a pipeline, and trained by one process on the same micro-batches: what both must agree on.

Every rank holds all parts of ``alone`` (made from the test's seed, so equal everywhere) and of the pipeline only its own:

    parts 0 1 2 3 on 2 ranks   "loop": rank 0 has 0, 2; rank 1 has 1, 3        "v": rank 0 has 0, 3; rank 1 has 1, 2
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from tests.stack.meshes import whole

CPU = torch.device("cpu")
Batch = tuple[Tensor | tuple[Tensor, ...], Tensor]  # input or inputs, target
Loss = Callable[[Any, Tensor], Tensor]
SGD = {"lr": 0.1, "momentum": 0.9}  # with momentum a wrong gradient of an early step shows in all later ones


class Step(NamedTuple):
    """What one training step leaves behind; in a pipeline, outputs and losses are known where the last part is."""

    output: tuple[Tensor, ...]
    losses: list[Tensor]
    gradients: dict[str, Tensor]  # by "part.parameter", before the optimizer's step


def batches(steps: int, rows: int, width: int, dtype: torch.dtype = torch.float64) -> list[Batch]:
    """Inputs and targets, equal on all ranks (the test's seed)."""
    return [(torch.randn(rows, width, dtype=dtype), torch.randn(rows, width, dtype=dtype)) for _ in range(steps)]


def linear_parts(count: int, width: int = 4, dtype: torch.dtype = torch.float64) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(width, width, dtype=dtype), nn.Tanh()) for _ in range(count)]


def places(rank: int, size: int, per_rank: int = 1, style: str = "loop") -> list[int]:
    """Which parts the rank of a group of ``size`` holds."""
    if style == "v":
        assert per_rank == 2
        return [rank, 2 * size - 1 - rank]
    return [rank + turn * size for turn in range(per_rank)]


def own(parts: Sequence[nn.Module], where: Sequence[int]) -> dict[int, nn.Module]:
    """Copies of this rank's parts, by their number."""
    return {index: copy.deepcopy(parts[index]) for index in where}


def stages(mine: dict[int, nn.Module], count: int, group: dist.ProcessGroup | None = None, **more: Any) -> list[PipelineStage]:
    return [PipelineStage(part, index, count, CPU, group=group, **more) for index, part in mine.items()]


def linear_shapes(index: int, rows: int = 1, width: int = 4, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """What a part of `linear_parts` takes and puts out for a micro-batch, for those who do not want it found out."""
    before, after = (torch.empty(rows, width, dtype=dtype, device="meta", requires_grad=needs) for needs in (index > 0, True))
    return {"input_args": before, "output_args": after}


def named(parts: dict[int, nn.Module]) -> dict[str, nn.Parameter]:
    """By "part.parameter", without DDP's prefix."""
    return {
        f"{index}.{name.removeprefix('module.')}": parameter
        for index, part in parts.items()
        for name, parameter in part.named_parameters()
    }


def gradients(parameters: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """Copies; whole ones of what is sharded (collective among its ranks then)."""
    return {name: whole(p.grad.detach()).clone() for name, p in parameters.items() if p.grad is not None}


def share(data: Sequence[Batch], dp_rank: int, dp: int) -> list[Batch]:
    """One data parallel rank's rows of every batch."""
    return [(x.tensor_split(dp)[dp_rank], target.tensor_split(dp)[dp_rank]) for x, target in data]


def share_of_steps(steps: Sequence[Step], dp_rank: int, dp: int) -> list[Step]:
    """One data parallel rank's outputs and losses; gradients are everybody's."""
    outputs = [tuple(tensor.tensor_split(dp)[dp_rank] for tensor in step.output) for step in steps]
    losses = [step.losses[dp_rank * len(step.losses) // dp : (dp_rank + 1) * len(step.losses) // dp] for step in steps]
    return [Step(*mine, step.gradients) for *mine, step in zip(outputs, losses, steps, strict=True)]


def alone(
    parts: Sequence[nn.Module], data: Sequence[Batch], micro: int, loss: Loss, divisor: int | None = None, **kwargs: Tensor
) -> list[Step]:
    """Trains ``parts`` one after the other in this process, micro-batch by micro-batch.

    divisor: of the sum of the micro-batches' gradients; None: ``micro``. kwargs: given to every part, cut like the batch.
    """
    parameters, taken = named(dict(enumerate(parts))), []
    optimizer = torch.optim.SGD(parameters.values(), **SGD)
    for inputs, target in data:
        optimizer.zero_grad()
        outputs, losses = [], []
        for number in range(micro):
            x: Any = tuple(tensor.tensor_split(micro)[number] for tensor in _tuple(inputs))
            here = {name: value.tensor_split(micro)[number] for name, value in kwargs.items()}
            for part in parts:
                x = part(*_tuple(x), **here)
            losses.append(loss(x, target.tensor_split(micro)[number]))
            losses[-1].backward()
            outputs.append(_tuple(x))
        for parameter in parameters.values():
            parameter.grad /= micro if divisor is None else divisor
        output = tuple(torch.cat(columns).detach() for columns in zip(*outputs, strict=True))
        taken.append(Step(output, [x.detach() for x in losses], gradients(parameters)))
        optimizer.step()
    return taken


def piped(schedule: Any, mine: dict[int, nn.Module], count: int, data: Sequence[Batch], **kwargs: Tensor) -> list[Step]:
    """Trains this rank's parts through ``schedule`` (collective)."""
    parameters, taken = named(mine), []
    optimizer = torch.optim.SGD(parameters.values(), **SGD)
    for inputs, target in data:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        last = {"target": target, "losses": losses} if count - 1 in mine else {}
        output = schedule.step(*(_tuple(inputs) if 0 in mine else ()), **last, **kwargs)
        output = tuple(tensor.detach() for tensor in _tuple(output)) if count - 1 in mine else ()
        taken.append(Step(output, [loss.detach() for loss in losses], gradients(parameters)))
        optimizer.step()
    return taken


def differences(
    got: Sequence[Step], expected: Sequence[Step], mine: dict[int, nn.Module], count: int, atol: float = 1e-12
) -> str:
    """Where this rank's part of the pipeline differs from one process; empty if nowhere."""
    wrong = []
    for number, (step, right) in enumerate(zip(got, expected, strict=True)):
        wanted = {name: g for name, g in right.gradients.items() if int(name.split(".")[0]) in mine}
        if step.gradients.keys() != wanted.keys():
            wrong.append(f"step {number}: gradients of {sorted(step.gradients)}, not {sorted(wanted)}")
        pairs = [(f"gradient of {name}", step.gradients.get(name), g) for name, g in wanted.items()]
        if count - 1 in mine:
            pairs += [("output", a, b) for a, b in zip(step.output, right.output, strict=True)]
            pairs += [("losses", torch.stack(step.losses), torch.stack(right.losses))]
        wrong += [f"step {number}: {what} {a} not {b}" for what, a, b in pairs if not close(a, b, atol)]
    return "\n".join(wrong[:3])


def close(a: Any, b: Tensor, atol: float = 1e-12) -> bool:
    return isinstance(a, Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=atol)


def _tuple(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)

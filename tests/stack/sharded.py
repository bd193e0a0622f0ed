"""What the tests of training share: a model whose sizes no world size divides, and one process to compare with.

Every rank knows the whole batch of every step and takes its share of it. Shares are equal, so that the mean of the ranks'
means is the mean of the whole.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tests.support import everyone

TORCH = tuple(int(number) for number in torch.__version__.split(".")[:2])
ROWS = 4  # per rank
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}
SMALL = 100 / 2**20  # MiB; each of DDP's buckets takes one or two tensors

Forward = Callable[[nn.Module, Tensor], Tensor]
MakeOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]

sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)  # momentum shows a wrong gradient of an early step in all later ones
adam = partial(torch.optim.AdamW, lr=0.02, eps=1e-3)  # whose eps does not make a step of 0.02 out of rounding errors


def network(dtype: torch.dtype = torch.float64, widths: tuple[int, int, int] = (7, 5, 3)) -> nn.Sequential:
    """Equal on all ranks. Three rows in the last layer: with four ranks one rank's shard of it is empty."""
    torch.manual_seed(7)
    a, b, c = widths
    return nn.Sequential(nn.Linear(6, a), nn.Tanh(), nn.Linear(a, b), nn.LayerNorm(b), nn.Linear(b, c)).to(dtype)


def sharded(model: nn.Sequential, **options: Any) -> Any:
    """``model`` in three groups of parameters: layer 0, layer 2, and the root with the rest (collective)."""
    for layer in (model[0], model[2]):
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def ddp(model: nn.Module, group: Any = None, **options: Any) -> DistributedDataParallel:
    """``model`` with the weights of the group's first rank: all others begin with zeros (collective)."""
    with torch.no_grad():
        for p in model.parameters() if dist.get_rank(group) else ():
            p.zero_()
    return DistributedDataParallel(model, process_group=group, **options)


def zero(parameters: Iterable[Tensor], make: Any, **options: Any) -> Any:
    """``make``, a partial of an optimizer's class, with each rank's share of the state."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns at its import

    return ZeroRedundancyOptimizer(parameters, optimizer_class=make.func, **options, **make.keywords)


def batch(step: int, size: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """The whole batch of all ranks."""
    generator = torch.Generator().manual_seed(100 + step)
    rows = ROWS * size
    x, y = (torch.randn(rows, width, generator=generator, dtype=torch.float64) for width in (6, 3))
    return x.to(dtype), y.to(dtype)


def share(tensor: Tensor, rank: int) -> Tensor:
    return tensor[rank * ROWS : (rank + 1) * ROWS]


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Iterable[int],
    rank: int | None,
    size: int,
    dtype: torch.dtype = torch.float64,
) -> None:
    """The steps, on the whole batch (rank None) or on this rank's share of it."""
    for step in steps:
        x, y = batch(step, size, dtype)
        if rank is not None:
            x, y = share(x, rank), share(y, rank)
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()


def alone(
    steps: int, size: int, make: MakeOptimizer = sgd, dtype: torch.dtype = torch.float64, build: Any = network
) -> nn.Sequential:
    """What one process makes of ``build(dtype)`` on the whole batches."""
    model: nn.Sequential = build(dtype)
    train(model, make(model.parameters()), range(steps), None, size, dtype)
    return model


def backward(model: nn.Module, step: int, rank: int | None, size: int, dtype: torch.dtype = torch.float64) -> None:
    """One forward and backward; the gradients stay, or add up."""
    x, y = batch(step, size, dtype)
    if rank is not None:
        x, y = share(x, rank), share(y, rank)
    loss_of(model(x), y).backward()


def whole(tensor: Any) -> Tensor:
    """A DTensor's full tensor (collective); another tensor itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def differences(
    found: Iterable[Any], expected: Iterable[Any], tolerance: float = TOLERANCE[torch.float64], rtol: float = 0
) -> list[str]:
    """Where and by how much the whole tensors of two lists differ; empty if they do not (collective)."""
    lines = []
    for index, (mine, right) in enumerate(zip(found, expected, strict=True)):
        if mine is None or right is None:
            if mine is not right:
                lines.append(f"#{index}: {mine} for {right}")
            continue
        a, b = whole(mine).detach(), whole(right).detach()
        if a.dtype != b.dtype or a.shape != b.shape:
            lines.append(f"#{index}: {a.dtype} {tuple(a.shape)} for {b.dtype} {tuple(b.shape)}")
        elif not torch.allclose(a, b, rtol=rtol, atol=tolerance):
            lines.append(f"#{index}: differs by {(a.double() - b.double()).abs().max().item():.3g} of {b.abs().max().item():.3g}")
    return lines


def gradients(model: nn.Module) -> list[Any]:
    return [parameter.grad for parameter in model.parameters()]


def bits(tensors: Iterable[Any]) -> list[bytes]:
    """Every byte of the whole tensors."""
    return [whole(t).detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors]


def same_bits(tensors: Iterable[Any]) -> bool:
    """Whether all ranks have the same: replicas that differ in one bit drift apart, trap 32 (collective)."""
    mine = bits(tensors)
    return all(theirs == mine for theirs in everyone(mine))


def raised_anywhere(call: Callable[[], Any]) -> None:
    """Raises on all ranks the RuntimeError of any: for errors of one rank's own, before others wait for it (collective)."""
    error = ""
    try:
        call()
    except RuntimeError as refusal:
        error = str(refusal)
    said = everyone(error)
    if any(said):
        raise RuntimeError(max(said))

"""A training step of DistributedDataParallel over backend "mpi" and over Gloo, in turn on the same ranks.

A step is forward, backward and SGD on a batch of the rank. First, the gradients of two steps are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mpicoll.bench.formulas import spell
from mpicoll.bench.harness import Harness
from mpicoll.bench.output import Output
from mpicoll.bench.remote_pipeline import layers
from mpicoll.bench.row import BACKEND, GLOO, Row
from mpicoll.bench.table import milli, spread, times

MIB = 1 << 20
SIDES = {4 * MIB: 512, 64 * MIB: 1024, 256 * MIB: 1024}  # features of a layer, by bytes of all gradients
BATCH = 16
ALONE = "nothing reduced"  # the step with the buckets of DDP but without all_reduce: a lower bound
RESNET_WIDTH, IMAGES, PIXELS = 16, 4, 32  # ResNet50 with a quarter of the channels


def run(harness: Harness, output: Output, sizes: Sequence[int], resnet: bool = True) -> list[Row]:
    """Measures and prints (collective).

    Args:
        sizes: Bytes of the gradients of an MLP; keys of `SIDES`.
    """
    output.say("", "DistributedDataParallel, float32: a step in milliseconds, median [least, most]; x: the ratio to Gloo's")
    output.say(f"{'gradients':>20}{'backend mpi':>28}{'Gloo':>28}{'nothing reduced':>28}{'x Gloo':>8}{'nothing x Gloo':>16}")
    models: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
        f"MLP {spell(nbytes)}": (lambda nbytes=nbytes: mlp(nbytes), lambda nbytes=nbytes: torch.rand(BATCH, SIDES[nbytes]))  # type: ignore[misc]
        for nbytes in sizes
    }
    if resnet:
        models["ResNet50, width 16"] = (_resnet, lambda: torch.rand(IMAGES, 3, PIXELS, PIXELS))
    rows = []
    for name, (make, batch) in output.progress(models.items(), lambda model: f"DDP {model[0]}"):
        row = output.add(_row(harness, name, make, batch))
        rows.append(row)
        cells = "".join(f"{spread(row.times[way], milli):>28}" for way in (BACKEND, GLOO, ALONE))
        output.say(f"{name:>20}{cells}{times(row.ratio(BACKEND, GLOO)):>8}{times(row.ratio(ALONE, GLOO)):>16}")
    return rows


def mlp(nbytes: int) -> nn.Module:
    """Square layers with ``nbytes`` of weights in total."""
    side = SIDES[nbytes]
    linear = [nn.Linear(side, side, bias=False) for _ in range(nbytes // (4 * side * side))]
    return nn.Sequential(*(layer for pair in linear for layer in (pair, nn.ReLU())))


def _resnet() -> nn.Module:
    return nn.Sequential(layers(0, RESNET_WIDTH), layers(1, RESNET_WIDTH))


def _row(harness: Harness, name: str, make: Callable[[], nn.Module], batch: Callable[[], Tensor]) -> Row:
    torch.manual_seed(0)
    first = make()
    second = make()
    second.load_state_dict(first.state_dict())
    torch.manual_seed(1 + harness.rank)
    x = batch()
    models = {BACKEND: DistributedDataParallel(first), GLOO: DistributedDataParallel(second, process_group=harness.gloo)}
    steps: dict[str, Callable[[], None]] = {way: Step(model, x) for way, model in models.items()}
    for _ in range(2):  # DDP forms its final buckets after the first
        for step in steps.values():
            step.backward()  # type: ignore[attr-defined]
        _compare(harness, name, first, second)
    alone = DistributedDataParallel(make())
    alone.register_comm_hook(None, _as_it_is)
    steps[ALONE] = Step(alone, x)
    nbytes = sum(parameter.nbytes for parameter in first.parameters())
    return Row(f"DDP {name}", nbytes, harness.size, harness.rounds.times(steps), "float32", "AVG")


def _as_it_is(state, bucket):  # type: ignore[no-untyped-def]  # DDP refuses annotations that are texts
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


class Step:
    def __init__(self, model: nn.Module, x: Tensor) -> None:
        self.model, self.x = model, x
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.x).square().mean().backward()

    def __call__(self) -> None:
        self.backward()
        self.optimizer.step()


def _compare(harness: Harness, name: str, first: nn.Module, second: nn.Module) -> None:
    """Raises AssertionError if the gradients of the two models, or of the ranks, differ."""
    for (where, a), b in zip(first.named_parameters(), second.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-7, msg=lambda text, at=where: f"DDP {name}: {at}: {text}")  # type: ignore[misc]
    norms: list[Any] = harness.control.all([parameter.grad.norm().item() for parameter in first.parameters()])  # type: ignore[union-attr]
    if any(other != norms[0] for other in norms):
        raise AssertionError(f"DDP {name}: the ranks' gradients differ")

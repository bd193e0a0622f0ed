"""The rows of `bench step`, by the names of its option ``--rows``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpicoll.bench.steps import data_parallel, model_parallel, models
from mpicoll.bench.steps.step import Workload

MIB = 1 << 20
Maker = Callable[[int, bool], Workload]  # by number of ranks, and whether small


def _transformer(small: bool, features: int = 512, depth: int = 2) -> models.Task:
    return models.transformer(features // 4, depth, tokens=8) if small else models.transformer(features, depth)


def _resnet(small: bool) -> models.Task:
    return models.resnet18(8, 2, 32) if small else models.resnet18()


ROWS: dict[str, Maker] = {
    "mlp": lambda size, small: data_parallel.ddp(models.mlp((4 if small else 64) * MIB)),
    "resnet": lambda size, small: data_parallel.ddp(_resnet(small)),
    "transformer": lambda size, small: data_parallel.ddp(_transformer(small)),
    "buckets": lambda size, small: data_parallel.ddp(_transformer(small), 4 * MIB),
    "bf16": lambda size, small: data_parallel.ddp(_transformer(small), half=True),
    "large": lambda size, small: data_parallel.ddp(_transformer(small, 1024)),
    "fsdp": lambda size, small: data_parallel.fsdp(_transformer(small)),
    "1f1b": lambda size, small: model_parallel.pipeline("1F1B", _transformer(small, depth=size)),
    "gpipe": lambda size, small: model_parallel.pipeline("GPipe", _transformer(small, depth=size)),
    "tensor": lambda size, small: model_parallel.tensor(_transformer(small)),
}


def steps(names: Sequence[str], size: int, small: bool) -> list[Workload]:
    return [ROWS[name](size, small) for name in names]


def ddp(sizes: Sequence[int], resnet: bool) -> list[Workload]:
    """The rows of `bench ddp`: MLPs with so many bytes of gradients, keys of `models.SIDES`, and a narrow ResNet50."""
    tasks = [models.mlp(nbytes) for nbytes in sizes] + ([models.resnet50()] if resnet else [])
    return [data_parallel.ddp(task) for task in tasks]

"""FullyShardedDataParallel (FSDP1) on the CPU, which fully_shard has superseded: a few cases of what it sends, and its state.

With one rank FSDP1 shards nothing (NO_SHARD); what is about shards needs two.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from tests.stack.sharded import TOLERANCE, adam, alone, differences, network, train
from tests.support import agree

SECTION = "Fully sharded"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*_get_pg_default_device", "ignore:Multiple backends are registered"),
    pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`", "ignore:When using ``NO_SHARD``"),
    pytest.mark.filterwarnings("ignore:FSDP will not all-gather parameters for containers:UserWarning"),
]

FP32, FP64 = torch.float32, torch.float64


def wrapped(**options: Any) -> Any:
    """A network with each Linear a unit of its own, on the CPU (collective)."""
    dtype = options.pop("dtype", FP64)
    policy = ModuleWrapPolicy({nn.Linear})
    return FullyShardedDataParallel(network(dtype), auto_wrap_policy=policy, device_id=torch.device("cpu"), **options)


def wrong_weights(model: Any, right: nn.Module, tolerance: float = TOLERANCE[FP64]) -> list[str]:
    """Differences of the whole weights (collective)."""
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return differences(model.parameters(), right.parameters(), tolerance)


@pytest.mark.feature("FSDP1 (device_id=cpu): FULL_SHARD, NO_SHARD, HYBRID_SHARD; use_orig_params on and off")
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD", "HYBRID_SHARD"])
@pytest.mark.parametrize(("orig", "dtype"), [(False, FP64), (True, FP32)], ids=["flat", "orig_params-float32"])
def test_equals_one_process(orig: bool, dtype: torch.dtype, strategy: str, rank: int, size: int) -> None:
    """The flat parameter is padded to a multiple of the world size, and its gathers are list gathers into one buffer."""
    shape = (size // 2, 2) if size % 2 == 0 else (1, size)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")) if strategy == "HYBRID_SHARD" else None
    model = wrapped(dtype=dtype, sharding_strategy=ShardingStrategy[strategy], use_orig_params=orig, device_mesh=mesh)
    train(model, adam(model.parameters()), range(4), rank, size, dtype)
    bad = wrong_weights(model, alone(4, size, adam, dtype), TOLERANCE[dtype])
    agree(not bad, bad)


@pytest.mark.feature("FSDP1: state dict and optimizer state, whole and sharded (ShardedTensor, DTensor), set back and trained on")
@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("kind", ["whole", "sharded-tensor", "dtensor"])
def test_training_goes_on_from_the_state(kind: str, rank: int, size: int) -> None:
    """Two steps, everything into a new model and optimizer, two more: as four without a break."""
    mesh = init_device_mesh("cpu", (size,)) if kind == "dtensor" else None
    which = StateDictType.FULL_STATE_DICT if kind == "whole" else StateDictType.SHARDED_STATE_DICT
    model = wrapped(device_mesh=mesh)
    optimizer = adam(model.parameters())
    train(model, optimizer, range(2), rank, size)
    with FullyShardedDataParallel.state_dict_type(model, which):
        weights, state = model.state_dict(), FullyShardedDataParallel.optim_state_dict(model, optimizer)
    kinds = {type(value).__name__ for value in weights.values()}
    other = wrapped(device_mesh=mesh)
    another = adam(other.parameters())
    with FullyShardedDataParallel.state_dict_type(other, which):
        other.load_state_dict(weights)
        another.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(other, another, state))
    train(other, another, range(2, 4), rank, size)
    bad = wrong_weights(other, alone(4, size, adam))
    agree(not bad and kinds == {{"whole": "Tensor", "sharded-tensor": "ShardedTensor", "dtensor": "DTensor"}[kind]}, (bad, kinds))

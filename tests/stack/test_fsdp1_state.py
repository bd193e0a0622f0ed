"""The state of FullyShardedDataParallel (FSDP1) on the CPU over MPI: each kind of state dict, for the model and its optimizer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor

from tests.stack.record import refused_alike
from tests.stack.sharded import TORCH, adam, alone, differences, network, raised_anywhere, train
from tests.support import agree

SECTION = "Fully sharded"

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*_get_pg_default_device", "ignore:Multiple backends are registered"),
    pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`", "ignore:When using ``NO_SHARD``"),  # one rank
]

orig = pytest.mark.parametrize("orig", [False, True], ids=["flat", "orig_params"])


def wrapped(orig: bool, mesh: Any = None) -> tuple[Any, torch.optim.Optimizer]:
    policy = ModuleWrapPolicy({torch.nn.Linear})
    model = FSDP(network(), auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=orig, device_mesh=mesh)
    return model, adam(model.parameters())


def fresh(orig: bool, mesh: Any = None) -> tuple[Any, torch.optim.Optimizer]:
    """With other weights."""
    model, optimizer = wrapped(orig, mesh)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.5)
    return model, optimizer


def wrong_weights(model: Any, right: Any) -> list[str]:
    with FSDP.summon_full_params(model, writeback=False):
        return differences(model.parameters(), right.parameters())


def wrong_state(state: dict[str, Any], right: dict[str, Tensor]) -> list[str]:
    if state.keys() != right.keys():
        return [f"{sorted(state)} for {sorted(right)}"]
    return differences(state.values(), right.values())


@pytest.mark.feature("FSDP1: state dict, whole, on all ranks or on rank 0, loaded again")
@orig
@pytest.mark.parametrize("only_rank_0", [False, True], ids=["everywhere", "rank-0"])
def test_whole_state(only_rank_0: bool, orig: bool, rank: int, size: int) -> None:
    """The weights of one process, under its names, without padding."""
    model, optimizer = wrapped(orig)
    train(model, optimizer, range(2), rank, size)
    right = alone(2, size, adam)
    config = FullStateDictConfig(rank0_only=only_rank_0, offload_to_cpu=only_rank_0 and TORCH >= (2, 14))
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        state = model.state_dict()
    train(model, optimizer, [2], rank, size)  # what was kept stays as it was
    bad = wrong_state(state, right.state_dict()) if not only_rank_0 or rank == 0 else [f"{sorted(state)}"] * bool(state)
    other, _ = fresh(orig)
    with FSDP.state_dict_type(other, StateDictType.FULL_STATE_DICT):
        other.load_state_dict(right.state_dict())
    bad += wrong_weights(other, right)
    agree(not bad, bad)


@pytest.mark.feature("FSDP1: state dict, whole, on all ranks or on rank 0, loaded again")
@pytest.mark.min_ranks(2)
@pytest.mark.skipif(TORCH >= (2, 14), reason="torch 2.14 mended it")
def test_what_is_on_the_cpu_is_not_offloaded(request: pytest.FixtureRequest) -> None:
    """torch frees on rank 0 what it has "copied" to the CPU."""

    def call(group: Any) -> None:
        model = FSDP(network(), group, device_id=torch.device("cpu"))
        with FSDP.state_dict_type(
            model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
        ):
            raised_anywhere(model.state_dict)

    what = "FSDP1: FullStateDictConfig(offload_to_cpu=True, rank0_only=True)"
    said = refused_alike(what, call, request.node, RuntimeError)
    agree("storage" in said, said)


@pytest.mark.feature("FSDP1: state dict, sharded (ShardedTensor, DTensor) and local")
@pytest.mark.min_ranks(2)
@pytest.mark.parametrize(
    ("kind", "orig"),
    [("sharded-tensor", False), ("sharded-tensor", True), ("dtensor", False), ("dtensor", True), ("local", False)],
)
def test_state_in_shards(kind: str, orig: bool, rank: int, size: int) -> None:
    """Each rank keeps its part, and a new model of the same sharding takes it back."""
    mesh = init_device_mesh("cpu", (size,)) if kind == "dtensor" else None
    model, optimizer = wrapped(orig, mesh)
    train(model, optimizer, range(2), rank, size)
    which = StateDictType.LOCAL_STATE_DICT if kind == "local" else StateDictType.SHARDED_STATE_DICT
    with FSDP.state_dict_type(model, which):
        state = copy.copy(model.state_dict())
    kinds = {type(v).__name__ for v in state.values()}
    expected = {"sharded-tensor": {"ShardedTensor"}, "dtensor": {"DTensor"}, "local": {"ShardedTensor"}}[kind]
    other, _ = fresh(orig, mesh)
    with FSDP.state_dict_type(other, which):
        other.load_state_dict(state)
    bad = wrong_weights(other, alone(2, size, adam))
    if kind == "dtensor":
        bad += wrong_state(state, alone(2, size, adam).state_dict())
    agree(not bad and kinds == expected, (bad, kinds))


def optimizer_configs(kind: str) -> tuple[StateDictType, Any, Any]:
    if kind == "sharded":
        return StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), ShardedOptimStateDictConfig()
    rank0 = kind == "rank-0"
    # "Offloaded" to the CPU on the CPU, all states of a parameter would be views of one buffer (torch's; on Gloo as well).
    config = FullStateDictConfig(rank0_only=rank0), FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=rank0)
    return StateDictType.FULL_STATE_DICT, *config


@pytest.mark.feature("FSDP1: optimizer state (optim_state_dict), whole and sharded, set back and trained on")
@orig
@pytest.mark.parametrize("kind", ["whole", "rank-0", "sharded"])
def test_optimizer_state(kind: str, orig: bool, rank: int, size: int) -> None:
    """Two steps, everything into a new model and optimizer, two more: as four without a break."""
    mesh = init_device_mesh("cpu", (size,)) if kind == "sharded" else None
    model, optimizer = wrapped(orig, mesh)
    train(model, optimizer, range(2), rank, size)
    with FSDP.state_dict_type(model, *optimizer_configs(kind)):
        weights, state = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
    bad = []
    if kind != "sharded" and (rank == 0 or kind == "whole"):
        reference = network()
        plain = adam(reference.parameters())
        train(reference, plain, range(2), None, size)
        names = dict(zip([name for name, _ in reference.named_parameters()], plain.state.values(), strict=True))
        pairs = [(state["state"][name][key], value) for name, right in names.items() for key, value in right.items()]
        bad += differences([a for a, _ in pairs], [b for _, b in pairs])
    other, another = fresh(orig, mesh)
    if kind == "rank-0":
        weights = network().state_dict()
        with FSDP.summon_full_params(model, writeback=False):
            for p, q in zip(weights.values(), model.parameters(), strict=True):
                p.copy_(q)
    with FSDP.state_dict_type(other, *optimizer_configs("whole" if kind == "rank-0" else kind)):
        other.load_state_dict(weights)
    with FSDP.state_dict_type(other, *optimizer_configs(kind)):
        another.load_state_dict(FSDP.optim_state_dict_to_load(other, another, state))
    train(other, another, range(2, 4), rank, size)
    bad += wrong_weights(other, alone(4, size, adam))
    agree(not bad, bad)


@pytest.mark.feature("FSDP1: optimizer state by the older functions (full, shard_full, scatter_full, rekey)")
@pytest.mark.parametrize("how", ["shard", "scatter"])
def test_older_functions_of_optimizer_state(how: str, rank: int, size: int) -> None:
    """full_optim_state_dict on rank 0; scattered from there, or cut on every rank."""
    model, optimizer = wrapped(False)
    train(model, optimizer, range(2), rank, size)
    state = FSDP.full_optim_state_dict(model, optimizer, rank0_only=how == "scatter")
    other, another = wrapped(False)
    with FSDP.state_dict_type(other, StateDictType.FULL_STATE_DICT):
        other.load_state_dict(alone(2, size, adam).state_dict())
    if how == "scatter":
        mine = FSDP.scatter_full_optim_state_dict(state if rank == 0 else None, other, optim=another)
    else:
        mine = FSDP.shard_full_optim_state_dict(state, other, optim=another)
    another.load_state_dict(mine)
    train(other, another, range(2, 4), rank, size)
    bad = wrong_weights(other, alone(4, size, adam))
    agree(not bad, bad)


@pytest.mark.feature("FSDP1: torch.distributed.checkpoint, and its state_dict functions")
@pytest.mark.min_ranks(2)
@orig
@pytest.mark.parametrize("full", [False, True], ids=["sharded", "whole"])
def test_checkpoint(full: bool, orig: bool, rank: int, size: int, shared_path: Path) -> None:
    """Saved from one model and loaded into another, by the functions that serve FSDP1 and FSDP2 alike."""
    mesh = init_device_mesh("cpu", (size,))
    model, optimizer = wrapped(orig, mesh)
    train(model, optimizer, range(2), rank, size)
    options = StateDictOptions(full_state_dict=full)
    weights, state = get_state_dict(model, optimizer, options=options)
    other, another = fresh(orig, mesh)
    if not full:
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=shared_path)
        weights, state = get_state_dict(other, another, options=options)
        dcp.load({"model": weights, "optimizer": state}, checkpoint_id=shared_path)
    set_state_dict(other, another, model_state_dict=weights, optim_state_dict=state, options=options)
    train(other, another, range(2, 4), rank, size)
    bad = wrong_weights(other, alone(4, size, adam))
    agree(not bad and all(isinstance(w, DTensor) != full for w in weights.values()), bad)

"""The state of fully_shard's models and optimizers over MPI: whole, sharded, back again, and into another sharding."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.stack.sharded import adam, alone, differences, network, sharded, train
from tests.support import agree, everyone

SECTION = "Fully sharded"

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.distributed.*:FutureWarning", "ignore:TypedStorage is deprecated")

FULL = StateDictOptions(full_state_dict=True)
ON_RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
STATE = "fully_shard: optimizer state, whole and sharded, set back and trained on"


def trained(steps: int, rank: int, size: int, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = sharded(network(), **options)
    optimizer = adam(model.parameters())
    train(model, optimizer, range(steps), rank, size)
    return model, optimizer


def fresh(**options: Any) -> tuple[Any, torch.optim.Optimizer]:
    """Another model, not yet trained, with other weights."""
    model = network()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.5)
    sharded(model, **options)
    return model, adam(model.parameters())


def same(state: dict[str, Any], right: dict[str, Tensor]) -> list[str]:
    """What is wrong with a whole state dict."""
    if state.keys() != right.keys():
        return [f"{sorted(state)} for {sorted(right)}"]
    kinds = [f"{name} is a {type(value).__name__}" for name, value in state.items() if isinstance(value, DTensor)]
    return kinds + differences(state.values(), right.values())


@pytest.mark.feature("fully_shard: state dict, whole (full_state_dict), on all ranks or on rank 0")
def test_whole_state(rank: int, size: int) -> None:
    """The names and shapes of the model as it was before it was sharded, without the padding of uneven shards."""
    model, _ = trained(2, rank, size)
    right = alone(2, size, adam).state_dict()
    bad = same(get_model_state_dict(model, options=FULL), right)
    state = get_model_state_dict(model, options=ON_RANK_0)
    bad += same(state, right) if rank == 0 else [f"rank {rank} got {sorted(state)}"] * bool(state)
    agree(not bad, bad)


@pytest.mark.feature("fully_shard: state dict, whole, set back (also broadcast from rank 0)")
@pytest.mark.parametrize("options", [FULL, FROM_RANK_0], ids=["everywhere", "from-rank-0"])
def test_whole_state_is_set_back(options: StateDictOptions, rank: int, size: int) -> None:
    """Each rank takes its own part of what all of them, or rank 0 alone, hold."""
    right = alone(2, size, adam)
    model, _ = fresh()
    state = right.state_dict() if rank == 0 or options is FULL else {}
    set_model_state_dict(model, state, options=options)
    bad = differences(model.parameters(), right.parameters(), 0)
    agree(not bad and all(isinstance(p, DTensor) for p in model.parameters()), bad)


@pytest.mark.feature("fully_shard: state dict, sharded, loaded and copied")
def test_sharded_state(rank: int, size: int) -> None:
    """state_dict() and get_model_state_dict() hold this rank's shards, which share memory with the parameters."""
    model, _ = trained(2, rank, size)
    states = [model.state_dict(), get_model_state_dict(model)]
    kinds = {(type(v), v.placements) for state in states for v in state.values()}
    bad = [f"{kinds}"] if kinds != {(DTensor, (Shard(0),))} else []
    for load in (
        lambda m: m.load_state_dict(states[0]),
        lambda m: m.load_state_dict(states[0], assign=True),
        lambda m: set_model_state_dict(m, states[1]),
    ):
        other, _ = fresh()
        load(other)
        bad += differences(other.parameters(), model.parameters(), 0)
        x = torch.ones(2, 6, dtype=torch.float64)
        bad += differences([other(x)], [model(x)], 0)
    agree(not bad, bad)


@pytest.mark.feature("fully_shard: state dict, sharded, loaded and copied")
def test_whole_weights_are_distributed(rank: int, size: int) -> None:
    """distribute_tensor scatters rank 0's tensor: the others' may hold anything."""
    model, _ = fresh()
    right = alone(1, size, adam).state_dict()
    parts = {}
    for name, p in model.state_dict().items():
        value = right[name] if rank == 0 else torch.full_like(right[name], rank)
        parts[name] = distribute_tensor(value, p.device_mesh, p.placements)
    model.load_state_dict(parts)
    bad = same(get_model_state_dict(model, options=FULL), right)
    agree(not bad, bad)


@pytest.mark.feature(STATE)
@pytest.mark.parametrize("kind", ["whole", "from-rank-0", "sharded", "by-id"])
def test_training_goes_on_from_the_state(kind: str, rank: int, size: int) -> None:
    """Two steps, everything into a new model and optimizer, two more steps: as four without a break."""
    model, optimizer = trained(2, rank, size)
    other, another = fresh()
    options = {"whole": FULL, "from-rank-0": ON_RANK_0, "sharded": None}
    if kind == "by-id":
        other.load_state_dict(model.state_dict())
        another.load_state_dict(optimizer.state_dict())
    else:
        weights, state = get_state_dict(model, optimizer, options=options[kind])
        back = FROM_RANK_0 if kind == "from-rank-0" else options[kind]
        set_model_state_dict(other, weights, options=back)  # set_state_dict at once leaves out the model where it is empty
        set_optimizer_state_dict(other, another, state, options=back)
    train(other, another, range(2, 4), rank, size)
    bad = differences(other.parameters(), alone(4, size, adam).parameters())
    agree(not bad, bad)


@pytest.mark.feature(STATE)
def test_optimizer_state_of_one_process(rank: int, size: int) -> None:
    """The whole state is one process's: the same names, the same numbers, the steps not added up."""
    model, optimizer = trained(3, rank, size)
    reference = network()
    plain = adam(reference.parameters())
    train(reference, plain, range(3), None, size)
    found = get_optimizer_state_dict(model, optimizer, options=FULL)
    right = get_optimizer_state_dict(reference, plain)
    names = [(name, key) for name, state in right["state"].items() for key in state]
    bad = differences([found["state"][n][k] for n, k in names], [right["state"][n][k] for n, k in names])
    other, another = fresh()
    set_model_state_dict(other, reference.state_dict(), options=FULL)
    set_optimizer_state_dict(other, another, copy.deepcopy(right), options=FULL)  # it keeps the very tensors of `step`
    train(other, another, [3], rank, size)
    train(reference, plain, [3], None, size)
    bad += differences(other.parameters(), reference.parameters())
    agree(not bad and found["param_groups"] == right["param_groups"], bad)


@pytest.mark.feature("fully_shard: checkpoint saved and loaded into another mesh (torch.distributed.checkpoint)")
@pytest.mark.parametrize("way", ["to-hybrid", "from-hybrid"])
def test_checkpoint_into_another_mesh(way: str, rank: int, size: int, shared_path: Path) -> None:
    """Shards of all ranks become replicated shards, and the reverse: files are read by position in the whole tensor."""
    rows = 2 if size % 2 == 0 else 1
    hybrid = {"mesh": init_device_mesh("cpu", (rows, size // rows), mesh_dim_names=("replicate", "shard"))}
    here, there = ({}, hybrid) if way == "to-hybrid" else (hybrid, {})
    model, optimizer = trained(2, rank, size, **here)
    states = get_state_dict(model, optimizer)
    dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=shared_path)
    other, another = fresh(**there)
    wanted = get_state_dict(other, another)
    state = {"model": wanted[0], "optimizer": wanted[1]}
    dcp.load(state, checkpoint_id=shared_path)
    set_state_dict(other, another, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    train(other, another, range(2, 4), rank, size)
    bad = differences(other.parameters(), alone(4, size, adam).parameters())
    agree(not bad and len(other[0].weight.placements) == (2 if there else 1), bad)


@pytest.mark.feature("fully_shard: parameters redistributed by hand, replicated and back")
def test_parameters_are_dtensors(rank: int, size: int) -> None:
    """Arithmetic on the shards is arithmetic on the whole: an average of weights kept beside the training."""
    model, _ = trained(1, rank, size)
    averages = [p.detach().clone() for p in model.parameters()]
    train(model, adam(model.parameters()), [1], rank, size)
    for average, p in zip(averages, model.parameters(), strict=True):
        average.lerp_(p.detach(), 0.25)
    wholes = [a.redistribute(placements=[Replicate()]) for a in averages]
    before, after = alone(1, size, adam), alone(1, size, adam)
    train(after, adam(after.parameters()), [1], None, size)
    right = [p.detach().lerp(q.detach(), 0.25) for p, q in zip(before.parameters(), after.parameters(), strict=True)]
    bad = differences([w.to_local() for w in wholes], right)
    bad += differences([w.redistribute(placements=[Shard(0)]) for w in wholes], averages, 0)
    agree(not bad, bad)


@pytest.mark.feature("fully_shard: shared (tied) weights")
def test_tied_weights(rank: int, size: int) -> None:
    """One parameter under two names is gathered once, and its gradient is the sum of both uses."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.first, self.middle, self.last = nn.Linear(6, 3), nn.Linear(3, 6), nn.Linear(6, 3)
            self.last.weight = self.first.weight
            self.double()

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.tanh(self.middle(self.first(x))))

    model, reference = Tied(), Tied()
    make = partial(torch.optim.SGD, lr=0.1)
    fully_shard(model.middle)
    fully_shard(model)
    train(model, make(model.parameters()), range(3), rank, size)
    train(reference, make(reference.parameters()), range(3), None, size)
    state = get_model_state_dict(model, options=FULL)
    bad = differences([state["first.weight"], state["last.weight"]], [reference.first.weight, reference.last.weight])
    agree(not bad and everyone(len(list(model.parameters()))) == [5] * size, bad)

"""torch.distributed.checkpoint.state_dict over MPI: a state taken from DDP or fully_shard goes into either, and training goes on.

Everything is compared with one process that trains on the whole batches and never stops.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
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
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from tests.stack import sharded
from tests.support import agree

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
]

Make = Callable[[int], Any]
FULL = StateDictOptions(full_state_dict=True)
RANK_0 = StateDictOptions(full_state_dict=True, cpu_offload=True)
RATES = {0: 0.3, 2: 0.2}  # of a layer
BROADCAST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def replicated(size: int) -> nn.Module:
    return DistributedDataParallel(sharded.network())


def fully_sharded(size: int) -> nn.Module:
    return sharded.sharded(sharded.network(), mesh=init_device_mesh("cpu", (size,)))


def hybrid(size: int) -> nn.Module:
    """Replicated over one dimension of the mesh, sharded over the other."""
    shape = (2, size // 2) if size % 2 == 0 else (1, size)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    return sharded.sharded(sharded.network(), mesh=mesh)


def from_nothing(size: int) -> nn.Module:
    """On the meta device first: this rank has never had the weights."""
    with torch.device("meta"):
        model = fully_sharded(size)
    return model.to_empty(device="cpu")


def begun(make: Make, rank: int | None, size: int, steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make(size)
    made = sharded.adam(model.parameters())
    sharded.train(model, made, range(steps), rank, size)
    return model, made


def differing(found: Any, expected: Any, key: str = "") -> list[str]:
    """Where two nested states differ, but for rounding."""
    if isinstance(expected, dict):
        if found.keys() != expected.keys():
            return [f"{key}: keys {sorted(found.keys() ^ expected.keys())}"]
        return [line for name in expected for line in differing(found[name], expected[name], f"{key}.{name}")]
    alike = found == expected if not isinstance(expected, Tensor) else type(found) is Tensor and found.shape == expected.shape
    if alike is True and isinstance(expected, Tensor):
        alike = torch.allclose(found, expected, rtol=0, atol=1e-12)
    return [] if alike else [f"{key}: {found} for {expected}"]


@pytest.mark.parametrize("make", [replicated, hybrid], ids=lambda make: make.__name__)
def test_full(make: Make, rank: int, size: int) -> None:
    """Names without prefixes, plain tensors, momenta by parameter's name; on all ranks, or with cpu_offload on rank 0 alone."""
    model, made = begun(make, rank, size)
    reference, plain = begun(lambda _: sharded.network(), None, size)
    expected = get_state_dict(reference, plain, options=FULL)
    found = get_state_dict(model, made, options=FULL)
    wrong = differing(found[0], expected[0]) + differing(found[1]["state"], expected[1]["state"])
    names = [group["params"] for group in found[1]["param_groups"]]
    wrong += [] if names == [group["params"] for group in expected[1]["param_groups"]] else [str(names)]
    wrong += [] if list(found[0]) == list(reference.state_dict()) else [str(list(found[0]))]
    on_rank_0 = get_model_state_dict(model, options=RANK_0)
    if make is not replicated:  # whose tensors are whole on every rank as it is
        wrong += differing(on_rank_0, expected[0]) if rank == 0 else [str(on_rank_0)] * bool(on_rank_0)
    agree(not wrong, wrong)


def hand_over(how: str, model: nn.Module, made: Any, to: nn.Module, optimizer: Any, rank: int, path: Path) -> None:
    """The whole state of one into the other."""
    if how == "dcp":
        state, moments = get_state_dict(model, made)
        dcp.save({"model": state, "optimizer": moments}, checkpoint_id=path)
        found = dict(zip(("model", "optimizer"), get_state_dict(to, optimizer), strict=True))
        dcp.load(found, checkpoint_id=path)
        set_state_dict(to, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
        return
    if how in ("sharded", "flat"):
        shards = StateDictOptions(cpu_offload=True, flatten_optimizer_state_dict=how == "flat")
        state, moments = get_state_dict(model, made, options=shards)
        assert all(isinstance(value, DTensor) for value in state.values()), state
        assert ("state.0.weight.exp_avg" in moments) if how == "flat" else set(moments) == {"state", "param_groups"}, moments
        set_state_dict(to, optimizer, model_state_dict=state, optim_state_dict=moments, options=shards)
        return
    state, moments = get_state_dict(model, made, options=FULL)
    if how == "broadcast" and rank:
        state, moments = {}, {}
    options = BROADCAST if how == "broadcast" else FULL
    set_model_state_dict(to, state, options=options)
    set_optimizer_state_dict(to, optimizer, moments, options=options)


@pytest.mark.parametrize(
    ("how", "before", "after"),
    [
        *(
            pytest.param(how, before, after, id=f"{how}-{before.__name__}-{after.__name__}")
            for how in ("dcp", "full", "broadcast")
            for before, after in ((replicated, replicated), (replicated, fully_sharded), (fully_sharded, hybrid))
        ),
        *(pytest.param(how, fully_sharded, fully_sharded, id=how) for how in ("sharded", "flat")),
        pytest.param("broadcast", replicated, from_nothing, id="meta"),
    ],
)
def test_resumed(how: str, before: Make, after: Make, rank: int, size: int, shared_path: Path) -> None:
    """Two steps, the state into a model that is fresh on every rank, and two more; from rank 0 alone, or from every rank."""
    model, made = begun(before, rank, size)
    other = after(size)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.fill_(rank)
    optimizer = sharded.adam(other.parameters())
    hand_over(how, model, made, other, optimizer, rank, shared_path)
    sharded.train(other, optimizer, range(2, 4), rank, size)
    wrong = sharded.differences(other.parameters(), sharded.alone(4, size, sharded.adam).parameters())
    agree(not wrong, wrong)


def test_parts(rank: int, size: int) -> None:
    """What is left out stays what it was."""
    model: Any = fully_sharded(size)
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    trained = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, ignore_frozen_params=True))
    changed = {name: value + 1 for name, value in trained.items()}
    before = {name: sharded.whole(value).clone() for name, value in model.state_dict().items()}
    set_model_state_dict(model, changed, options=StateDictOptions(full_state_dict=True, strict=False))
    after = {name: sharded.whole(value) for name, value in model.state_dict().items()}
    wrong = [name for name in before if not torch.equal(after[name], before[name] + (name.partition(".")[0] != "0"))]
    agree(set(trained) == {name for name in before if not name.startswith("0.")} and not wrong, (wrong, list(trained)))


class Everything:
    """All that a training has, as dcp's tutorial keeps it: one Stateful object."""

    def __init__(self, make: Make, size: int) -> None:
        self.model: Any = make(size)
        self.optimizer = sharded.adam(self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        self.generator = torch.Generator().manual_seed(5 + dist.get_rank())
        self.epoch = 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        mine = f"generator {dist.get_rank()}"
        more = {"schedule": self.schedule.state_dict(), mine: self.generator.get_state(), "epoch": self.epoch}
        return {"model": model, "optimizer": optimizer, **more}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.generator.set_state(state[f"generator {dist.get_rank()}"])
        self.epoch = state["epoch"]

    def train(self, steps: int) -> None:
        for _ in range(steps):
            x = torch.randn(sharded.ROWS, 6, generator=self.generator, dtype=torch.float64)
            self.optimizer.zero_grad()
            self.model(x).square().mean().backward()
            self.optimizer.step()
            self.schedule.step()
            self.epoch += 1


@pytest.mark.parametrize("make", [replicated, fully_sharded], ids=lambda make: make.__name__)
def test_a_whole_training(make: Make, rank: int, size: int, shared_path: Path) -> None:
    """Each rank's random numbers go on where that rank's were; the learning rate has been halved once before and once after."""
    never_stopped = Everything(make, size)
    never_stopped.train(3)
    dcp.save({"training": never_stopped}, checkpoint_id=shared_path)
    never_stopped.train(3)
    resumed = Everything(make, size)
    resumed.train(1)
    dcp.load({"training": resumed}, checkpoint_id=shared_path)
    resumed.train(3)
    wrong = sharded.differences(resumed.model.parameters(), never_stopped.model.parameters(), 0)
    rates = [training.optimizer.param_groups[0]["lr"] for training in (resumed, never_stopped)]
    agree(not wrong and rates[0] == rates[1] and resumed.epoch == 6, (wrong, rates))


def test_parameter_groups(rank: int, size: int) -> None:
    """Groups with their own learning rates keep them, by parameters' names."""
    model, other = fully_sharded(size), fully_sharded(size)
    optimizer, plain = (
        torch.optim.SGD([{"params": list(m[i].parameters()), "lr": lr * (m is model)} for i, lr in RATES.items()], momentum=0.9)
        for m in (model, other)
    )
    sharded.train(model, optimizer, range(1), rank, size)
    state: Any = get_optimizer_state_dict(model, optimizer, options=FULL)
    found = {name: group["lr"] for group in state["param_groups"] for name in group["params"]}
    set_optimizer_state_dict(other, plain, state, options=FULL)
    rates = [group["lr"] for group in plain.param_groups]
    names = {f"{layer}.{name}": rate for layer, rate in RATES.items() for name in ("weight", "bias")}
    agree(found == names and rates == list(RATES.values()), (found, rates))

"""Checkpoints saved by some ranks and loaded by fewer or more, in the same job and in another; and torch's own file formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import (
    BroadcastingTorchSaveReader,
    DynamicMetaLoadPlanner,
    dcp_to_torch_save,
    torch_save_to_dcp,
)
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor, init_device_mesh, zeros

from tests.stack import sharded
from tests.support import agree, everyone, launch

SECTION = "State"

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.distributed is disabled, unavailable or uninitialized:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*_get_pg_default_device:UserWarning"),
    pytest.mark.filterwarnings("ignore:Multiple backends are registered:UserWarning"),
]


class Part:
    """The first ``count`` ranks as a world of their own; None as its mesh elsewhere.

    Its group is left to the end of the world: torch keeps plans by the ranks of a mesh, with the names of their groups in them.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.group: Any = dist.new_group(list(range(count)))
        self.inside = dist.get_rank() < count
        self.mesh = DeviceMesh.from_group(self.group, "cpu") if self.inside else None


@pytest.fixture
def parts(size: int) -> list[Part]:
    """Of 1, 2 ... all ranks."""
    return [Part(count) for count in range(1, size + 1)]


PLACEMENTS: list[Placement] = [Shard(0), Shard(1), Replicate()]
WHOLES = {"odd": torch.arange(33.0).reshape(11, 3), "few": torch.arange(6).reshape(2, 3)}
PAIRS = {f"{name} {i} {j}": (name, i, j) for name in WHOLES for i in range(3) for j in range(3)}  # saved as i, loaded as j


@pytest.mark.feature("checkpoint: saved by some ranks, loaded by fewer or more (4 and 2)")
@pytest.mark.min_ranks(2)
def test_other_number_of_ranks(parts: list[Part], rank: int, size: int, shared_path: Path) -> None:
    """Between every two numbers of ranks, and every two placements: pieces come from several files, or from a part of one."""
    for part in parts:
        if part.inside:
            state = {key: distribute_tensor(WHOLES[name], part.mesh, [PLACEMENTS[i]]) for key, (name, i, _) in PAIRS.items()}
            dcp.save({**state, "ranks": part.count}, checkpoint_id=shared_path / f"{part.count}", process_group=part.group)
    dist.barrier()
    wrong = []
    for saver in parts:
        for loader in parts:
            if loader.inside:
                target: dict[str, Any] = {"ranks": -1}
                for key, (name, _, j) in PAIRS.items():
                    like = WHOLES[name]
                    target[key] = zeros(like.shape, dtype=like.dtype, device_mesh=loader.mesh, placements=[PLACEMENTS[j]])
                dcp.load(target, checkpoint_id=shared_path / f"{saver.count}", process_group=loader.group)
                bad = [key for key, (name, _, _) in PAIRS.items() if not torch.equal(target[key].full_tensor(), WHOLES[name])]
                wrong += [(saver.count, loader.count, bad)] if bad or target["ranks"] != saver.count else []
    agree(not wrong, wrong)


def train_on(part: Part, model: Any, optimizer: Any, steps: range, rows: int) -> None:
    """On the part's share of a batch that does not depend on how many they are."""
    for step in steps:
        x, y = (whole[:rows].chunk(part.count)[dist.get_rank()] for whole in sharded.batch(step, rows // sharded.ROWS))
        optimizer.zero_grad()
        sharded.loss_of(model(x), y).backward()
        optimizer.step()


@pytest.mark.feature("checkpoint: fully_shard and AdamW resumed on fewer ranks, then on more")
@pytest.mark.min_ranks(2)
def test_training_goes_on(parts: list[Part], rank: int, size: int, shared_path: Path) -> None:
    """All ranks, then half of them, then all again; at the end the parameters are those of one process that never stopped."""
    rows, wrong = 24, []
    lives = [parts[-1], parts[max(1, size // 2) - 1], parts[-1]]
    for life, part in enumerate(lives):
        if part.inside:
            model = sharded.sharded(sharded.network(), mesh=part.mesh)
            optimizer = sharded.adam(model.parameters())
            if life:
                state, moments = get_state_dict(model, optimizer)  # lets an optimizer without state step once: not in the first
                loaded = {"model": state, "optimizer": moments}
                dcp.load(loaded, checkpoint_id=shared_path / f"{life - 1}", process_group=part.group)
                set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
            train_on(part, model, optimizer, range(2 * life, 2 * life + 2), rows)
            state, moments = get_state_dict(model, optimizer)
            dcp.save({"model": state, "optimizer": moments}, checkpoint_id=shared_path / f"{life}", process_group=part.group)
            if life == len(lives) - 1:
                reference = sharded.alone(6, rows // sharded.ROWS, sharded.adam)
                wrong = sharded.differences(model.parameters(), reference.parameters())
        dist.barrier()
    agree(not wrong, wrong)


@pytest.mark.feature("checkpoint: saved by a job of 4 ranks, loaded by a job of 2")
@pytest.mark.launch
@pytest.mark.timeout(120)
def test_another_job(shared_path: Path) -> None:
    """Training that four ranks have begun, two go on with: equal to one process, optimizer included."""
    for ranks, first in ((4, 0), (2, 2)):
        done = launch(ranks, "tests/stack/scripts/resume.py", str(shared_path / "saved"), timeout_s=55)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count(f"steps {first} to {first + 2}") == ranks, done.stdout + done.stderr


def trained(rank: int, size: int) -> Any:
    model = sharded.sharded(sharded.network(), mesh=init_device_mesh("cpu", (size,)))
    sharded.train(model, sharded.sgd(model.parameters()), range(1), rank, size)
    return model


@pytest.mark.feature("checkpoint: into a torch.save file and back (format_utils)")
def test_formats(rank: int, size: int, shared_path: Path) -> None:
    """A sharded checkpoint becomes one file that torch.load reads, and a file a checkpoint that every rank reads its shard of."""
    model = trained(rank, size)
    full = {name: sharded.whole(value).clone() for name, value in model.state_dict().items()}
    dcp.save({"model": model.state_dict()}, checkpoint_id=shared_path / "sharded")
    said = ""
    if rank == 0:  # neither of them communicates
        dcp_to_torch_save(shared_path / "sharded", shared_path / "whole.pt")
        found = torch.load(shared_path / "whole.pt")["model"]
        said = "" if found.keys() == full.keys() and all(torch.equal(found[k], full[k]) for k in full) else str(found)
        torch_save_to_dcp(shared_path / "whole.pt", shared_path / "again")
    said = everyone(said)[0]
    other = sharded.sharded(sharded.network(), mesh=init_device_mesh("cpu", (size,)))
    dcp.load({"model": other}, checkpoint_id=shared_path / "again")
    wrong = sharded.differences(other.parameters(), list(full.values()), 0)
    agree(not wrong and not said, (wrong, said))


@pytest.mark.feature("checkpoint: a torch.save file read by rank 0 and broadcast")
def test_broadcast_from_a_file(rank: int, size: int, shared_path: Path) -> None:
    """Only rank 0 can read it."""
    path = shared_path / "whole.pt"
    state = {"a": torch.arange(21.0).reshape(7, 3), "b": {"c": torch.arange(5), "d": torch.tensor([True, False])}}
    if rank == 0:
        torch.save(state, path)
    agree(True)
    found: dict[str, Any] = {"a": torch.zeros(7, 3), "b": {"c": torch.zeros(5, dtype=torch.int64), "d": torch.zeros(2) > 1}}
    reader = BroadcastingTorchSaveReader(path if rank == 0 else shared_path / "not here")
    dcp.load(found, storage_reader=reader, planner=DynamicMetaLoadPlanner())
    right = torch.equal(found["a"], state["a"]) and all(torch.equal(found["b"][k], state["b"][k]) for k in "cd")  # type: ignore[arg-type, index]
    agree(right, found)

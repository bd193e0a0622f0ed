"""torch.distributed.checkpoint over MPI: what was saved is what is loaded, in the background, by other numbers of ranks."""

import itertools
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import (
    BroadcastingTorchSaveReader,
    DynamicMetaLoadPlanner,
    dcp_to_torch_save,
    torch_save_to_dcp,
)
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor, init_device_mesh, zeros

from tests.stack import sharded
from tests.stack.meshes import line
from tests.stack.scripts import resume
from tests.support import agree, everyone, launch

LINE: list[Placement] = [Shard(0), Shard(1), Replicate()]

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.distributed is disabled, unavailable or uninitialized:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*_get_pg_default_device:UserWarning"),
    pytest.mark.filterwarnings("ignore:Multiple backends are registered:UserWarning"),
]


def wholes() -> dict[str, Tensor]:
    """Equal on all ranks: dtypes, and sizes that no number of ranks divides, or that leave ranks without anything."""
    generator = torch.Generator().manual_seed(11)
    return {
        "odd": torch.randn(7, 3, generator=generator, dtype=torch.float64),
        "one row": torch.randn(1, 5, generator=generator),
        "half": torch.randn(5, 4, generator=generator).to(torch.bfloat16),
        "bool": torch.arange(10).reshape(5, 2) % 3 == 0,
        "complex": torch.randn(3, 4, generator=generator, dtype=torch.complex64),
        "float8": torch.randn(6, 2, generator=generator).to(torch.float8_e4m3fn),
    }


def distributed(size: int, placements: list[Placement]) -> dict[str, Any]:
    pairs = itertools.product(wholes().items(), enumerate(placements))
    return {f"{name} {i}": distribute_tensor(whole, line(size), [p]) for (name, whole), (i, p) in pairs}


def same(a: Any, b: Any) -> bool:
    """Bits, dtype and shape; of DTensors, those of this rank's shard."""
    if isinstance(a, DTensor):
        return isinstance(b, DTensor) and a.placements == b.placements and a.shape == b.shape and same(a.to_local(), b.to_local())
    if isinstance(a, Tensor):
        alike = isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape
        return alike and torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))
    if isinstance(a, dict | list):
        keys = a.keys() if isinstance(a, dict) else range(len(a))
        return type(a) is type(b) and len(a) == len(b) and all(same(a[key], b[key]) for key in keys)
    return type(a) is type(b) and bool(a == b)


def differing(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    if found.keys() != expected.keys():
        return [f"keys {sorted(found.keys() ^ expected.keys())}"]
    return [key for key, value in expected.items() if not same(found[key], value)]


def blank(state: Any) -> Any:
    """The same places with nothing in them: zeros, and None for what is no tensor."""
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    if isinstance(state, list):
        return [blank(value) for value in state]
    return torch.zeros_like(state) if isinstance(state, Tensor) else None


def reloaded(state: dict[str, Any], **how: Any) -> list[str]:
    """Where ``state`` differs from what is read into the blank places of it."""
    loaded = blank(state)
    dcp.load(loaded, **how)
    return differing(loaded, state)


@pytest.mark.min_ranks(2)
def test_two_dimensions(size: int, shared_path: Path) -> None:
    """Every placement of the save into every one of the load, without a collective on the data."""
    mesh = init_device_mesh("cpu", (2, size // 2) if size % 2 == 0 else (1, size))
    pairs: list[list[Placement]] = [[Shard(0), Shard(1)], [Shard(0), Shard(0)], [Replicate(), Shard(1)], [Shard(1), Replicate()]]
    targets = [*((mesh, pair) for pair in pairs), *((line(size), [placement]) for placement in LINE)]
    whole = wholes()["odd"]
    dcp.save({f"{pair}": distribute_tensor(whole, mesh, pair) for pair in pairs}, checkpoint_id=shared_path)
    wrong = []
    for on, placements in targets:
        found = {f"{pair}": zeros(7, 3, dtype=torch.float64, device_mesh=on, placements=placements) for pair in pairs}
        dcp.load(found, checkpoint_id=shared_path)
        wrong += [(saved, placements) for saved, tensor in found.items() if not same(tensor.full_tensor(), whole)]
    agree(not wrong, wrong)


def test_through_either_backend(rank: int, size: int, shared_path: Path) -> None:
    """Saved through one backend, loaded through the other; both plan the same files.

    Tensors that all ranks have alike are written once; what one rank alone has is there, too; what is no tensor is pickled. Of
    what all have written each rank reads only its own shard.
    """
    base, gloo = torch.arange(24.0).reshape(4, 6), dist.new_group(backend="gloo")
    state: dict[str, Any] = {
        **wholes(),
        **distributed(size, LINE),
        "strided": base[:, ::2],
        "empty": torch.empty(0, 3),
        "step": 17,
        "path": Path("/somewhere"),
        "outer": {"inner": torch.full((3,), 4.0), "number": 5},
        "list": [torch.ones(2), 6],
    }
    of_ranks = [{f"of rank {r}": torch.full((r + 1,), float(r))} for r in range(size)]
    groups, plans, wrong = {"mpi": None, "gloo": gloo}, [], []
    for name, group in groups.items():
        plans.append(dcp.save({**state, **of_ranks[rank]}, checkpoint_id=shared_path / name, process_group=group))
    for name, group in itertools.product(groups, groups.values()):
        wrong += reloaded({**state, **of_ranks[(rank + 1) % size]}, checkpoint_id=shared_path / name, process_group=group)
    if rank == 0:
        shards = plans[0].state_dict_metadata["odd 0"].chunks
        found = {(*chunk.offsets, *chunk.sizes) for chunk in shards if chunk.sizes[0]}
        expected = {(int(part[0]), 0, len(part), 3) for part in torch.arange(7).chunk(size)}
        wrong += [f"{plans}"] * (found != expected or plans[0].state_dict_metadata != plans[1].state_dict_metadata)
    dist.destroy_process_group(gloo)
    agree(not wrong, wrong)


OPTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [  # of FileSystemWriter, and of the planner
    ({"single_file_per_rank": False, "cache_staged_state_dict": True}, {}),
    ({"thread_count": 3, "single_file_per_rank": True}, {"dedup_save_to_lowest_rank": True}),
    ({"sync_files": False}, {"enable_plan_caching": True}),
]


@pytest.mark.parametrize(("files", "plans"), OPTIONS)
def test_options(files: dict[str, Any], plans: dict[str, Any], size: int, shared_path: Path) -> None:
    """The same twice, over the first: plans and files that are kept from one save to the next are not taken for the new ones."""
    writer, planner = dcp.FileSystemWriter(shared_path, **files), dcp.DefaultSavePlanner(**plans)
    wrong = []
    for factor in (1, 3):
        shards = distribute_tensor(wholes()["odd"] * factor, line(size), [Shard(0)])
        state = {"sharded": shards, "plain": torch.full((6,), factor)}
        dcp.save(state, storage_writer=writer, planner=planner)
        wrong += reloaded(state, storage_reader=dcp.FileSystemReader(shared_path))
    agree(not wrong, wrong)


def test_each_rank_for_itself(rank: int, shared_path: Path) -> None:
    """Ranks at different times: a collective somewhere inside would hang. Without collectives, load finds the rank's own."""
    state, wrong = {"mine": torch.full((rank + 2,), float(rank)), "step": rank}, []
    for _ in range(rank + 1):
        dcp.save(state, checkpoint_id=shared_path / f"{rank}", no_dist=True)
        wrong += reloaded(state, checkpoint_id=shared_path / f"{rank}", no_dist=True)
    dcp.save(state, checkpoint_id=shared_path / "all", use_collectives=False)
    dist.barrier()
    wrong += reloaded(state, checkpoint_id=shared_path / "all")
    agree(not wrong, wrong)


class Unpicklable:
    def __reduce__(self) -> Any:
        raise TypeError("this cannot be pickled")


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("when", ["save", "load"])
def test_errors_arrive_everywhere(when: str, rank: int, size: int, shared_path: Path) -> None:
    """The exception travels as an object; the others do not wait, and the group works afterwards."""
    state: dict[str, Any] = {"there": torch.ones(3)}
    said: CheckpointException | None = None
    if when == "load":
        dcp.save(state, checkpoint_id=shared_path)
    wanted = {**state, "missing": torch.ones(1) if when == "load" else Unpicklable()}
    try:
        (dcp.load if when == "load" else dcp.save)(wanted if rank == size - 1 else state, checkpoint_id=shared_path)
    except CheckpointException as error:
        said = error
    total = torch.ones(1)
    dist.all_reduce(total)
    good = said is not None and list(said.failures) == [size - 1]
    good = good and ("missing" if when == "load" else "cannot be pickled") in str(said.failures[size - 1][0])
    agree(good and total.item() == size, said)


# -- in the background -------------------------------------------------------------------------------------------------


def future_of(answer: Any) -> Future[Any]:
    return answer if isinstance(answer, Future) else answer.upload_completion


@pytest.mark.parametrize("staging", ["default", "async"])
def test_async_save(staging: str, rank: int, size: int, shared_path: Path) -> None:
    """What is saved is the moment of the call, though training has overwritten it, and neither holds up the other."""
    beside = dist.new_group()  # training goes on in the world
    model = sharded.sharded(sharded.network(), mesh=line(size))
    optimizer = sharded.sgd(model.parameters())
    kept = []
    for step in range(3):
        sharded.train(model, optimizer, [step], rank, size)
        kept.append([sharded.whole(p.detach()).clone() for p in model.parameters()])
        stager = DefaultStager(StagingOptions(False, False, True, False)) if staging == "async" else None
        state, path = {"model": model, "step": step}, shared_path / f"{step}"
        answer: Any = dcp.async_save(state, checkpoint_id=path, process_group=beside, async_stager=stager)
        if staging == "async":
            answer.staging_completion.result()
        sharded.train(model, optimizer, [50 + step], rank, size)  # the world's collectives go on beside the group's
        future_of(answer).result()
    wrong = []
    for step in range(3):
        target = {"model": sharded.sharded(sharded.network(), mesh=line(size)), "step": -1}
        dcp.load(target, checkpoint_id=shared_path / f"{step}")
        wrong += sharded.differences(target["model"].parameters(), kept[step], 0)
        wrong += [] if target["step"] == step else [f"step {target['step']}"]
    dist.destroy_process_group(beside)
    reference = sharded.network()
    sharded.train(reference, sharded.sgd(reference.parameters()), [0, 50, 1, 51, 2, 52], None, size)
    wrong += sharded.differences(model.parameters(), reference.parameters())
    agree(not wrong, wrong)


@pytest.mark.launch
@pytest.mark.timeout(120)
def test_async_save_in_a_process(shared_path: Path) -> None:
    """The process is no second copy of its rank in the MPI job; and what nobody waits for is complete when the job has ended."""
    done = launch(2, "tests/stack/scripts/async_checkpoint.py", str(shared_path), timeout_s=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("saved beside") == 2, done.stdout + done.stderr
    for step in (2, 3):
        loaded: dict[str, Any] = {"sharded": torch.zeros(7, 3), "step": -1}
        dcp.load(loaded, checkpoint_id=shared_path / f"{step}", no_dist=True)
        assert torch.equal(loaded["sharded"], torch.arange(21.0).reshape(7, 3) + step), loaded
        assert loaded["step"] == step, loaded


# -- by other numbers of ranks, and in other files ---------------------------------------------------------------------


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


WHOLES = {"odd": torch.arange(33.0).reshape(11, 3), "few": torch.arange(6).reshape(2, 3)}
SAVED_AND_LOADED = {f"{name} {i} {j}": (whole, i, j) for name, whole in WHOLES.items() for i in LINE for j in LINE}


@pytest.mark.min_ranks(2)
def test_other_number_of_ranks(parts: list[Part], shared_path: Path) -> None:
    """Between every two numbers of ranks, and every two placements: pieces come from several files, or from a part of one."""
    for part in parts:
        if part.inside:
            state = {key: distribute_tensor(whole, part.mesh, [i]) for key, (whole, i, _) in SAVED_AND_LOADED.items()}
            dcp.save({**state, "ranks": part.count}, checkpoint_id=shared_path / f"{part.count}", process_group=part.group)
    dist.barrier()
    wrong = []
    for saver, loader in itertools.product(parts, parts):
        if loader.inside:
            target: dict[str, Any] = {"ranks": -1}
            for key, (like, _, j) in SAVED_AND_LOADED.items():
                target[key] = zeros(like.shape, dtype=like.dtype, device_mesh=loader.mesh, placements=[j])
            dcp.load(target, checkpoint_id=shared_path / f"{saver.count}", process_group=loader.group)
            bad = [key for key, (whole, _, _) in SAVED_AND_LOADED.items() if not torch.equal(target[key].full_tensor(), whole)]
            wrong += [(saver.count, loader.count, bad)] if bad or target["ranks"] != saver.count else []
    agree(not wrong, wrong)


@pytest.mark.min_ranks(2)
def test_training_goes_on(parts: list[Part], size: int, shared_path: Path) -> None:
    """All ranks, then half of them, then all again; at the end the parameters are those of one process that never stopped."""
    wrong: list[str] = []
    for part in (parts[-1], parts[max(1, size // 2) - 1], parts[-1]):
        if part.inside:
            _, wrong = resume.go_on(shared_path, part.mesh, part.group)
        agree(not wrong, wrong)


@pytest.mark.launch
@pytest.mark.timeout(120)
def test_another_job(shared_path: Path) -> None:
    """Training that four ranks have begun, two go on with: equal to one process, optimizer included."""
    for ranks, first in ((4, 0), (2, 2)):
        done = launch(ranks, "tests/stack/scripts/resume.py", str(shared_path), timeout_s=55)
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count(f"steps {first} to {first + 2}") == ranks, done.stdout + done.stderr


def test_formats(rank: int, size: int, shared_path: Path) -> None:
    """A sharded checkpoint becomes one file that torch.load reads, and a file a checkpoint that every rank reads its shard of.

    If only rank 0 can read the file, the others get it from there.
    """
    model = sharded.sharded(sharded.network(), mesh=line(size))
    sharded.train(model, sharded.sgd(model.parameters()), range(1), rank, size)
    full = {name: sharded.whole(value).clone() for name, value in model.state_dict().items()}
    dcp.save({"model": model.state_dict()}, checkpoint_id=shared_path / "sharded")
    wrong = []
    if rank == 0:  # neither of them communicates
        dcp_to_torch_save(shared_path / "sharded", shared_path / "whole.pt")
        wrong = differing(torch.load(shared_path / "whole.pt")["model"], full)
        torch_save_to_dcp(shared_path / "whole.pt", shared_path / "again")
    wrong = everyone(wrong)[0]
    other = sharded.sharded(sharded.network(), mesh=line(size))
    dcp.load({"model": other}, checkpoint_id=shared_path / "again")
    reader = BroadcastingTorchSaveReader(shared_path / ("whole.pt" if rank == 0 else "not here"))
    wrong += reloaded({"model": full}, storage_reader=reader, planner=DynamicMetaLoadPlanner())
    wrong += sharded.differences(other.parameters(), list(full.values()), 0)
    agree(not wrong, wrong)

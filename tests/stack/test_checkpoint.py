"""torch.distributed.checkpoint over MPI: what was saved is what is loaded, at once or in the background, on every rank."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor, init_device_mesh, zeros

from tests.stack import sharded
from tests.support import agree, launch

SECTION = "State"

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.distributed is disabled, unavailable or uninitialized:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint:UserWarning"),
]


def wholes() -> dict[str, Tensor]:
    """Equal on all ranks: dtypes, and sizes that no number of ranks divides, or that leave ranks without anything."""
    generator = torch.Generator().manual_seed(11)
    return {
        "even": torch.arange(64.0).reshape(8, 8),
        "odd": torch.randn(7, 3, generator=generator, dtype=torch.float64),
        "one row": torch.randn(1, 5, generator=generator),
        "half": torch.randn(5, 4, generator=generator).to(torch.bfloat16),
        "whole numbers": torch.arange(9 * 2).reshape(9, 2),
        "bool": torch.arange(10).reshape(5, 2) % 3 == 0,
        "complex": torch.randn(3, 4, generator=generator, dtype=torch.complex64),
        "three": torch.randn(3, 2, 5, generator=generator),
        "float8": torch.randn(6, 2, generator=generator).to(torch.float8_e4m3fn),
    }


def same(a: Any, b: Any) -> bool:
    """Bits, dtype and shape; of DTensors, those of this rank's shard."""
    if isinstance(a, DTensor):
        return isinstance(b, DTensor) and a.placements == b.placements and a.shape == b.shape and same(a.to_local(), b.to_local())
    if isinstance(a, Tensor):
        alike = isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape
        return alike and torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)))
    return type(a) is type(b) and bool(a == b)


def differing(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    if found.keys() != expected.keys():
        return [f"keys {sorted(found.keys() ^ expected.keys())}"]
    return [key for key, value in expected.items() if not same(found[key], value)]


def distributed(placements: list[Placement], mesh: Any) -> dict[str, Any]:
    return {
        f"{name} {i}": distribute_tensor(whole, mesh, [p]) for name, whole in wholes().items() for i, p in enumerate(placements)
    }


def blank(state: dict[str, Any]) -> dict[str, Any]:
    """The same places with nothing in them: zeros, and None for what is no tensor."""
    return {key: torch.zeros_like(value) if isinstance(value, Tensor) else None for key, value in state.items()}


@pytest.mark.feature("checkpoint: save and load, plain tensors and objects")
def test_plain(rank: int, size: int, shared_path: Path) -> None:
    """Tensors that all ranks have alike are written once; what one rank alone has is there too; the rest is pickled."""
    base = torch.arange(24.0).reshape(4, 6)
    state: dict[str, Any] = {
        **wholes(),
        "strided": base[:, ::2],
        "transposed": base.t(),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "step": 17,
        "words": "å" * 300,
        "path": Path("/somewhere"),
        "generator": torch.get_rng_state(),
    }
    nested = {"outer": {"inner": torch.full((3,), 4.0), "number": 5}, "list": [torch.ones(2), 6]}
    dcp.save({**state, **nested, f"of rank {rank}": torch.full((rank + 1,), float(rank))}, checkpoint_id=shared_path)

    found = blank(state)
    mine = (rank + 1) % size
    others = {f"of rank {mine}": torch.zeros(mine + 1)}
    inside: dict[str, Any] = {"outer": {"inner": torch.zeros(3), "number": 0}, "list": [torch.zeros(2), 0]}
    loaded = {**found, **inside, **others}
    dcp.load(loaded, checkpoint_id=shared_path)
    wrong = differing({key: loaded[key] for key in state}, state)
    good = same(loaded["outer"]["inner"], nested["outer"]["inner"]) and loaded["outer"]["number"] == 5  # type: ignore[call-overload]
    good = good and same(loaded["list"][0], torch.ones(2)) and loaded["list"][1] == 6
    agree(not wrong and good and bool((loaded[f"of rank {mine}"] == mine).all()), (wrong, loaded["outer"], loaded["list"]))


@pytest.mark.feature("checkpoint: DTensors, Replicate and Shard, uneven and empty shards")
def test_dtensors(rank: int, size: int, shared_path: Path) -> None:
    """Each rank reads only its own shard of what all have written."""
    mesh = init_device_mesh("cpu", (size,))
    state = distributed([Replicate(), Shard(0), Shard(1)], mesh)
    metadata = dcp.save(state, checkpoint_id=shared_path)
    loaded = blank(state)
    dcp.load(loaded, checkpoint_id=shared_path)
    wrong = differing(loaded, state)
    if rank == 0:
        entry = metadata.state_dict_metadata["odd 1"]
        assert isinstance(entry, TensorStorageMetadata)
        chunks = sorted((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks)
        rows = [len(part) for part in torch.arange(7).chunk(size)]
        starts = [sum(rows[:i]) for i in range(len(rows))]
        expected = [((start, 0), (count, 3)) for start, count in zip(starts, rows, strict=True)]
        wrong += [] if [chunk for chunk in chunks if chunk[1][0]] == expected else [str(chunks)]
    agree(not wrong, wrong)


@pytest.mark.feature("checkpoint: DTensors on a 2D mesh, loaded with other placements")
@pytest.mark.min_ranks(2)
def test_two_dimensions(rank: int, size: int, shared_path: Path) -> None:
    """Every placement of the save into every one of the load, without a collective on the data."""
    mesh = init_device_mesh("cpu", (2, size // 2)) if size % 2 == 0 else init_device_mesh("cpu", (1, size))
    line = init_device_mesh("cpu", (size,))
    pairs: list[list[Placement]] = [[Shard(0), Shard(1)], [Shard(0), Shard(0)], [Replicate(), Shard(1)], [Shard(1), Replicate()]]
    whole = wholes()["odd"]
    dcp.save({f"{p}": distribute_tensor(whole, mesh, p) for p in pairs}, checkpoint_id=shared_path)
    wrong = []
    for saved in pairs:
        for on, placements in [*((mesh, p) for p in pairs), (line, [Shard(0)]), (line, [Shard(1)]), (line, [Replicate()])]:
            target = {f"{saved}": zeros(7, 3, dtype=torch.float64, device_mesh=on, placements=placements)}
            dcp.load(target, checkpoint_id=shared_path)
            if not same(target[f"{saved}"].full_tensor(), whole):
                wrong.append((saved, placements))
    agree(not wrong, wrong)


@pytest.mark.feature("checkpoint: Gloo's and MPI's are interchangeable")
def test_written_by_gloo(rank: int, size: int, shared_path: Path) -> None:
    """Saved through one backend, loaded through the other; both plan the same files."""
    gloo = dist.new_group(backend="gloo")
    state = {**distributed([Shard(0), Replicate()], init_device_mesh("cpu", (size,))), "plain": torch.arange(5), "step": 3}
    by_mpi = dcp.save(state, checkpoint_id=shared_path / "mpi")
    by_gloo = dcp.save(state, checkpoint_id=shared_path / "gloo", process_group=gloo)
    wrong = []
    for writer, reader in (("mpi", gloo), ("gloo", None)):
        loaded = blank(state)
        dcp.load(loaded, checkpoint_id=shared_path / writer, process_group=reader)
        wrong += differing(loaded, state)
    if rank == 0 and by_mpi.state_dict_metadata != by_gloo.state_dict_metadata:
        wrong.append(f"{by_mpi.state_dict_metadata} differs from {by_gloo.state_dict_metadata}")
    dist.destroy_process_group(gloo)
    agree(not wrong, wrong)


OPTIONS: dict[str, dict[str, Any]] = {
    "one file for each tensor": {"single_file_per_rank": False},
    "three threads": {"thread_count": 3, "single_file_per_rank": True},
    "no fsync": {"sync_files": False},
    "cached": {"cache_staged_state_dict": True},
}
PLANNERS: dict[str, dict[str, Any]] = {
    "lowest rank": {"dedup_save_to_lowest_rank": True},
    "cached plan": {"enable_plan_caching": True},
}


@pytest.mark.feature("checkpoint: options of FileSystemWriter and of the planners")
@pytest.mark.parametrize(("options", "planning"), [*((o, "plain") for o in OPTIONS), *(("no fsync", p) for p in PLANNERS)])
def test_options(options: str, planning: str, rank: int, size: int, shared_path: Path) -> None:
    """The same twice, over the first: plans and files that are kept from one save to the next are not taken for the new ones."""
    mesh = init_device_mesh("cpu", (size,))
    writer = dcp.FileSystemWriter(shared_path / "there", **OPTIONS[options])
    planner = dcp.DefaultSavePlanner(**PLANNERS.get(planning, {}))
    wrong = []
    for factor in (1, 3):
        state = {"sharded": distribute_tensor(wholes()["odd"] * factor, mesh, [Shard(0)]), "plain": torch.full((6,), factor)}
        dcp.save(state, storage_writer=writer, planner=planner)
        loaded = blank(state)
        dcp.load(loaded, storage_reader=dcp.FileSystemReader(shared_path / "there"))
        wrong += differing(loaded, state)
    agree(not wrong, wrong)


@pytest.mark.feature("checkpoint: no_dist, and without collectives")
@pytest.mark.parametrize("how", ["no_dist", "use_collectives"])
def test_each_rank_for_itself(how: str, rank: int, size: int, shared_path: Path) -> None:
    """Ranks at different times: a collective somewhere inside would hang. Without collectives, load finds the rank's own."""
    state = {"mine": torch.full((rank + 2,), float(rank)), "step": rank}
    loaded = blank(state)
    if how == "no_dist":
        for _ in range(rank + 1):
            dcp.save(state, checkpoint_id=shared_path / f"{rank}", no_dist=True)
            dcp.load(loaded, checkpoint_id=shared_path / f"{rank}", no_dist=True)
    else:
        dcp.save(state, checkpoint_id=shared_path, use_collectives=False)
        dist.barrier()
        dcp.load(loaded, checkpoint_id=shared_path)
    agree(not differing(loaded, state), loaded)


@pytest.mark.feature("checkpoint: an error on one rank is raised on all")
@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("when", ["save", "load"])
def test_errors_arrive_everywhere(when: str, rank: int, size: int, shared_path: Path) -> None:
    """The exception travels as an object; the others do not wait, and the group works afterwards."""
    last = size - 1
    state: dict[str, Any] = {"there": torch.ones(3)}
    said: CheckpointException | None = None
    if when == "load":
        dcp.save(state, checkpoint_id=shared_path)
    wanted = {**state, "missing" if when == "load" else "locked": torch.ones(1) if when == "load" else Unpicklable()}
    try:
        if when == "save":
            dcp.save(wanted if rank == last else state, checkpoint_id=shared_path)
        else:
            dcp.load(wanted if rank == last else state, checkpoint_id=shared_path)
    except CheckpointException as error:
        said = error
    text = "missing" if when == "load" else "cannot be pickled"
    total = torch.ones(1)
    dist.all_reduce(total)
    good = said is not None and list(said.failures) == [last] and text in str(said.failures[last][0])
    agree(good and total.item() == size, said)


class Unpicklable:
    def __reduce__(self) -> Any:
        raise TypeError("this cannot be pickled")


class Counter:
    """What dcp calls Stateful: anything with these two methods."""

    def __init__(self, start: int) -> None:
        self.state = {"count": start, "seen": torch.full((4,), float(start))}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = dict(state)


@pytest.mark.feature("checkpoint: Stateful objects")
def test_stateful(rank: int, size: int, shared_path: Path) -> None:
    """Their methods are called, one's own among them: what they return is saved, what was saved is handed to them."""
    counter, model = Counter(7), sharded.sharded(sharded.network(), mesh=init_device_mesh("cpu", (size,)))
    dcp.save({"counter": counter, "model": model}, checkpoint_id=shared_path)
    saved = [sharded.whole(p.detach()).clone() for p in model.parameters()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    other = Counter(0)
    dcp.load({"counter": other, "model": model}, checkpoint_id=shared_path)
    wrong = sharded.differences(model.parameters(), saved, 0)
    agree(not wrong and other.state["count"] == 7 and bool((other.state["seen"] == 7).all()), (wrong, other.state))


@pytest.fixture
def beside() -> Iterator[Any]:
    """A group of all ranks of its own, for what is saved while the world trains."""
    group = dist.new_group(timeout=timedelta(seconds=50))
    yield group
    dist.destroy_process_group(group)


def future_of(answer: Any) -> Future[Any]:
    return answer if isinstance(answer, Future) else answer.upload_completion  # type: ignore[no-any-return]


@pytest.mark.feature("checkpoint: async_save in a thread while training goes on")
@pytest.mark.parametrize("staging", ["default", "async"])
def test_async_save(staging: str, beside: Any, rank: int, size: int, shared_path: Path) -> None:
    """What is saved is the moment of the call, though training has overwritten it, and neither holds up the other."""
    model = sharded.sharded(sharded.network(), mesh=init_device_mesh("cpu", (size,)))
    optimizer = sharded.sgd(model.parameters())
    kept, futures = [], []
    for step in range(3):
        sharded.train(model, optimizer, [step], rank, size)
        kept.append([sharded.whole(p.detach()).clone() for p in model.parameters()])
        stager = DefaultStager(StagingOptions(False, False, True, False)) if staging == "async" else None
        answer = dcp.async_save(
            {"model": model, "step": step}, checkpoint_id=shared_path / f"{step}", process_group=beside, async_stager=stager
        )
        if staging == "async":
            answer.staging_completion.result()  # type: ignore[union-attr]
        sharded.train(model, optimizer, [50 + step], rank, size)  # the world's collectives go on beside the group's
        futures.append(future_of(answer))
        futures[-1].result()
    wrong = []
    for step in range(3):
        target = {"model": sharded.sharded(sharded.network(), mesh=init_device_mesh("cpu", (size,))), "step": -1}
        dcp.load(target, checkpoint_id=shared_path / f"{step}")
        wrong += sharded.differences(target["model"].parameters(), kept[step], 0)
        wrong += [] if target["step"] == step else [f"step {target['step']}"]
    reference = sharded.network()
    sharded.train(reference, sharded.sgd(reference.parameters()), [0, 50, 1, 51, 2, 52], None, size)
    wrong += sharded.differences(model.parameters(), reference.parameters())
    agree(not wrong, wrong)


@pytest.mark.feature("checkpoint: async_save in a thread while training goes on")
def test_async_save_on_the_world(rank: int, size: int, shared_path: Path) -> None:
    """Without a group of its own, as long as the program waits for it."""
    state = {"sharded": distribute_tensor(wholes()["odd"], init_device_mesh("cpu", (size,)), [Shard(0)])}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        answer = dcp.async_save(state, checkpoint_id=shared_path)
        future_of(answer).result()
    loaded = blank(state)
    dcp.load(loaded, checkpoint_id=shared_path)
    said = [str(warning.message) for warning in caught if "mpi" in str(warning.message).lower()]
    agree(not differing(loaded, state) and not said, said)


@pytest.mark.feature("checkpoint: async_save in a process beside each rank; saves under way at the end of the program")
@pytest.mark.launch
@pytest.mark.timeout(120)
def test_async_save_in_a_process(shared_path: Path) -> None:
    """The process is no second copy of its rank in the MPI job; and what nobody waits for is complete when the job has ended."""
    done = launch(2, "tests/stack/scripts/async_checkpoint.py", str(shared_path), timeout_s=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("saved beside") == 2, done.stdout + done.stderr
    for step in (2, 3):
        loaded = {"sharded": torch.zeros(7, 3), "step": -1}
        dcp.load(loaded, checkpoint_id=shared_path / f"{step}", no_dist=True)
        assert torch.equal(loaded["sharded"], torch.arange(21.0).reshape(7, 3) + step), loaded  # type: ignore[arg-type]
        assert loaded["step"] == step, loaded

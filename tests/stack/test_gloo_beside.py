"""Groups of MPI and of Gloo beside each other in a world of either: interleaved, under DDP and meshes, destroyed in any order.

And one group with two backends: each operation goes to the backend of the device that its tensors are on.
"""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import mpicoll
from mpicoll._c10d.names import BACKEND_SUBCLASSES
from tests.stack import sharded
from tests.stack.conftest import end_world
from tests.stack.exercise import exercise, total
from tests.support import agree

BACKENDS = ["mpi", "gloo"]

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*all_gather_tensor.*deprecated:FutureWarning"),
]


@pytest.fixture(params=BACKENDS)
def world(request: pytest.FixtureRequest) -> str:
    """The default group's backend; the other one's groups stand beside it."""
    if request.param == "gloo":
        request.getfixturevalue("no_world")
        dist.init_process_group("gloo", init_method="mpi://", timeout=timedelta(seconds=50))
    return request.param  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:.*(is|will be) deprecated.*:FutureWarning")
def test_each_kind_of_operation(world: str, rank: int, size: int) -> None:
    """On all ranks, on the even and on the odd ones; ranks are the group's."""
    wrong = {}
    for backend in BACKENDS:
        group: Any = dist.new_group(backend=backend)
        halves = [list(range(start, size, 2)) for start in range(min(2, size))]
        subgroups = [dist.new_group(ranks, backend=backend) for ranks in halves]
        mine = rank % len(halves)
        assert dist.get_backend(group) == dist.get_backend(subgroups[mine]) == backend
        wrong[backend] = exercise(group, rank, size) + exercise(subgroups[mine], rank // len(halves), len(halves[mine]))
    wrong["world"] = exercise(dist.group.WORLD, rank, size)
    agree(dist.get_backend() == world and not any(wrong.values()), wrong)


def test_interleaved(world: str, rank: int, size: int) -> None:
    """Even ranks start Gloo's first, odd ones MPI's: whoever waits for one must not hold up the other."""
    groups = [dist.new_group(backend=backend) for backend in BACKENDS]
    order = groups if rank % 2 else groups[::-1]
    wrong = []
    for step in range(20):
        tensors = {group: torch.full((1000 * (step % 3) + 1,), float(step)) for group in order}
        works = {group: dist.all_reduce(tensor, group=group, async_op=True) for group, tensor in tensors.items()}
        if step % 2:  # what has begun on one ends while the program is in a synchronous call of the other
            wrong += [step] * (total(groups[1 if step % 4 == 1 else 0]) != size)
        for group in order[::-1]:
            works[group].wait()
        wrong += [step] * any(bool((tensor != step * size).any()) for tensor in tensors.values())
    agree(not wrong, wrong)


def test_training_on_either(world: str, rank: int, size: int) -> None:
    """Both train as one process does; two models' reducers at work on two backends in one backward."""
    reference, wrong, pair = sharded.alone(3, size), [], []
    for backend in BACKENDS:
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=(f"{backend} in {world}",), backend_override={0: backend})
        group = mesh.get_group()
        assert dist.get_backend(group) == backend
        models = sharded.ddp(sharded.network(), group, bucket_cap_mb=0.0001), sharded.sharded(sharded.network(), mesh=mesh)
        for model in models:
            sharded.train(model, sharded.sgd(model.parameters()), range(3), rank, size)
            wrong += sharded.differences(model.parameters(), reference.parameters())
        pair.append(sharded.ddp(sharded.network(), group))
    x, y = (sharded.share(part, rank) for part in sharded.batch(0, size))
    sum(sharded.loss_of(model(x), y) for model in pair).backward()
    wrong += sharded.differences(sharded.gradients(pair[0]), sharded.gradients(pair[1]))
    agree(not wrong, wrong)


@pytest.mark.parametrize("inner", BACKENDS)
def test_meshes_of_two_backends(world: str, inner: str, rank: int, size: int) -> None:
    """DTensors are redistributed over both dimensions, one by MPI and one by Gloo."""
    outer = BACKENDS[1 - BACKENDS.index(inner)]
    shape = (2, size // 2) if size % 2 == 0 else (size, 1)
    names = (f"outer {inner} {world}", f"inner {inner} {world}")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names, backend_override={names[0]: outer, names[1]: inner})
    whole = torch.arange(7 * 5.0).reshape(7, 5)
    tensor = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    turned = tensor.redistribute(mesh, [Shard(1), Replicate()])
    sums = (turned * 2).sum(0)
    backends = [dist.get_backend(mesh.get_group(name)) for name in names]
    right = torch.equal(tensor.full_tensor(), whole) and torch.equal(turned.full_tensor(), whole)
    agree(right and torch.equal(sums.full_tensor(), 2 * whole.sum(0)) and backends == [outer, inner], backends)


@pytest.mark.parametrize("first", BACKENDS)
def test_destroyed_in_any_order(world: str, first: str, rank: int, size: int) -> None:
    """One group's end does not touch the others; the last ends with the world, and the next world is as good as new."""
    groups = {backend: [dist.new_group(backend=backend) for _ in range(2)] for backend in BACKENDS}
    wrong = []
    for backend in (first, BACKENDS[1 - BACKENDS.index(first)]):
        gone = groups[backend].pop(0)
        pending = dist.all_reduce(torch.ones(1000), group=gone, async_op=True)
        pending.wait()
        dist.destroy_process_group(gone)
        wrong += [backend for left in groups.values() for group in left if total(group) != size]
    end_world()
    dist.init_process_group(world, **({} if world == "mpi" else {"init_method": "mpi://"}))
    beside = dist.new_group(backend=first)
    wrong += ["afterwards"] * (total() != size or total(beside) != size)
    agree(not wrong, wrong)


def test_monitored_barrier(world: str, rank: int, size: int) -> None:
    """Gloo's own names the rank that does not come; MPI's groups are not touched by its failure."""
    gloo: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=30))
    ours: Any = dist.new_group(backend="mpi")
    dist.monitored_barrier(gloo, timeout=timedelta(seconds=20))
    said = ""
    if size > 1 and rank != 1:
        try:
            dist.monitored_barrier(gloo, timeout=timedelta(seconds=1), wait_all_ranks=True)
        except RuntimeError as error:
            said = str(error)
    named = "Ranks 1 failed to pass monitoredBarrier" in said
    agree(named == (size > 1 and rank == 0) and total(ours) == size, said)


def test_what_torch_says(world: str, rank: int, size: int) -> None:
    """The same for both backends; numbered alike on members and on others."""
    before, half = dist.get_pg_count(), list(range(0, size, 2))
    groups: list[Any] = [dist.new_group(half, backend=backend, group_desc="half") for backend in BACKENDS]
    said = [(g.group_desc, dist.get_group_rank(g, rank), dist.get_process_group_ranks(g)) for g in groups if rank in half]
    agree(said == [("half", rank // 2, half)] * len(said) and dist.get_pg_count() == before + 2, said)


# -- two backends in one group -----------------------------------------------------------------------------------------


@pytest.fixture(params=["cpu:mpi,cuda:gloo", "cpu:gloo,cuda:mpi"])
def mixture(request: pytest.FixtureRequest, no_world: None) -> str:
    """The world is made with this backend string."""
    dist.init_process_group(request.param)
    return request.param  # type: ignore[no-any-return]


def test_a_mixture_does_each_kind_of_operation(mixture: str, rank: int, size: int) -> None:
    """Collectives, lists, messages, objects, C++ callers and both doors, on CPU tensors; an inherited mixture; DDP."""
    world: Any = dist.group.WORLD
    carrier = world._get_backend(torch.device("cpu"))
    agree(dist.get_backend() == dist.get_backend_config() == mixture, dist.get_backend())
    agree(("gloo" in carrier.name().lower() if mixture.startswith("cpu:gloo") else hasattr(carrier, "communicator")), carrier)
    wrong = [exercise(group, rank, size) for group in (world, dist.new_group(list(range(size))))]
    mpicoll.all_reduce(ours := torch.tensor([float(rank + 1)]))
    agree(not any(wrong) and ours.item() == size * (size + 1) / 2, (wrong, ours))
    model = DistributedDataParallel(torch.nn.Linear(4, 1, bias=False))
    model(torch.full((1, 4), float(rank))).sum().backward()
    agree(model.module.weight.grad.tolist() == [[(size - 1) / 2] * 4], model.module.weight.grad)


def test_an_error_leaves_nothing(no_world: None, rank: int, size: int) -> None:
    """init_process_group raises for a backend that this torch lacks. The next call works."""
    with pytest.raises((RuntimeError, AssertionError, ValueError)):
        dist.init_process_group("cpu:mpi,cuda:there_is_no_such_backend")
    agree(not dist.is_initialized())
    with pytest.raises(ValueError, match="device"):
        dist.init_process_group("cpu:mpi,cpu:gloo")
    agree(not dist.is_initialized())
    dist.init_process_group("mpi")
    agree(total() == size)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_nccl_without_a_gpu_says_so(no_world: None, rank: int, size: int) -> None:
    """The string is accepted and handed to NCCL, which has the last word."""
    with pytest.raises((RuntimeError, ValueError), match=r"NCCL|GPU|nccl"):
        dist.init_process_group("cpu:mpi,cuda:nccl")
    agree(not dist.is_initialized(), BACKEND_SUBCLASSES)

"""DDP over a part of the ranks, over a mesh, with parameters that it leaves alone, and what it says about itself."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

from tests.stack import replicas
from tests.stack.record import refused_alike
from tests.stack.replicas import apart, batch, bits, close, gradients_apart, loss_of, network, same_bits, share, train
from tests.support import agree, everyone

SECTION = "Data parallel"
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")

feature = pytest.mark.feature
on_cpu_alone = pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")


@feature("DDP: process_group= a part of the ranks")
def test_groups_train_by_themselves(rank: int, size: int) -> None:
    """Even and odd ranks: two models at once, from other weights, on other data; a group's rank 0 is not rank 0."""
    groups = [dist.new_group(list(range(odd, size, 2))) for odd in range(min(size, 2))]
    odd = rank % 2
    mine, place, members = groups[odd], rank // 2, len(range(odd, size, 2))
    model = network(seed=rank)  # of which the first of each group gives its own
    parallel = DistributedDataParallel(model, process_group=mine)
    train(parallel, 3, members, place, first=10 * odd)
    reference = train(network(seed=odd), 3, members, first=10 * odd)
    others = everyone(bits(model))
    equal = all(others[r] == bits(model) for r in range(odd, size, 2))
    dist.destroy_process_group(mine)
    agree(equal and close(model, reference), apart(model, reference))


@feature("DDP: device_mesh")
def test_device_mesh(rank: int, size: int) -> None:
    """All ranks in one dimension; then one dimension of two, where each column trains its own model."""
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    model, reference = network(), train(network(), 3, size)
    train(DistributedDataParallel(model, device_mesh=mesh), 3, size, rank)
    agree(same_bits(model) and close(model, reference), apart(model, reference))


@feature("DDP: device_mesh")
@pytest.mark.min_ranks(2)
def test_one_dimension_of_a_mesh(rank: int, size: int) -> None:
    columns = 2 if size % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (size // columns, columns), mesh_dim_names=("dp", "other"))
    row, column = divmod(rank, columns)
    model, reference = network(seed=column), train(network(seed=column), 3, size // columns, first=10 * column)
    train(DistributedDataParallel(model, device_mesh=mesh["dp"]), 3, size // columns, row, first=10 * column)
    agree(close(model, reference), apart(model, reference))


@feature("DDP: init_sync=False, parameters to ignore")
def test_starts_without_broadcast(rank: int, size: int) -> None:
    """Every rank keeps its own weights; the gradients are averaged all the same."""
    model = network(seed=rank)
    before = bits(model)
    parallel = DistributedDataParallel(model, init_sync=False)
    kept = bits(model) == before
    x, y = batch(0, size)
    loss_of(parallel(share(x, rank)), share(y, rank)).backward()
    reference = network(seed=0)
    means = [torch.zeros_like(p) for p in reference.parameters()]
    for r in range(size):
        theirs = network(seed=r)
        loss_of(theirs(share(x, r)), share(y, r)).backward()
        for mean, p in zip(means, theirs.parameters(), strict=True):
            mean += p.grad / size  # type: ignore[operator]
    for p, mean in zip(reference.parameters(), means, strict=True):
        p.grad = mean
    agree(kept and not gradients_apart(model, reference), gradients_apart(model, reference))


@feature("DDP: init_sync=False, parameters to ignore")
def test_ignored_parameters_stay_local(rank: int, size: int) -> None:
    """Neither broadcast nor reduced: another value and another shape on each rank."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by = nn.Parameter(torch.full((rank + 1,), float(rank), dtype=torch.float64))
            self.register_buffer("seen", torch.full((rank + 2,), float(rank)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.by.sum()

    model, alone = (nn.Sequential(network(), Scale()) for _ in range(2))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["1.by", "1.seen"])
    parallel = DistributedDataParallel(model)
    x, y = batch(0, size)
    loss_of(parallel(share(x, rank)), share(y, rank)).backward()
    loss_of(alone(share(x, rank)), share(y, rank)).backward()
    mine, theirs = model[1], alone[1]
    local = torch.equal(mine.by.grad, theirs.by.grad) and torch.equal(mine.seen, theirs.seen)  # type: ignore[arg-type]
    agree(same_bits(p.grad for p in model[0].parameters() if p.grad is not None) and local, mine.by.grad)


@feature("DDP: delay_all_reduce_named_params")
def test_delayed_parameters(rank: int, size: int) -> None:
    """The last layer's gradients wait until the first layer's weight has its own, and travel in one buffer."""
    model, reference = network(dtype=torch.float32), network(dtype=torch.float32)  # as the buffer is
    delayed = [(name, p) for name, p in model.named_parameters() if name.startswith("4.")]
    parallel = DistributedDataParallel(
        model, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=model[0].weight, bucket_cap_mb=25
    )
    wrong: list[Any] = []
    for step in range(3):
        x, y = batch(step, size, torch.float32)
        for m, a, b in ((parallel, share(x, rank), share(y, rank)), (reference, x, y)):
            m.zero_grad()
            loss_of(m(a), b).backward()
        dist.barrier()  # DDP keeps no Work for the buffer; this one comes after it
        wrong += gradients_apart(model, reference, 1e-6)
    agree(not wrong, wrong)


@feature("DDP: different models on the ranks are an error")
@pytest.mark.min_ranks(2)
def test_different_models(rank: int, size: int) -> None:
    """One parameter more on the last rank: all ranks are told, and the group goes on."""
    model: nn.Module = network() if rank < size - 1 else nn.Linear(3, 3).double()
    said = ""
    try:
        DistributedDataParallel(model)
    except RuntimeError as error:
        said = str(error)
    dist.all_reduce(total := torch.ones(1))
    mine = len(list(model.parameters()))
    agree(f"Rank {rank} has {mine} params" in said and total.item() == size, said)


@feature("DDP: its own account of a run (get_ddp_logging_data)")
def test_logging_data(rank: int, size: int) -> None:
    parallel = DistributedDataParallel(network(dtype=torch.float32), bucket_cap_mb=100 / 2**20)
    train(parallel, 3, size, rank)
    data = parallel._get_ddp_logging_data()
    expected = {
        "world_size": size, "rank": rank, "module_name": "Sequential", "dtypes": "float",
        "num_parameter_tensors": 6, "iteration": 2, "has_rebuilt_buckets": 1,
    }  # fmt: skip
    wrong = {name: data.get(name) for name, value in expected.items() if data.get(name) != value}
    named = data["backend_name"] in ("mpi", "custom")  # torch >= 2.14 calls every backend that is not its own custom
    times = [data[name] for name in ("forward_compute_time", "backward_compute_time", "backward_comm_time")]
    agree(not wrong and named and min(times) > 0 and data["num_buckets_reduced"] > 1, (wrong, times, data["num_buckets_reduced"]))


@feature("DDP: pickled and restored, moved to another group")
def test_pickled(rank: int, size: int) -> None:
    """The group stays behind; the copy takes the default one and goes on training."""
    reference = train(network(), 2, size)
    parallel = train(DistributedDataParallel(network()), 2, size, rank)
    restored = pickle.loads(pickle.dumps(parallel))
    train(restored, 2, size, rank, first=2)
    train(reference, 2, size, first=2)
    agree(same_bits(restored) and close(restored, reference), apart(restored, reference))


@feature("DDP: pickled and restored, moved to another group")
def test_moved_to_another_group(rank: int, size: int) -> None:
    """What fault-tolerant training does after it has lost a rank: here the same ranks, in a group that is new."""
    model, reference = network(), train(network(), 4, size)
    parallel = DistributedDataParallel(model)
    optimizer = replicas.sgd(model.parameters())
    train(parallel, 2, size, rank, optimizer)
    group = dist.new_group(list(range(size)))
    parallel._update_process_group(group)
    train(parallel, 2, size, rank, optimizer, first=2)
    dist.destroy_process_group(group)
    agree(same_bits(model) and close(model, reference), apart(model, reference))


@feature("DDP: mixed_precision, _apply_optimizer_in_backward")
@on_cpu_alone
def test_mixed_precision_is_for_accelerators(request: pytest.FixtureRequest, rank: int, size: int) -> None:
    """DDP's own mixed precision copies parameters on a side stream."""

    def call(group: Any) -> None:
        half = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        parallel = DistributedDataParallel(network(dtype=torch.float32), process_group=group, mixed_precision=half)
        parallel(torch.ones(2, replicas.WIDE)).sum().backward()

    said = refused_alike("DDP(mixed_precision=...)", call, request.node, RuntimeError)
    agree(said, said)


@feature("DDP: mixed_precision, _apply_optimizer_in_backward")
@on_cpu_alone
def test_apply_optimizer_in_backward_is_for_accelerators(request: pytest.FixtureRequest, rank: int, size: int) -> None:
    """DDP runs those optimizers on a side stream; test_ddp_optimizers.py shows two ways that need none."""
    from torch.distributed.optim import _apply_optimizer_in_backward

    def call(group: Any) -> None:
        model = network()
        _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
        parallel = DistributedDataParallel(model, process_group=group)
        parallel(torch.ones(2, replicas.WIDE, dtype=torch.float64)).sum().backward()

    said = refused_alike("_apply_optimizer_in_backward under DDP", call, request.node, RuntimeError)
    agree(said, said)

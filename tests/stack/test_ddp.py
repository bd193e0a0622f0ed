"""What is special to DistributedDataParallel: groups, what it exchanges besides gradients, dtypes of gradients, torch's hooks.

And what is special to ZeroRedundancyOptimizer. That both train as one process does, under all options, is in test_training.py.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from tests.stack.sharded import (
    ROWS,
    SMALL,
    MakeOptimizer,
    adam,
    backward,
    batch,
    bits,
    ddp,
    differences,
    gradients,
    loss_of,
    network,
    same_bits,
    sgd,
    share,
    train,
    zero,
)
from tests.support import agree, everyone

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant", "ignore:Complex modules", "ignore:.*TorchScript:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.ao.quantization"),
]

FP32 = torch.float32


def by_ranks(rank: int, size: int) -> dict[str, Any]:
    return {"process_group": [dist.new_group(list(range(odd, size, 2))) for odd in range(min(size, 2))][rank % 2]}


def by_mesh(rank: int, size: int) -> dict[str, Any]:
    columns = 2 if size % 2 == 0 else 1
    return {"device_mesh": init_device_mesh("cpu", (size // columns, columns), mesh_dim_names=("dp", "other"))["dp"]}


@pytest.mark.parametrize("options", [by_ranks, by_mesh], ids=["process_group", "device_mesh"])
def test_groups_train_by_themselves(options: Callable[..., dict[str, Any]], rank: int, size: int) -> None:
    """Even and odd ranks: two models at once, from other weights, on other data; a group's rank 0 is not rank 0."""
    parallel = DistributedDataParallel(model := network(), **options(rank, size))
    group = parallel.process_group
    parallel.register_comm_hook(group, default_hooks.allreduce_hook)
    members, color = dist.get_world_size(group), min(dist.get_process_group_ranks(group))
    steps = range(10 * color, 10 * color + 3)
    train(parallel, sgd(model.parameters()), steps, dist.get_rank(group), members)
    reference = network()
    train(reference, sgd(reference.parameters()), steps, None, members)
    others = everyone(bits(model.parameters()))
    equal = all(others[r] == others[rank] for r in dist.get_process_group_ranks(group))
    bad = differences(model.parameters(), reference.parameters())
    agree(equal and not bad, bad)


@pytest.mark.min_ranks(2)
def test_different_models(rank: int, size: int) -> None:
    """One parameter more on the last rank: all ranks are told, and the group goes on."""
    model: nn.Module = network() if rank < size - 1 else nn.Linear(3, 3).double()
    with pytest.raises(RuntimeError) as refusal:
        DistributedDataParallel(model)
    dist.all_reduce(total := torch.ones(1))
    told = f"Rank {rank} has {len(list(model.parameters()))} params" in str(refusal.value)
    agree(told and total.item() == size, refusal.value)


class Branches(nn.Module):
    """Ranks may go different ways: parameters without gradient, other ones on each rank, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.trunk = nn.Linear(6, 6)
        self.branches = nn.ModuleList(nn.Linear(6, 3) for _ in range(2))
        self.never = nn.Linear(6, 3)
        self.double()

    def forward(self, x: Tensor, way: int) -> Tensor:
        return self.branches[way](torch.tanh(self.trunk(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("skip", [False, True], ids=["reduce-unused", "skip-unused"])
def test_ranks_take_different_ways(skip: bool, rank: int, size: int) -> None:
    """Other parameters are used on each rank and in each step: who used none of a layer gets the others' mean."""
    model, reference = Branches(), Branches()
    options = {"skip_all_reduce_unused_params": skip, "gradient_as_bucket_view": skip}
    parallel = DistributedDataParallel(model, find_unused_parameters=True, **options)
    wrong: list[Any] = []
    for step in range(4):
        x, y = batch(step, size)
        model.zero_grad()
        reference.zero_grad()
        ways = [(step if skip else step + r) % 2 for r in range(size)]  # what is skipped must be unused by all
        loss_of(parallel(share(x, rank), ways[rank]), share(y, rank)).backward()
        for r in range(size):
            (loss_of(reference(share(x, r), ways[r]), share(y, r)) / size).backward()
        wrong += differences(gradients(model), gradients(reference))
        wrong += [p for p in model.never.parameters() if p.grad is not None]
        for m in (model, reference):
            torch.optim.SGD(m.parameters(), lr=0.1).step()
    agree(same_bits(model.parameters()) and not wrong, wrong)


def test_buffers(rank: int, size: int) -> None:
    """BatchNorm's running means: in every forward pass from rank 0's."""
    norm, reference = (nn.BatchNorm1d(6).double() for _ in range(2))
    parallel = DistributedDataParallel(norm)
    for step in range(3):
        x, _ = batch(step, size)
        parallel(share(x, rank)).sum().backward()
        reference(share(x, 0 if step < 2 else rank))
    wrong = [name for (name, b), c in zip(norm.named_buffers(), reference.buffers(), strict=True) if not torch.equal(b, c)]
    agree(not wrong, (wrong, norm.running_mean, reference.running_mean))


class ManyDtypes(nn.Module):
    """Parameters of five dtypes, one more that is frozen, and one of no elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        for name in ("float64", "float32", "float16", "bfloat16", "complex64"):
            dtype = getattr(torch, name)
            values = torch.randn(6, 3, dtype=dtype if dtype.is_complex else torch.float64)
            self.register_parameter(f"of_{name}", nn.Parameter(values.to(dtype)))
        self.frozen = nn.Parameter(torch.randn(6, 3, dtype=torch.float64), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0, 3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        total = x @ self.frozen + self.empty.sum()
        for name, p in self.named_parameters():
            if name not in ("frozen", "empty"):
                wide = p.to(torch.complex128 if p.is_complex() else torch.float64)
                part = x.to(wide.dtype) @ wide
                total = total + (torch.view_as_real(part).sum(-1) if p.is_complex() else part)
        return total


@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
def test_dtypes(views: bool, rank: int, size: int) -> None:
    """One bucket for each dtype; complex gradients reach the backend as they are, from C++ (trap 24)."""
    model, reference = ManyDtypes(), ManyDtypes()
    backward(DistributedDataParallel(model, gradient_as_bucket_view=views), 0, rank, size)
    backward(reference, 0, None, size)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.complex64: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
    wrong = []
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        if p.requires_grad and not torch.allclose(p.grad, q.grad, rtol=tolerance[p.dtype], atol=tolerance[p.dtype]):  # type: ignore[arg-type]
            wrong.append((name, p.grad, q.grad))
    agree(same_bits(p.grad for p in model.parameters() if p.grad is not None) and not wrong, wrong)


class Words(nn.Module):
    """A table of which few rows are used in a step, and something dense behind it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.table, self.dense = nn.Embedding(20, 6, sparse=True), nn.Linear(6, 2)

    def forward(self, words: Tensor) -> Tensor:
        return self.dense(self.table(words).sum(1))  # type: ignore[no-any-return]


def words_of(rank: int, step: int) -> Tensor:
    """ROWS sentences of three words; some words only on some ranks, most of them several times."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, 6 + 5 * (rank % 3), (ROWS, 3), generator=generator)


@pytest.mark.parametrize("hooked", [False, True], ids=["", "hook"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_sparse_gradients(dtype: torch.dtype, hooked: bool, rank: int, size: int) -> None:
    """Each rank's gradient has other rows; the mean has them all, and is sparse still. A hook's bucket is the gradient itself."""
    model, reference = Words().to(dtype), Words().to(dtype)
    parallel = DistributedDataParallel(model)
    if hooked:
        parallel.register_comm_hook(None, default_hooks.allreduce_hook)
    for step in range(3):
        for m in (model, reference):
            m.zero_grad()
        parallel(words_of(rank, step)).square().mean().backward()
        reference(torch.cat([words_of(r, step) for r in range(size)])).square().mean().backward()
        sparse = all(m.table.weight.grad.is_sparse for m in (model, reference))  # type: ignore[union-attr]
        for m in (model, reference):
            torch.optim.SGD(m.parameters(), lr=0.05).step()
    tolerance = {torch.float64: 1e-12, torch.bfloat16: 3e-2}[dtype]
    bad = differences(model.parameters(), reference.parameters(), tolerance)
    agree(same_bits(model.parameters()) and sparse and not bad, bad)


def test_an_overflow_on_one_rank_skips_the_step_on_all(rank: int, size: int) -> None:
    """inf from one rank must come through the sum to everybody, or the replicas part (trap 33)."""
    model = network(torch.float32)
    before = copy.deepcopy(model)
    parallel = DistributedDataParallel(model)
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=4.0), torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = batch(0, size, torch.float32)
    loss = loss_of(parallel(share(x, rank)), share(y, rank)) * (float("inf") if rank == size - 1 else 1.0)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    bad = differences(model.parameters(), before.parameters(), 0)
    agree(not bad and scaler.get_scale() == 2.0, (bad, scaler.get_scale()))


# -- communication hooks that come with torch: what they do to the mean of gradients, or in its place to the models -------


def reduced(hook: Any, rank: int, size: int, state: Any = None, mb: float = SMALL, group: Any = None) -> list[Tensor]:
    """The gradients of a second step, reduced by the hook: a function, one of torch's in C++, or none."""
    parallel = DistributedDataParallel(network(FP32), bucket_cap_mb=mb, process_group=group)
    if isinstance(hook, dist.BuiltinCommHookType):
        parallel._register_builtin_comm_hook(hook)
    elif hook is not None:
        parallel.register_comm_hook(state, lambda state, bucket: hook(state, bucket))
    for step in range(2):
        parallel.zero_grad()
        backward(parallel, step, rank, size, FP32)
    return gradients(parallel)


def local(rank: int, size: int) -> list[Tensor]:
    """What ``rank`` brings to the second of those steps."""
    model = network(FP32)
    backward(model, 1, rank, size, FP32)
    return gradients(model)


def test_allreduce_hook(rank: int, size: int) -> None:
    """By None, by the group, and in C++: the same bits; without a hook DDP multiplies by 1/size in place of dividing."""
    hook, built_in = default_hooks.allreduce_hook, dist.BuiltinCommHookType.ALLREDUCE
    hooked = [reduced(hook, rank, size), reduced(hook, rank, size, dist.group.WORLD), reduced(built_in, rank, size)]
    right = [bits(found) == bits(hooked[0]) for found in hooked]
    far = differences(hooked[0], reduced(None, rank, size), 1e-6)
    agree(same_bits(hooked[0]) and all(right) and not far, (right, far))


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_compression(name: str, rank: int, size: int) -> None:
    """What every rank's gradient, rounded and divided, sums up to; the sum is rounded once. Likewise a hook in C++."""
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[name]
    hook, wrapper = getattr(default_hooks, f"{name}_compress_hook"), getattr(default_hooks, f"{name}_compress_wrapper")
    compressed = reduced(hook, rank, size)
    others = [reduced(wrapper(default_hooks.allreduce_hook), rank, size)]
    if name == "fp16":
        others.append(reduced(dist.BuiltinCommHookType.FP16_COMPRESS, rank, size))
    parts = [[g.to(dtype).div_(size).float() for g in local(r, size)] for r in range(size)]
    expected = [sum(column).to(dtype).float() for column in zip(*parts, strict=True)]  # type: ignore[union-attr]
    step = torch.finfo(dtype).eps if size > 2 else 0  # the fp32 sum of more than two depends on the order
    far = differences(compressed, expected, 1e-7 if step else 0, step)
    equal = [bits(other) == bits(compressed) for other in others]
    agree(same_bits(compressed) and not far and all(equal), (far, equal))


@pytest.mark.parametrize("where", ["hook", "callback"])
def test_an_error_in_a_hook(where: str, rank: int, size: int) -> None:
    """The group goes on."""

    def fails(*_: Any) -> Any:
        raise ArithmeticError("of the hook's own")

    def late(state: Any, bucket: Any) -> Future[Tensor]:
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(fails)  # type: ignore[no-any-return]

    said = ""
    try:
        reduced(fails if where == "hook" else late, rank, size)
    except Exception as error:  # noqa: BLE001  of which type, torch decides
        said = str(error)
    dist.all_reduce(total := torch.ones(1))
    agree("of the hook's own" in said and total.item() == size, said)


def trained(hook: Any, state: Any, rank: int, size: int) -> nn.Module:
    model = network(FP32, (8, 8, 3))
    model[3] = nn.Tanh()  # with a LayerNorm the gradients of one step lose more in fp16 than the test allows
    parallel = DistributedDataParallel(model, bucket_cap_mb=SMALL)
    if hook is not None:
        parallel.register_comm_hook(state, lambda state, bucket: hook(state, bucket))
    train(parallel, torch.optim.SGD(parallel.parameters(), lr=0.05), range(6), rank, size, FP32)
    return parallel


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16"])
def test_powersgd_of_several_buckets(name: str, rank: int, size: int) -> None:
    """The callbacks of one bucket and the all-reduces of the next must come in one order on all ranks, or they would be added
    to each other. With rank 8 nothing is lost, so that the means must come out; in halves by torch's wrappers.
    """
    hook = powerSGD_hook if name == "fp32" else getattr(default_hooks, f"{name}_compress_wrapper")(powerSGD_hook)
    standard = {"start_powerSGD_iter": 2, "min_compression_rate": 0.5, "orthogonalization_epsilon": 1e-8}
    model = trained(hook, PowerSGDState(dist.group.WORLD, matrix_approximation_rank=8, **standard), rank, size)
    tolerance = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2}[name]
    bad = differences(model.parameters(), trained(None, None, rank, size).parameters(), tolerance)
    agree(same_bits(model.parameters()) and not bad, bad)


@pytest.mark.parametrize("neighbours", [True, False], ids=["gradients-of-neighbours", "own-gradients"])
def test_post_local_sgd(neighbours: bool, rank: int, size: int) -> None:
    """DDP for two steps; then gradients are averaged among neighbours, or not at all, and models among all, now and then.

    The models of neighbours differ at the end, as they do on Gloo.
    """
    from torch.distributed.optim import PostLocalSGDOptimizer

    start, period, steps, models = 2, 2, 6, []  # the models were averaged before the last step
    pairs = [list(range(first, min(first + 2, size))) for first in range(0, size, 2)]
    for backend in ("mpi", "gloo"):
        everybody, pair = dist.new_group(backend=backend), [dist.new_group(ranks, backend=backend) for ranks in pairs][rank // 2]
        parallel = DistributedDataParallel(network(), process_group=everybody)
        state = PostLocalSGDState(everybody, pair, start, post_local_gradient_allreduce=neighbours)
        parallel.register_comm_hook(state, post_localSGD_hook)
        averager = PeriodicModelAverager(period, warmup_steps=start, process_group=everybody)
        optimizer = PostLocalSGDOptimizer(sgd(parallel.parameters()), averager)
        train(parallel, optimizer, range(steps), rank, size)
        models.append(list(parallel.parameters()))
        dist.destroy_process_group(pair)
        dist.destroy_process_group(everybody)
    bad = differences(*models)
    apart = size > (2 if neighbours else 1)
    agree(not bad and averager.step == steps and same_bits(models[0]) != apart, bad)


# -- ZeroRedundancyOptimizer: each rank keeps the state of its share of the parameters ---------------------------------

# Its two hooks that overlap the step with the backward pass are not for Gloo, which may hang in them: callbacks that broadcast
# must run in one order on all ranks. Ours do.


def test_state_is_consolidated_and_loaded_on_a_part_of_the_ranks(rank: int, size: int) -> None:
    """Even and odd ranks by themselves: owners are group ranks, broadcasts name global ones (trap 9).

    The last rank of each gathers the state; each rank takes its share of it back.
    """
    lists = [list(range(odd, size, 2)) for odd in range(min(size, 2))]
    group, ranks = [dist.new_group(each) for each in lists][rank % 2], lists[rank % 2]
    members, place, last = len(ranks), rank // 2, ranks[-1]
    model, reference = network(), network()
    optimizer, whole = zero(model.parameters(), adam, process_group=group), adam(reference.parameters())
    train(ddp(model, group), optimizer, range(3), place, members)
    optimizer.consolidate_state_dict(to=dist.get_group_rank(group, last))
    holder = [optimizer.state_dict() if rank == last else None]
    dist.broadcast_object_list(holder, src=last, group=group)
    resumed = copy.deepcopy(model)
    again = zero(resumed.parameters(), adam, process_group=group)
    again.load_state_dict(holder[0])
    train(ddp(resumed, group), again, range(3, 5), place, members)
    train(reference, whole, range(5), None, members)
    dist.destroy_process_group(group)
    wrong = differences(resumed.parameters(), reference.parameters(), 1e-9)
    agree(not wrong, wrong)


@pytest.mark.parametrize(
    ("static", "shard_buckets", "make"),
    [(False, False, sgd), (True, False, sgd), (False, True, adam), (True, True, adam)],
    ids=["dynamic", "static_graph", "shard_buckets", "static-shard_buckets"],
)
@pytest.mark.parametrize("name", ["hook_with_zero_step", "hook_with_zero_step_interleaved"])
def test_overlapped_with_ddp(name: str, static: bool, shard_buckets: bool, make: MakeOptimizer, rank: int, size: int) -> None:
    """Broadcasts from the callbacks of all-reduces. The first two passes (three if static) only look at the buckets."""
    from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook

    idle = 3 if static else 2
    model, reference = network(), network()
    parallel = ddp(model, static_graph=static, bucket_cap_mb=SMALL)
    optimizer = zero(parallel.parameters(), make, overlap_with_ddp=True)
    hook = getattr(ddp_zero_hook, name)(default_hooks.allreduce_hook, parallel, optimizer, shard_buckets=shard_buckets)
    parallel.register_comm_hook(None, hook)
    for step in range(idle + 4):
        model.zero_grad()
        backward(parallel, step, rank, size)
    train(reference, make(reference.parameters()), range(idle, idle + 4), None, size)
    bad = differences(model.parameters(), reference.parameters(), 1e-9)
    agree(same_bits(model.parameters()) and not bad, bad)

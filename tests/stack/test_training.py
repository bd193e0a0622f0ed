"""One table of the ways to train data parallel: each gives the weights that one process gets on the whole batch.

What is special to one way (its dtypes on the wire, its groups, its errors) is in the files test_ddp*.py and test_fsdp*.py.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.futures import Future

from tests.stack.sharded import (
    SMALL,
    TOLERANCE,
    TORCH,
    MakeOptimizer,
    adam,
    alone,
    backward,
    ddp,
    differences,
    gradients,
    network,
    same_bits,
    sgd,
    sharded,
    train,
    whole,
    zero,
)
from tests.support import agree

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*TorchScript:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning"),
]

FP32, FP64 = torch.float32, torch.float64
Way = Callable[[nn.Sequential, Any], tuple[Any, Any]]  # model, maker of an optimizer -> what to train, its optimizer


def since(version: tuple[int, int]) -> list[pytest.MarkDecorator]:
    return [pytest.mark.skipif(version > TORCH, reason=f"needs torch >= {'.'.join(map(str, version))}")]


class InBackward:
    """An optimizer for each parameter, which steps in the backward pass: at once, or when the Work of ``reduce`` has ended."""

    def __init__(self, model: nn.Module, make: MakeOptimizer, reduce: Callable[[Tensor], Any]) -> None:
        self.steppers = {p: make([p]) for p in model.parameters()}
        self.reduce, self.under_way = reduce, []  # type: ignore[var-annotated]
        for p in self.steppers:
            p.register_post_accumulate_grad_hook(self.arrived)

    def arrived(self, parameter: Tensor) -> None:
        self.under_way.append((parameter, work := self.reduce(parameter)))
        if work is None:
            self.step()

    def step(self) -> None:
        for parameter, work in self.under_way:
            if work is not None:
                work.wait()
            self.steppers[parameter].step()  # type: ignore[index]
            parameter.grad = None
        self.under_way.clear()

    def zero_grad(self) -> None:
        """Each gradient is dropped when it has been used."""


def with_optimizer(parallel: Any, make: MakeOptimizer) -> tuple[Any, Any]:
    return parallel, make(parallel.parameters())


def with_ddp(**options: Any) -> Way:
    return lambda model, make: with_optimizer(ddp(model, **options), make)


def on_a_mesh(model: nn.Sequential, make: Any) -> tuple[Any, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    return with_optimizer(ddp(model, device_mesh=mesh), make)


def delayed(model: nn.Sequential, make: Any) -> tuple[Any, Any]:
    """The last layer's gradients wait until the first layer's weight has its own, and travel in one buffer of float32."""
    last = [(name, p) for name, p in model.named_parameters() if name.startswith("4.")]
    parallel = ddp(model, delay_all_reduce_named_params=last, param_to_hook_all_reduce=model[0].weight)
    parallel, optimizer = with_optimizer(parallel, make)
    optimizer.register_step_pre_hook(lambda *_: dist.barrier())  # DDP keeps no Work for the buffer; this comes after it
    return parallel, optimizer


def with_hook(hook: Callable[[Any], Future[Tensor]], mb: float = SMALL) -> Way:
    """trap 45: from a callback one may start operations, and wait for them."""

    def way(model: nn.Sequential, make: Any) -> tuple[Any, Any]:
        parallel = ddp(model, bucket_cap_mb=mb)
        parallel.register_comm_hook(None, lambda state, bucket: hook(bucket))
        return with_optimizer(parallel, make)

    return way


def scattered(bucket: Any) -> Future[Tensor]:
    """All-reduce in two halves: reduce_scatter, then all_gather from its callback."""
    size, flat = dist.get_world_size(), bucket.buffer()
    padded = nn.functional.pad(flat, (0, -len(flat) % size))
    part = padded.new_empty(len(padded) // size)

    def gather(future: Future[Any]) -> Tensor:
        part.div_(size)
        dist.all_gather_into_tensor(padded, part, async_op=True).wait()
        return padded[: len(flat)]

    reduced: Future[Any] = dist.reduce_scatter_tensor(part, padded.clone(), async_op=True).get_future()
    return reduced.then(gather)


def blocking(bucket: Any) -> Future[Tensor]:
    """The callback does not come back before two more collectives have ended, each in the thread that would carry it out."""
    size = dist.get_world_size()

    def more(future: Future[Any]) -> Tensor:
        dist.all_reduce(sizes := torch.ones(3))
        dist.broadcast(sizes, 0)
        return future.value()[0] * (sizes[0] / size)  # type: ignore[no-any-return]

    return dist.all_reduce(bucket.buffer().div_(size), async_op=True).get_future().then(more)


def by_hand(async_op: bool) -> Way:
    """Each gradient is averaged and used as soon as it is there; or all are under way at once."""

    def reduce(parameter: Tensor) -> Any:
        return dist.all_reduce(parameter.grad, dist.ReduceOp.AVG, async_op=async_op)

    return lambda model, make: (model, InBackward(model, make, reduce))


def with_zero(**options: Any) -> Way:
    return lambda model, make: (ddp(model), zero(model.parameters(), make, **options))


def with_fsdp(prepare: Callable[[Any], Any] = lambda model: None, **options: Any) -> Way:
    def way(model: nn.Sequential, make: Any) -> tuple[Any, Any]:
        prepare(sharded(model, **options))
        return with_optimizer(model, make)

    return way


def plane(columns: int) -> Any:
    """A mesh of replicate x shard with so many columns, or with one if that does not divide the ranks."""
    columns = columns if dist.get_world_size() % columns == 0 else 1
    return init_device_mesh("cpu", (dist.get_world_size() // columns, columns), mesh_dim_names=("replicate", "shard"))


def hybrid(columns: int, **options: Any) -> Way:
    return lambda model, make: with_optimizer(sharded(model, mesh=plane(columns), **options), make)


def groups(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def prefetching(model: Any) -> None:
    """Several gathers are under way at once, and their results are taken in another order than they were asked for."""
    model.set_modules_to_forward_prefetch([model[0], model[2]])
    model[0].set_modules_to_forward_prefetch([model[2]])
    model.set_modules_to_backward_prefetch([model[0], model[2]])
    model[2].set_modules_to_backward_prefetch([model[0]])
    model._set_unshard_async_op(True)


def two_groups(model: Any) -> None:
    """Gathers and reduce-scatters may be under way at once, each in the order of its own group."""
    model.set_separate_reduce_scatter_group(True)
    model.set_reduce_scatter_max_input_buffers(2)
    prefetching(model)


class Gather:
    """An all-gather of the user's own, into slices of one buffer, of which the input is one (trap 34)."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.full(size, 7, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        return dist.all_gather(list(output_tensor.chunk(group.size())), input_tensor, group=group, async_op=async_op)


class Scatter(Gather):
    """A reduce-scatter of the user's own: all-reduce, and keep one block."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> None:  # type: ignore[override]
        dist.all_reduce(input_tensor, op, group=group)
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])


def of_ones_own(model: Any) -> None:
    for group in groups(model):
        group.set_custom_all_gather(Gather())
        group.set_custom_reduce_scatter(Scatter())


def memory_of_the_group(model: Any) -> None:
    """torch asks the backend whether it has memory of its own; it must answer."""
    for group in groups(model):
        group.set_allocate_memory_from_process_group_for_comm(True)


def checkpointed(way: Way) -> Way:
    """The forward pass of each Linear runs again inside the backward pass, and FSDP gathers again."""

    def with_checkpoints(model: nn.Sequential, make: Any) -> tuple[Any, Any]:
        apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, nn.Linear))
        return way(model, make)

    return with_checkpoints


class Image(nn.Module):
    """Makes images in channels_last of the rows."""

    def forward(self, x: Tensor) -> Tensor:
        images = x[:, :3, None, None] * x[:, None, 3:, None] * x[:, None, None, :3]
        return images.contiguous(memory_format=torch.channels_last)


def convolutions(dtype: torch.dtype) -> nn.Sequential:
    """Dense weights whose strides are not row-major: broadcast at the start, reduced in a bucket of the same strides."""
    torch.manual_seed(7)
    layers = nn.Sequential(Image(), nn.Conv2d(3, 4, 2), nn.Tanh(), nn.Conv2d(4, 3, 2), nn.Flatten())
    return layers.to(dtype).to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def row(name: str, way: Way, dtype: Any = FP64, make: Any = sgd, build: Any = network, marks: Any = ()) -> Any:
    return pytest.param(way, dtype, make, build, id=name, marks=marks)


STATIC = {"static_graph": True, "gradient_as_bucket_view": True, "bucket_cap_mb": SMALL}
OFFLOAD = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
WAYS = [
    row("ddp", with_ddp()),
    row("buckets", with_ddp(bucket_cap_mb=SMALL)),
    row("static", with_ddp(**STATIC)),
    row("views", with_ddp(gradient_as_bucket_view=True)),
    row("unused", with_ddp(find_unused_parameters=True)),
    row("channels-last", with_ddp(gradient_as_bucket_view=True), build=convolutions),
    row("checkpointed", checkpointed(with_ddp(bucket_cap_mb=SMALL))),
    row("bfloat16", with_ddp(bucket_cap_mb=SMALL), torch.bfloat16),
    row("float16", with_ddp(bucket_cap_mb=SMALL), torch.float16),
    row("delayed", delayed, FP32),
    row("mesh", on_a_mesh),
    *(row(hook.__name__, with_hook(hook)) for hook in (scattered, blocking)),
    row("one-bucket", with_hook(scattered, mb=25)),
    row("in-backward", by_hand(async_op=False)),
    row("in-backward-async", by_hand(async_op=True)),
    row("zero", with_zero()),
    row("zero-views", with_zero(parameters_as_bucket_view=True), make=adam),
    row("fsdp", with_fsdp(), make=adam),
    row("fsdp-float32", with_fsdp(), FP32),
    row("reshard", with_fsdp(reshard_after_forward=True)),
    row("keep", with_fsdp(reshard_after_forward=False)),
    row("reshard-to-pairs", with_fsdp(reshard_after_forward=2), marks=[pytest.mark.ranks(4, 8)]),
    row("hybrid-to-pairs", hybrid(4, reshard_after_forward=2), marks=[pytest.mark.ranks(4, 8)]),
    row("offload", with_fsdp(**OFFLOAD)),
    row("fsdp-checkpointed", checkpointed(with_fsdp())),
    row("prefetch", with_fsdp(prefetching)),
    row("own-collectives", with_fsdp(of_ones_own)),
    row("memory", with_fsdp(memory_of_the_group)),
    row("two-groups", with_fsdp(two_groups), marks=since((2, 13))),
    row("hybrid", hybrid(2)),
    row("hybrid-float32", hybrid(2), FP32),
    row("hybrid-columns", hybrid(1)),
    row("replicate", lambda model, make: with_optimizer(replicate(model), make)),
]


@pytest.mark.parametrize(("way", "dtype", "make", "build"), WAYS)
def test_trains_as_one_process_does(way: Way, dtype: torch.dtype, make: Any, build: Any, rank: int, size: int) -> None:
    """Five steps: any gradient that is not the mean of all ranks' shows, and a padded row that leaks.

    Halves are rounded on the way: every replica must round alike, step after step, near what float32 gives.
    """
    parallel, optimizer = way(build(dtype), make)
    train(parallel, optimizer, range(5), rank, size, dtype)
    wide = dtype if dtype in TOLERANCE else FP32
    reference = alone(5, size, make, wide, build)
    found = [whole(p).to(wide) for p in parallel.parameters()]
    bad = differences(found, reference.parameters(), TOLERANCE.get(dtype, 0.1))
    agree(same_bits(parallel.parameters()) and not bad, bad)


Between = Callable[[Any, bool], AbstractContextManager[Any]]


def no_sync(parallel: Any, last: bool) -> AbstractContextManager[Any]:
    return nullcontext() if last else parallel.no_sync()  # type: ignore[no-any-return]


def calling(**values: Callable[[bool], bool]) -> Between:
    """Calls these methods of the model, with a value for the last micro-batch and one for the others."""

    def between(parallel: Any, last: bool) -> AbstractContextManager[Any]:
        for method, value in values.items():
            getattr(parallel, method)(value(last))
        return nullcontext()

    return between


@contextmanager
def finalized(parallel: Any, last: bool) -> Iterator[None]:
    """All gradients are reduced when the program says so, behind a handle."""
    parallel.set_manual_backward_finalization(True)
    parallel.set_requires_gradient_sync(False)
    yield
    if last:
        parallel.set_requires_gradient_sync(True)
        parallel.finalize_backward(async_op=True).wait()


def same(last: bool) -> bool:
    return last


ONCE = {"set_requires_gradient_sync": same, "set_is_last_backward": same}
hybrid_sync = calling(set_requires_all_reduce=same, set_is_last_backward=same)


@pytest.mark.parametrize(
    ("wrap", "between", "once"),
    [
        pytest.param(lambda m: ddp(m, bucket_cap_mb=SMALL), no_sync, True, id="ddp"),
        pytest.param(lambda m: ddp(m, gradient_as_bucket_view=True), no_sync, True, id="views"),
        pytest.param(sharded, calling(**ONCE), True, id="fsdp-once"),
        pytest.param(sharded, calling(set_is_last_backward=same), False, id="fsdp-each-time"),
        pytest.param(sharded, calling(**ONCE, set_reshard_after_backward=same), True, id="fsdp-stays-gathered"),
        pytest.param(lambda m: sharded(m, mesh=plane(2)), hybrid_sync, False, id="hybrid"),
        pytest.param(sharded, finalized, False, id="finalized", marks=since((2, 15))),
        pytest.param(replicate, calling(set_requires_gradient_sync=same), True, id="replicate"),
    ],
)
def test_gradients_add_up(wrap: Callable[[nn.Module], Any], between: Between, once: bool, rank: int, size: int) -> None:
    """Three micro-batches are one step. ``once``: nothing is reduced before the last."""
    parallel, reference, local = wrap(network()), network(), network()
    bad: list[Any] = []
    for step in range(3):
        with between(parallel, step == 2):
            backward(parallel, step, rank, size)
        backward(reference, step, None, size)
        if once and step < 2:
            backward(local, step, rank, size)
            early = [(p.grad, q.grad) for p, q in zip(parallel.parameters(), local.parameters(), strict=True)]
            bad += [(step, mine) for mine, right in early if mine is not None and not torch.equal(mine, right)]  # type: ignore[arg-type]
    bad += differences(gradients(parallel), gradients(reference))
    agree(not bad, bad)

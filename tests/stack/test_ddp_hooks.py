"""DDP's communication hooks: those of torch, and one's own, against the exact mean of the gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms import ddp_comm_hooks
from torch.distributed.algorithms.ddp_comm_hooks import DDPCommHookType, debugging_hooks, default_hooks, quantization_hooks
from torch.futures import Future, collect_all
from torch.nn.parallel import DistributedDataParallel

from tests.stack import replicas
from tests.stack.record import refused_alike
from tests.stack.replicas import apart, batch, bits, close, gradients_apart, loss_of, network, same_bits, share, train
from tests.support import agree

SECTION = "Data parallel"
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*torch.ao.quantization")

SMALL = 100 / 2**20  # MiB
feature = pytest.mark.feature
Hook = Callable[[Any, Any], Future[Tensor]]
# DDP refuses hooks called bf16_compress_hook, whatever the backend, in builds of torch without CUDA; not what they do.
CPU_BUILD = torch.version.cuda is None and torch.version.hip is None
QUANTIZES = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 15)


def renamed(hook: Hook) -> Hook:
    def own(state, bucket):  # type: ignore[no-untyped-def]  # torch compares annotations with types, not with strings
        return hook(state, bucket)

    return own


def gradients(hook: Hook | None, rank: int, size: int, state: Any = None, mb: float = 25, builtin: Any = None) -> nn.Module:
    """A model with the gradients of two steps behind it, reduced by the hook."""
    model = network(dtype=torch.float32)
    parallel = DistributedDataParallel(model, bucket_cap_mb=mb)
    if builtin is not None:
        parallel._register_builtin_comm_hook(builtin)
    elif hook is not None:
        parallel.register_comm_hook(state, hook)
    for step in range(2):
        x, y = batch(step, size, torch.float32)
        model.zero_grad()
        loss_of(parallel(share(x, rank)), share(y, rank)).backward()
    return model


def local_gradients(rank: int, size: int) -> list[Tensor]:
    """What ``rank`` brings to the second of those steps."""
    model = network(dtype=torch.float32)
    x, y = batch(1, size, torch.float32)
    loss_of(model(share(x, rank)), share(y, rank)).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def got(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


@feature("DDP hooks: allreduce_hook, built-in ALLREDUCE")
@pytest.mark.parametrize("mb", [25, SMALL], ids=["one-bucket", "buckets"])
def test_allreduce_hook(mb: float, rank: int, size: int) -> None:
    """By None, by the group, and in C++: the same bits; without a hook DDP multiplies by 1/size in place of dividing."""
    plain = gradients(None, rank, size, mb=mb)
    hooked = [
        gradients(default_hooks.allreduce_hook, rank, size, mb=mb),
        gradients(default_hooks.allreduce_hook, rank, size, dist.group.WORLD, mb=mb),
        gradients(None, rank, size, builtin=dist.BuiltinCommHookType.ALLREDUCE, mb=mb),
    ]
    right = [bits(got(model)) == bits(got(hooked[0])) for model in hooked]
    far = gradients_apart(hooked[0], plain, 1e-6)
    agree(same_bits(got(hooked[0])) and all(right) and not far, (right, far))


@feature("DDP hooks: fp16_compress, bf16_compress, their wrappers, built-in FP16_COMPRESS")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mb", [25, SMALL], ids=["one-bucket", "buckets"])
def test_compression(mb: float, dtype: torch.dtype, rank: int, size: int) -> None:
    """What every rank's gradient, rounded and divided, sums up to; the sum is rounded once."""
    name = {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
    hook, wrapper = getattr(default_hooks, f"{name}_compress_hook"), getattr(default_hooks, f"{name}_compress_wrapper")
    hook, wrapped_hook = renamed(hook), renamed(wrapper(default_hooks.allreduce_hook))
    compressed = got(gradients(hook, rank, size, mb=mb))
    wrapped = got(gradients(wrapped_hook, rank, size, mb=mb))
    parts = [[g.to(dtype).div_(size).float() for g in local_gradients(r, size)] for r in range(size)]
    expected = [sum(column).to(dtype).float() for column in zip(*parts, strict=True)]  # type: ignore[union-attr]
    step = torch.finfo(dtype).eps if size > 2 else 0  # the fp32 sum of more than two depends on the order
    right = [torch.allclose(c, e, rtol=step, atol=1e-7 if step else 0) for c, e in zip(compressed, expected, strict=True)]
    agree(same_bits(compressed) and all(right) and bits(wrapped) == bits(compressed), (right, compressed, expected))


@feature("DDP hooks: fp16_compress, bf16_compress, their wrappers, built-in FP16_COMPRESS")
def test_built_in_compression(rank: int, size: int) -> None:
    """A hook in C++, which reads the Future of our all_reduce."""
    built_in = gradients(None, rank, size, builtin=dist.BuiltinCommHookType.FP16_COMPRESS, mb=SMALL)
    compressed = gradients(default_hooks.fp16_compress_hook, rank, size, mb=SMALL)
    agree(bits(got(built_in)) == bits(got(compressed)), gradients_apart(built_in, compressed))


@feature("DDP hooks: fp16_compress, bf16_compress, their wrappers, built-in FP16_COMPRESS")
@pytest.mark.skipif(not CPU_BUILD, reason="a build for CUDA does not mind")
def test_bf16_by_its_own_name(request: pytest.FixtureRequest, rank: int, size: int) -> None:
    """Refused by name before anything moves; a function of one's own that calls it works, see above."""

    def call(group: Any) -> None:
        parallel = DistributedDataParallel(network(dtype=torch.float32), process_group=group)
        parallel.register_comm_hook(group, default_hooks.bf16_compress_hook)

    said = refused_alike("register_comm_hook(bf16_compress_hook) in a build without CUDA", call, request.node, TypeError)
    agree("BF16" in said, said)


@feature("DDP hooks: noop_hook")
def test_noop_hook(rank: int, size: int) -> None:
    """Nothing is exchanged: each rank's own gradient, which differs from its neighbour's."""
    mine = bits(got(gradients(debugging_hooks.noop_hook, rank, size)))
    agree(mine == bits(local_gradients(rank, size)), "reduced")


@feature("DDP hooks: by name (register_ddp_comm_hook)")
def test_hooks_by_name(rank: int, size: int) -> None:
    """All of DDPCommHookType that torch can do on a CPU; the PowerSGD ones begin with plain all-reduces."""
    reference = gradients(None, rank, size)
    wrong: list[Any] = []
    for kind in DDPCommHookType:
        if (kind.name.startswith("QUANTIZE") and not QUANTIZES) or (kind.name == "BF16_COMPRESS" and CPU_BUILD):
            continue
        model = network(dtype=torch.float32)
        parallel = DistributedDataParallel(model)
        ddp_comm_hooks.register_ddp_comm_hook(kind, parallel, dist.group.WORLD)
        x, y = batch(1, size, torch.float32)
        loss_of(parallel(share(x, rank)), share(y, rank)).backward()
        if kind.name == "NOOP":
            wrong += [] if bits(got(model)) == bits(local_gradients(rank, size)) else [kind]
        elif far := gradients_apart(model, reference, 2e-2):
            wrong.append((kind, far))
    agree(not wrong, wrong)


@feature("DDP hooks: quantization")
@pytest.mark.parametrize("kind", ["pertensor", "perchannel"])
def test_quantization(kind: str, request: pytest.FixtureRequest, rank: int, size: int) -> None:
    """Two all_gathers, the second from the callback of the first; before 2.15 torch expects NCCL's answer to all_gather."""
    hook = getattr(quantization_hooks, f"quantization_{kind}_hook")

    def call(group: Any) -> Tensor:
        parallel = DistributedDataParallel(network(dtype=torch.float32), process_group=group)
        parallel.register_comm_hook(group, hook)
        x, y = batch(1, size, torch.float32)
        loss_of(parallel(share(x, rank)), share(y, rank)).backward()
        return torch.cat([g.reshape(-1) for g in got(parallel)])

    if not QUANTIZES:
        said = refused_alike(f"quantization_{kind}_hook (mended in torch 2.15)", call, request.node, RuntimeError)
        agree("callback" in said, said)
        return
    quantized = call(dist.group.WORLD)
    parts = [torch.cat([g.reshape(-1) for g in local_gradients(r, size)]) for r in range(size)]
    step = max(float(part.max() - part.min()) / 255 for part in parts)  # of the coarsest rank's scale
    far = float((quantized - sum(parts) / size).abs().max())
    agree(same_bits([quantized]) and far <= step, (far, step))


@feature("DDP hooks: on a part of the ranks")
def test_hook_on_another_group(rank: int, size: int) -> None:
    """Broadcast at the start among all, gradients among neighbours only."""
    pairs = [list(range(first, min(first + 2, size))) for first in range(0, size, 2)]
    groups = [dist.new_group(ranks) for ranks in pairs]
    mine, ranks = groups[rank // 2], pairs[rank // 2]
    model = gradients(default_hooks.allreduce_hook, rank, size, mine)
    parts = [local_gradients(r, size) for r in ranks]
    expected = [sum(column) / len(ranks) for column in zip(*parts, strict=True)]
    dist.destroy_process_group(mine)
    right = [torch.allclose(g, e, atol=1e-6) for g, e in zip(got(model), expected, strict=True)]
    agree(all(right), right)


def scattered(state: Any, bucket: Any) -> Future[Tensor]:
    """All-reduce in two halves: reduce_scatter, then all_gather from its callback."""
    size = dist.get_world_size()
    flat = bucket.buffer()
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % size))
    part = torch.empty(len(padded) // size)

    def gather(future: Future[Any]) -> Tensor:
        part.div_(size)
        dist.all_gather_into_tensor(padded, part, async_op=True).wait()
        return padded[: len(flat)]

    reduced: Future[Any] = dist.reduce_scatter_tensor(part, padded.clone(), async_op=True).get_future()
    return reduced.then(gather)


def in_pieces(state: Any, bucket: Any) -> Future[Tensor]:
    """One all-reduce for each parameter of the bucket, under way together."""
    size = dist.get_world_size()
    works = [dist.all_reduce(g.div_(size), async_op=True) for g in bucket.gradients()]
    every = collect_all([work.get_future() for work in works])
    return every.then(lambda _: bucket.buffer())


def blocking(state: Any, bucket: Any) -> Future[Tensor]:
    """The callback does not come back before two more collectives have ended, each in the thread that would carry it out."""
    size = dist.get_world_size()

    def more(future: Future[Any]) -> Tensor:
        dist.all_reduce(sizes := torch.ones(3))
        dist.broadcast(sizes, 0)
        return future.value()[0] * (sizes[0] / size)  # type: ignore[no-any-return]

    return dist.all_reduce(bucket.buffer().div_(size), async_op=True).get_future().then(more)


def by_broadcast(state: Any, bucket: Any) -> Future[Tensor]:
    """Rank 0 reduces and broadcasts, in this thread; the Future is complete at once."""
    flat = bucket.buffer().div_(dist.get_world_size())
    dist.reduce(flat, 0)
    dist.broadcast(flat, 0)
    done: Future[Tensor] = Future()
    done.set_result(flat)
    return done


@feature("DDP hooks: one's own, with any collectives, chained in callbacks")
@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.parametrize("hook", [scattered, in_pieces, blocking, by_broadcast])
@pytest.mark.parametrize("mb", [25, SMALL], ids=["one-bucket", "buckets"])
def test_own_hooks(mb: float, hook: Hook, rank: int, size: int) -> None:
    """trap 45: from a callback one may start operations, and wait for them."""
    hook.__annotations__.clear()  # torch compares annotations with types, and finds strings
    model, reference = gradients(hook, rank, size, mb=mb), gradients(None, rank, size)
    far = gradients_apart(model, reference, 1e-6)
    agree(same_bits(got(model)) and not far, far)


@feature("DDP hooks: an error in a hook arrives at backward()")
@pytest.mark.parametrize("where", ["hook", "callback"])
def test_an_error_in_a_hook(where: str, rank: int, size: int) -> None:
    """The group goes on."""

    def hook(state, bucket):  # type: ignore[no-untyped-def]
        if where == "hook":
            raise ArithmeticError("of the hook's own")

        def fails(future):  # type: ignore[no-untyped-def]
            raise ArithmeticError("of the hook's own")

        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(fails)

    said = ""
    try:
        gradients(hook, rank, size)
    except Exception as error:  # noqa: BLE001  of which type, torch decides
        said = str(error)
    dist.all_reduce(total := torch.ones(1))
    agree("of the hook's own" in said and total.item() == size, said)


@feature("DDP hooks: buffers (_register_buffer_comm_hook)")
def test_buffer_hook(rank: int, size: int) -> None:
    """Statistics averaged over the ranks after each forward pass, in place of rank 0's; backward() waits for the hook."""

    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))
            self.register_buffer("mean", torch.zeros(replicas.WIDE, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
            return x * self.weight

    def hook(state, buffers):  # type: ignore[no-untyped-def]
        return [dist.all_reduce(b.div_(size), async_op=True).get_future() for b in buffers.values()]

    model, expected = Centred(), torch.zeros(replicas.WIDE, dtype=torch.float64)
    parallel = DistributedDataParallel(model)
    parallel._register_buffer_comm_hook(None, hook)
    for step in range(3):
        x, _ = batch(step, size)
        parallel(share(x, rank)).sum().backward()
        expected = 0.5 * expected + 0.5 * x.mean(0)
    agree(same_bits(model) and torch.allclose(model.mean, expected), (model.mean, expected))


@feature("DDP hooks: optimizer overlapped with backward (_register_fused_optim)")
@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.parametrize("mb", [25, SMALL], ids=["one-bucket", "buckets"])
def test_fused_optimizer(mb: float, rank: int, size: int) -> None:
    """The step of a bucket's parameters runs in the callback of its all-reduce: there is no optimizer.step()."""
    model, reference = network(), network()
    parallel = DistributedDataParallel(model, bucket_cap_mb=mb)
    parallel._register_fused_optim(torch.optim.Adam, lr=0.01)
    for step in range(4):
        x, y = batch(step, size)
        model.zero_grad()
        loss_of(parallel(share(x, rank)), share(y, rank)).backward()
    train(reference, 4, size, optimizer=torch.optim.Adam(reference.parameters(), lr=0.01))
    agree(same_bits(model) and close(model, reference, 1e-9), apart(model, reference, 1e-9))


@feature("DDP hooks: optimizer overlapped with backward (_register_fused_optim)")
@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_fused_optimizer_of_some_parameters(rank: int, size: int) -> None:
    """The rest keeps gradients, for an ordinary optimizer."""
    model, reference = network(), network()
    fused, rest = list(model[0].parameters()), [p for layer in model[1:] for p in layer.parameters()]
    parallel = DistributedDataParallel(model)
    parallel._register_fused_optim(torch.optim.SGD, optim_params=fused, lr=0.1)
    ordinary = torch.optim.SGD(rest, lr=0.1)
    for step in range(3):
        x, y = batch(step, size)
        model.zero_grad()
        loss_of(parallel(share(x, rank)), share(y, rank)).backward()
        ordinary.step()
    train(reference, 3, size, optimizer=torch.optim.SGD(reference.parameters(), lr=0.1))
    agree(same_bits(model) and close(model, reference, 1e-9), apart(model, reference, 1e-9))

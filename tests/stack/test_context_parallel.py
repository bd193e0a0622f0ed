"""Context parallelism over MPI: sequences split over ranks, ring attention, rotation, load balance, heads for tokens.

On the CPU torch's ``context_parallel`` serves attention by the MATH backend without a mask; the ring under it serves the
CPU's flash kernel as well, causal or not, forward and backward, if it is called by hand, as it is here.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as cp
from torch.distributed.tensor.experimental._context_parallel._load_balancer import _HeadTailLoadBalancer
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tests.stack.meshes import drawn, grids, line
from tests.support import agree

TOKENS, SEQUENCE = 4, 2  # tokens per rank and half of the ring's balanced share; the dimension of the sequence
FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning"),
]


@pytest.fixture(autouse=True)
def options() -> Iterator[Any]:
    """torch keeps the options of context parallelism in a global; each test starts from its own."""
    before = dict(vars(cp._cp_options))
    yield cp._cp_options
    vars(cp._cp_options).update(before)


def attended(leaves: list[Tensor], weight: Tensor, causal: bool) -> list[Tensor]:
    """One process's output, and the gradients of query, key and value."""
    plain = [t.clone().requires_grad_() for t in leaves]
    output = F.scaled_dot_product_attention(*plain, is_causal=causal)
    return [output.detach(), *torch.autograd.grad((output * weight).sum(), plain)]


class Layer(nn.Module):
    """Self-attention over (batch, sequence, features)."""

    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.qkv, self.out, self.causal = nn.Linear(6, 18), nn.Linear(6, 6), causal
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 3)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("rotation", ["allgather", "alltoall"])
def test_context_parallel(rotation: str, rank: int, size: int, options: Any) -> None:
    """Tokens over cp, sequences over dp: outputs, and the parameters' gradients summed over all ranks, are one process's."""
    options.enable_load_balance = False
    cp.set_rotate_method(rotation)
    wrong = []
    for grid in [grid for grid in grids(size, 2) if grid[1] > 1 or size == 1]:
        mesh = init_device_mesh("cpu", grid, mesh_dim_names=("dp", "cp"))
        inputs, target = drawn(2 * grid[0], TOKENS * grid[1], 6, seed=0), drawn(2 * grid[0], TOKENS * grid[1], 6, seed=1)
        model, reference = Layer(), Layer()
        expected = reference(inputs)
        (expected - target).square().sum().backward()
        mine = slice(2 * mesh.get_local_rank("dp"), 2 * mesh.get_local_rank("dp") + 2)
        x, y = inputs[mine].clone(), target[mine].clone()
        with (
            sdpa_kernel(SDPBackend.MATH),
            context_parallel(mesh["cp"], buffers=[x, y], buffer_seq_dims=[1, 1], no_restore_buffers={y}),
        ):
            output = model(x)
            (output - y).square().sum().backward()
            shapes = x.shape, y.shape
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        (full,) = cp.context_parallel_unshard(mesh["cp"], [output], [1])
        if not torch.allclose(full, expected[mine], rtol=0, atol=1e-12) or shapes != ((2, TOKENS, 6),) * 2:
            wrong.append((grid, "output", full, expected, shapes))
        if not torch.equal(x, inputs[mine]) or y.shape != (2, TOKENS, 6):
            wrong.append((grid, "buffers", x, y))
        pairs = zip(model.parameters(), reference.parameters(), strict=True)
        wrong += [(grid, p.grad, q.grad) for p, q in pairs if not torch.allclose(p.grad, q.grad, rtol=0, atol=1e-10)]
    agree(not wrong, wrong[:2])


@pytest.mark.parametrize("rotation", ["allgather", "alltoall"])
@pytest.mark.parametrize(("causal", "balance"), [(False, False), (True, False), (True, True)], ids=["full", "causal", "balanced"])
def test_ring_attention(rotation: str, causal: bool, balance: bool, rank: int, size: int, options: Any) -> None:
    """Keys and values go round once; partial results are merged by their log-sum-exp; gradients come round the other way.

    Balanced, rank r holds the r-th and the r-th last of 2n pieces of the tokens; unsharding restores their order.
    """
    options.enable_load_balance, options.convert_to_f32 = balance, False
    cp.set_rotate_method(rotation)
    mesh, group = line(size), line(size).get_group()
    *inputs, weight = [drawn(2, 3, 2 * TOKENS * size, 8, seed=i) for i in range(4)]  # an even number of tokens per rank
    balancer = cp._create_default_load_balancer(2 * TOKENS * size, size, torch.device("cpu"))
    q, k, v, grad = cp._context_parallel_buffers(mesh, [*inputs, weight], [SEQUENCE] * 4, balancer)
    out, sums = cp._templated_ring_attention(group, SEQUENCE, FORWARD, q, k, v, is_causal=causal)
    gradients = cp._templated_ring_attention_backward(
        group, SEQUENCE, BACKWARD, grad_out=grad, grad_out_name="grad_out", query=q, key=k, value=v, out=out, logsumexp=sums,
        is_causal=causal, dropout_p=0.0,
    )  # fmt: skip
    found = cp.context_parallel_unshard(mesh, [out, *gradients], [SEQUENCE] * 4, balancer)
    answers = attended(inputs, weight, causal)
    far = [float((a - b).abs().max()) for a, b in zip(found, answers, strict=True)]
    agree(max(far) < 1e-12, far)


@pytest.mark.parametrize("causal", [False, True])
def test_heads_for_tokens(causal: bool, rank: int, size: int) -> None:
    """Shard(sequence) -> Shard(heads) -> attention with any kernel and mask -> Shard(sequence), with gradients."""

    def between(x: Tensor, source: int, target: int) -> Tensor:
        return (
            DTensor.from_local(x, line(size), [Shard(source)], run_check=False)
            .redistribute(placements=[Shard(target)])
            .to_local()
        )

    *inputs, weight = [drawn(2, 2 * size, 3 * size, 4, seed=i) for i in range(4)]
    mine = [t.chunk(size, SEQUENCE)[rank].clone().requires_grad_() for t in inputs]
    by_heads = F.scaled_dot_product_attention(*(between(t, SEQUENCE, 1) for t in mine), is_causal=causal)
    output = between(by_heads, 1, SEQUENCE)
    (output * weight.chunk(size, SEQUENCE)[rank]).sum().backward()
    answers = [answer.chunk(size, SEQUENCE)[rank] for answer in attended(inputs, weight, causal)]
    found = [output.detach(), *(m.grad for m in mine)]
    far = [float((a - b).abs().max()) for a, b in zip(found, answers, strict=True)]
    agree(max(far) < 1e-12, far)


@pytest.mark.parametrize("balance", [False, True])
def test_flex_attention(balance: bool, rank: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A causal BlockMask, cut for each rank's queries; blocks have 128 tokens."""

    class Flex(nn.Module):
        def forward(self, *qkv: Tensor, block_mask: Any) -> Tensor:
            return flex_attention(*qkv, block_mask=block_mask)

    monkeypatch.setattr(cp, "_compiled_create_block_mask", create_block_mask)  # compiled it takes a minute more
    mesh, length = line(size), 256 * size
    inputs = [drawn(1, 2, length, 8, seed=i, dtype=torch.float32) for i in range(3)]
    mask = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, length, length, device="cpu")
    expected = F.scaled_dot_product_attention(*inputs, is_causal=True)
    balancer = _HeadTailLoadBalancer(length, size, torch.device("cpu")) if balance else None
    *shards, mine = cp._context_parallel_shard(mesh, [*inputs, mask], [SEQUENCE] * 4, load_balancer=balancer)
    style = cp._ContextParallel(seq_dim=SEQUENCE, attention_type=cp._ContextParallel.AttentionType.FLEX)
    output = parallelize_module(Flex(), mesh, style)(*shards, block_mask=mine)
    (full,) = cp.context_parallel_unshard(mesh, [output], [SEQUENCE], balancer)
    agree(torch.allclose(full, expected, atol=1e-5), float((full - expected).abs().max()))

"""Operations on sharded DTensors over MPI, forward and backward, equal to the same operation in one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from tests.stack.meshes import drawn, grids, whole
from tests.support import agree

SECTION = "Meshes and DTensor"
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
S0, S1, S2, R = Shard(0), Shard(1), Shard(2), Replicate()

# What torch 2.11 has no rule for, or tears a shard where it should gather it first
SINCE_2_13 = {
    "cumsum", "sort", "topk", "reshape", "flip", "roll", "gather", "index_select", "indexing", "scatter_add",
    "cross entropy, smoothed",
}  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")


def difference(
    function: Callable[..., Tensor],
    inputs: Sequence[Tensor],
    mesh: DeviceMesh,
    placements: Sequence[Sequence[Placement]],
    tolerance: float = 1e-11,
) -> object:
    """What is wrong with ``function`` of ``inputs``, placed so, and with its gradients, beside one process; None if nothing."""
    plain = [t.clone().requires_grad_(t.is_floating_point()) for t in inputs]
    expected = function(*plain)
    placed = [
        distribute_tensor(t, mesh, p).requires_grad_(t.is_floating_point()) for t, p in zip(inputs, placements, strict=True)
    ]
    found = whole(function(*placed))
    if found.shape != expected.shape or not torch.allclose(found.detach(), expected.detach(), rtol=0, atol=tolerance):
        return ("forward", *_beside(found, expected))
    if not expected.requires_grad:
        return None
    weight = drawn(*expected.shape, seed=7, dtype=expected.dtype)
    (expected * weight).sum().backward()
    (found * weight).sum().backward()
    for i, (a, b) in enumerate(zip(placed, plain, strict=True)):
        if b.grad is not None and not torch.allclose(whole(a.grad), b.grad, rtol=0, atol=tolerance):
            return (f"gradient of input {i}", *_beside(whole(a.grad), b.grad))
    return None


def _beside(found: Tensor, expected: Tensor) -> tuple[object, ...]:
    if found.shape != expected.shape:
        return found.shape, expected.shape
    return found.flatten()[:8].tolist(), expected.flatten()[:8].tolist(), "off by", float((found - expected).abs().max())


def cases(table: dict[str, Any]) -> pytest.MarkDecorator:
    lacking = pytest.mark.skipif(TORCH < (2, 13), reason="needs torch >= 2.13")
    return pytest.mark.parametrize("name", [pytest.param(name, marks=[lacking] * (name in SINCE_2_13)) for name in table])


def check(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], choices: Sequence[Placement], size: int, every: int = 1
) -> None:
    """On the 1D mesh, the first two inputs in ways of ``choices`` that their dimensions allow, the others replicated.

    every: 1 for all pairs of ways, 2 for every other pair.
    """
    mesh = init_device_mesh("cpu", (size,))
    possible = [[[c] for c in choices if c == R or (i < 2 and c.dim < t.ndim)] for i, t in enumerate(inputs)]
    wrong = [
        (placements, what)
        for placements in list(itertools.product(*possible))[::every]
        if (what := difference(function, inputs, mesh, placements)) is not None
    ]
    agree(not wrong, wrong[:2])


MATRIX = {
    "matmul": (lambda a, b: a @ b, [(5, 6), (6, 7)]),
    "linear with bias": (F.linear, [(5, 6), (7, 6), (7,)]),
    "batched matmul": (lambda a, b: a @ b, [(3, 5, 4), (3, 4, 2)]),
    "addmm": (lambda a, b, c: torch.addmm(c, a, b, beta=0.5), [(5, 6), (6, 7), (5, 7)]),
}


@pytest.mark.feature("operations, forward and backward: matmul and its kin")
@cases(MATRIX)
def test_matrix_products(name: str, size: int) -> None:
    """Row times column, column times row (a sum over ranks), replicated; sizes that the ranks do not divide."""
    function, shapes = MATRIX[name]
    check(function, [drawn(*shape, seed=i) for i, shape in enumerate(shapes)], [S0, S1, R], size)


ELEMENTWISE = {
    "add, broadcast": lambda a, b: a + b,
    "multiply": lambda a, b: a * b[:1],
    "where": lambda a, b: torch.where(a > 0, a, b.exp()),
    "activations": lambda a, b: F.gelu(a) + F.silu(b) * torch.tanh(a) - F.relu(b),
    "powers": lambda a, b: (a**2 + 1).sqrt() / (b.abs() + 1).log1p(),
    "clamp, minimum": lambda a, b: torch.minimum(a.clamp(-0.5, 0.5), b),
}


@pytest.mark.feature("operations, forward and backward: elementwise")
@cases(ELEMENTWISE)
def test_elementwise(name: str, size: int) -> None:
    """Operands in different placements come to one; broadcasting keeps the sharded dimension where it is."""
    check(ELEMENTWISE[name], [drawn(5, 4, seed=1), drawn(5, 4, seed=2)], [S0, S1, R], size, every=2)


REDUCTIONS = {
    "sum": lambda a: a.sum(),
    "sum of a dimension": lambda a: a.sum(1),
    "mean": lambda a: a.mean(0),
    "mean of two, kept": lambda a: a.mean((0, 2), keepdim=True),
    "variance": lambda a: a.var(-1),
    "amax": lambda a: a.amax(1),
    "amin of all": lambda a: a.detach().amin(),  # whose gradient torch takes by each rank's own minimum, on any backend
    "vector norm": lambda a: torch.linalg.vector_norm(a),
    "norm of a dimension": lambda a: a.norm(dim=0),
    "infinity norm": lambda a: torch.linalg.vector_norm(a.detach(), ord=float("inf")),
    "product": lambda a: a.detach().prod(1),
    "cumsum": lambda a: a.cumsum(1),
    "argmax": lambda a: a.argmax(1),
    "all, any": lambda a: torch.stack([(a > -9).all(), (a > 9).any()]),
    "logsumexp": lambda a: a.logsumexp(1),
    "sort": lambda a: a.sort(1).values,
    "topk": lambda a: a.topk(2, 0).values,
}


@pytest.mark.feature("operations, forward and backward: reductions, softmax, norms")
@cases(REDUCTIONS)
def test_reductions(name: str, size: int) -> None:
    """Along the sharded dimension (a reduction over ranks, of shares of different sizes) and along another."""
    check(REDUCTIONS[name], [drawn(3 * size - 1, 3 * size - 1, 2 * size)], [S0, S1, S2, R], size)


NORMS = {
    "softmax": (lambda a, w: F.softmax(a, 1) * w, [(5, 6), (6,)]),
    "log_softmax of the first": (lambda a, w: F.log_softmax(a, 0) * w, [(5, 6), (6,)]),
    "layer_norm": (lambda a, w, b: F.layer_norm(a, (6,), w, b), [(2, 5, 6), (6,), (6,)]),
    "rms_norm": (lambda a, w: F.rms_norm(a, (6,), w), [(2, 5, 6), (6,)]),
}


@pytest.mark.feature("operations, forward and backward: reductions, softmax, norms")
@cases(NORMS)
def test_softmax_and_norms(name: str, size: int) -> None:
    """Over a sharded dimension as well; the gradient of a replicated weight is summed over the ranks' rows."""
    function, shapes = NORMS[name]
    inputs = [drawn(*shape, seed=i) for i, shape in enumerate(shapes)]
    mesh = init_device_mesh("cpu", (size,))
    sharded = [Shard(d) for d in range(inputs[0].ndim - (name == "rms_norm"))]  # torch adds eps in place, to a partial mean
    ways = [[[first], *([R] for _ in inputs[1:])] for first in [*sharded, R]]
    wrong = [(way, what) for way in ways if (what := difference(function, inputs, mesh, way)) is not None]
    agree(not wrong, wrong[:2])


VIEWS = {
    "transpose": lambda a: a.transpose(0, 2),
    "reshape": lambda a: a.reshape(a.shape[0], -1),
    "permute, contiguous": lambda a: a.permute(2, 0, 1).contiguous(),
    "unsqueeze, expand": lambda a: a.unsqueeze(1).expand(-1, 3, -1, -1),
    "slice": lambda a: a[1:, :3],
    "select": lambda a: a[:, 1],
    "chunk and stack": lambda a: torch.stack(a.chunk(2, 1)),
    "cat": lambda a: torch.cat([a, 2 * a], 1),
    "flip": lambda a: a.flip(0),
    "roll": lambda a: a.roll(1, 1),
    "triangle": lambda a: a.tril(),
    "squeeze": lambda a: a[:, :, :1].squeeze(2),
}


@pytest.mark.feature("operations, forward and backward: views, slices, cat")
@cases(VIEWS)
def test_views(name: str, size: int) -> None:
    """Dimensions move with their shards, and where a shard would be torn it is gathered first."""
    check(VIEWS[name], [drawn(2 * size, 2 * size, 2 * size)], [S0, S1, S2, R], size)


LOOKUPS = {
    "embedding": lambda w, i: F.embedding(i, w),
    "gather": lambda w, i: w.gather(0, i.reshape(-1, 1).expand(-1, w.shape[1])),
    "index_select": lambda w, i: w.index_select(0, i.reshape(-1)),
    "indexing": lambda w, i: w[i],
    "scatter_add": lambda w, i: torch.zeros_like(w).scatter_add(0, i.reshape(-1, 1).expand(-1, w.shape[1]), w[i.reshape(-1)]),
}


@pytest.mark.feature("operations, forward and backward: embedding, gather, indices")
@cases(LOOKUPS)
def test_lookups(name: str, size: int) -> None:
    """Tables sharded by rows (each rank finds some of the indices, masks the rest and sums) and by columns."""
    table, index = drawn(4 * size + 7, 3), torch.tensor([[0, 3, 10], [7, 3, 1]] * size)
    check(LOOKUPS[name], [table, index], [S0, S1, R], size, every=2)


LOSSES = {
    "mean square": lambda x, t: (x - t.unsqueeze(1)).square().mean(),
    "cross entropy": F.cross_entropy,
    "cross entropy, sum": lambda x, t: F.cross_entropy(x, t, reduction="sum"),
    "cross entropy, none": lambda x, t: F.cross_entropy(x, t, reduction="none"),
    "cross entropy, smoothed": lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1),
}


@pytest.mark.feature("operations, forward and backward: losses")
@cases(LOSSES)
def test_losses(name: str, size: int) -> None:
    """A mean over all ranks' rows; classes sharded as well. (torch itself refuses rows that the ranks cannot share evenly.)"""
    check(LOSSES[name], [drawn(2 * size, 5), torch.tensor([0, 4] * size)], [S0, S1, R], size, every=2)


@pytest.mark.feature("operations, forward and backward: 2D meshes")
def test_on_two_dimensions(size: int) -> None:
    """A small network's forward and backward with rows over one mesh dimension and columns over the other."""

    def network(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return F.layer_norm(torch.tanh(x @ a), (8,)) @ b

    inputs = [drawn(6, 4, seed=0), drawn(4, 8, seed=1), drawn(8, 3, seed=2)]
    wrong = []
    for grid in grids(size, 2):
        mesh = init_device_mesh("cpu", grid)
        for first, second, third in [((S0, R), (R, S1), (R, S0)), ((S0, S1), (S0, S1), (S0, R)), ((R, S0), (S1, S1), (S1, S0))]:
            what = difference(network, inputs, mesh, [first, second, third])
            wrong += [] if what is None else [(grid, first, second, third, what)]
    agree(not wrong, wrong[:2])


@pytest.mark.feature("convolution of DTensors: images dealt out, images split by width")
def test_convolution_of_shared_images(size: int) -> None:
    """Each rank convolves its images; the weights' gradients are summed over the ranks."""
    mesh = init_device_mesh("cpu", (size,))
    inputs = [drawn(2 * size, 3, 6, 5, seed=0), drawn(4, 3, 3, 3, seed=1), drawn(4, seed=2)]
    what = difference(lambda x, w, b: F.conv2d(x, w, b, padding=1), inputs, mesh, [[S0], [R], [R]])
    agree(what is None, what)


@pytest.mark.feature("convolution of DTensors: images dealt out, images split by width")
@pytest.mark.min_ranks(2)
@pytest.mark.skipif(TORCH >= (2, 13), reason="torch >= 2.13 takes a share of a width-split image for all of it, on any backend")
def test_convolution_exchanges_borders(size: int) -> None:
    """Neighbours send each other their borders (isend and irecv to the same peer, both ways, on 2 ranks)."""
    mesh = init_device_mesh("cpu", (size,))
    x, w, b = drawn(2, 3, 6, 4 * size, seed=0), drawn(4, 3, 3, 3, seed=1), drawn(4, seed=2)

    def convolve(w: Tensor, b: Tensor) -> Tensor:
        images = distribute_tensor(x, mesh, [Shard(3)]) if isinstance(w, DTensor) else x
        return F.conv2d(images, w, b, padding=1)

    what = difference(convolve, [w, b], mesh, [[R], [R]])
    agree(what is None, what)


@pytest.mark.feature("operations in bfloat16, int64 and bool")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool], ids=str)
def test_dtypes(dtype: torch.dtype, size: int) -> None:
    """Sums over ranks of small whole numbers are exact in every dtype; all and any of bools."""
    mesh = init_device_mesh("cpu", (size,))
    values = drawn(3 * size - 1, 3 * size - 1)
    full = values > 0 if dtype == torch.bool else values.mul(3).round().to(dtype)
    functions = {
        "max": lambda t: t.amax(0),
        "sum": lambda t: t.sum(0),
        "compare": lambda t: (t == t[:1]).all(),
        "square": lambda t: t.t().to(torch.float32) @ t.to(torch.float32),
    }
    wrong = []
    for (name, function), placement in itertools.product(functions.items(), [S0, S1, R]):
        found, expected = whole(function(distribute_tensor(full, mesh, [placement]))), function(full)
        if found.dtype != expected.dtype or not torch.equal(found, expected):
            wrong.append((name, placement, found, expected))
    agree(not wrong, wrong)

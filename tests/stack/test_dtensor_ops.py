"""Operations on sharded DTensors over MPI, forward and backward, equal to the same operation in one process."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from tests.stack.meshes import drawn, grids, whole
from tests.support import agree

S0, S1, S2, R = Shard(0), Shard(1), Shard(2), Replicate()

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")


def difference(
    function: Callable[..., Tensor], inputs: Sequence[Tensor], mesh: DeviceMesh, placements: Sequence[Sequence[Placement]]
) -> object:
    """What is wrong with ``function`` of ``inputs``, placed so, and with its gradients, beside one process; None if nothing."""
    plain = [t.clone().requires_grad_(t.is_floating_point()) for t in inputs]
    expected = function(*plain)
    placed = [distribute_tensor(t, mesh, p).requires_grad_(t.requires_grad) for t, p in zip(plain, placements, strict=True)]
    found = whole(function(*placed))
    pairs = [("forward", found.detach(), expected.detach())]
    if expected.requires_grad:
        weight = drawn(*expected.shape, seed=7, dtype=expected.dtype)
        (expected * weight).sum().backward()
        (found * weight).sum().backward()
        grads = [(a.grad, b.grad) for a, b in zip(placed, plain, strict=True) if b.grad is not None]
        pairs += [(f"gradient {i}", whole(a), b) for i, (a, b) in enumerate(grads)]
    wrong = [pair for pair in pairs if pair[1].shape != pair[2].shape or not torch.allclose(*pair[1:], rtol=0, atol=1e-11)]
    return wrong[0] if wrong else None


# The inputs on n ranks (or their shapes), and operations that lead to other collectives, reductions or layouts.
# Inputs 0 and 1 are placed in every way that their dimensions allow, the others replicated.
OPERATIONS: list[tuple[Callable[[int], Sequence[Any]], dict[str, Callable[..., Tensor]]]] = [
    (lambda n: [(5, 6), (7, 6), (7,)], {"linear with bias": F.linear}),
    (lambda n: [(5, 4), (5, 4)], {
        "broadcast, activations": lambda a, b: F.gelu(a) * b[:1] - (b.abs() + 1).log1p(),
    }),
    (lambda n: [(3 * n - 1, 3 * n - 1, 2 * n)], {
        "mean of two, kept": lambda a: a.mean((0, 2), keepdim=True),
        "infinity norm": lambda a: torch.linalg.vector_norm(a.detach(), ord=float("inf")),
        "product": lambda a: a.detach().prod(1),
        "all, any": lambda a: torch.stack([(a > -9).all(), (a > 9).any()]),
        "log_softmax": lambda a: F.log_softmax(a, 0),
    }),
    (lambda n: [(2 * n, 2 * n, 2 * n)], {
        "slice": lambda a: a[1:, :3],
        "cat": lambda a: torch.cat([a, 2 * a.transpose(0, 2)], 1),
    }),
    # each rank finds some of the indices, masks the rest and sums
    (lambda n: [(4 * n + 7, 3), torch.tensor([[0, 3, 10], [7, 3, 1]] * n)], {
        "embedding": lambda w, i: F.embedding(i, w),
    }),
    (lambda n: [(2 * n, 5), torch.tensor([0, 4] * n)], {  # torch itself refuses rows that the ranks cannot share evenly
        "cross entropy": F.cross_entropy,
    }),
]  # fmt: skip
CASES = [pytest.param(function, given, id=name) for given, functions in OPERATIONS for name, function in functions.items()]


@pytest.mark.parametrize(("function", "given"), CASES)
def test_operations(function: Callable[..., Tensor], given: Callable[[int], Sequence[Any]], size: int) -> None:
    """Along the sharded dimension and along another; sizes that the ranks do not divide; a torn shard is gathered first."""
    inputs = [t if isinstance(t, Tensor) else drawn(*t, seed=i) for i, t in enumerate(given(size))]
    possible = [[[c] for c in (S0, S1, S2, R) if c == R or (i < 2 and c.dim < t.ndim)] for i, t in enumerate(inputs)]
    mesh = init_device_mesh("cpu", (size,))
    found = [(placements, difference(function, inputs, mesh, placements)) for placements in itertools.product(*possible)]
    wrong = [pair for pair in found if pair[1] is not None]
    agree(not wrong, wrong[:2])


def test_on_two_dimensions(size: int) -> None:
    """A small network's forward and backward with rows over one mesh dimension and columns over the other."""
    inputs = [drawn(6, 4, seed=0), drawn(4, 8, seed=1), drawn(8, 3, seed=2)]
    ways = [((S0, R), (R, S1), (R, S0)), ((S0, S1), (S0, S1), (S0, R)), ((R, S0), (S1, S1), (S1, S0))]
    meshes = [init_device_mesh("cpu", grid) for grid in grids(size, 2)]
    found = [
        difference(lambda x, a, b: F.layer_norm(torch.tanh(x @ a), (8,)) @ b, inputs, mesh, way)
        for mesh, way in itertools.product(meshes, ways)
    ]
    agree(not any(found), found)


def test_convolution_of_shared_images(size: int) -> None:
    """Each rank convolves its images; the weights' gradients are summed over the ranks."""
    inputs = [drawn(2 * size, 3, 6, 5, seed=0), drawn(4, 3, 3, 3, seed=1), drawn(4, seed=2)]
    mesh = init_device_mesh("cpu", (size,))
    what = difference(lambda x, w, b: F.conv2d(x, w, b, padding=1), inputs, mesh, [[S0], [R], [R]])
    agree(what is None, what)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool], ids=str)
def test_dtypes(dtype: torch.dtype, size: int) -> None:
    """Sums over ranks of small whole numbers are exact in every dtype; all and any of bools."""
    mesh, values = init_device_mesh("cpu", (size,)), drawn(3 * size - 1, 3 * size - 1)
    full = values > 0 if dtype == torch.bool else values.mul(3).round().to(dtype)
    functions: dict[str, Callable[[Tensor], Tensor]] = {
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

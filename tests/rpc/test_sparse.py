"""Sparse tensors in remote calls, and sparse gradients on their way back."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mpicoll.autograd as dist_autograd
from mpicoll import rpc
from mpicoll.optim import DistributedOptimizer
from mpicoll.rpc.rref import RRef
from tests.rpc.layers import near
from tests.rpc.test_wire import there
from tests.support import agree

pytestmark = pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta", "ignore:Sparse invariant checks")

DENSE = torch.tensor([[0, 0, 3.5, 0], [4.5, 0, 5.5, 0]], dtype=torch.float64)
BLOCKS = torch.block_diag(torch.ones(2, 2), torch.full((2, 2), 3.0))


def coo(requires_grad: bool = False, factor: float = 1.0) -> Tensor:
    """Not coalesced: one place has two values."""
    values = torch.tensor([3.5, 4.5, 2.0, 3.5], dtype=torch.float64) * factor
    return torch.sparse_coo_tensor([[0, 1, 1, 1], [2, 0, 2, 2]], values, (2, 4), requires_grad=requires_grad)


TENSORS: dict[str, Callable[[], Tensor]] = {
    "coo": lambda: coo(),
    "coalesced": lambda: coo().coalesce(),
    "requires grad": lambda: coo(requires_grad=True),
    "hybrid": lambda: torch.sparse_coo_tensor([[0, 3]], [[1.0, 2.0], [3.0, 4.0]], (5, 2)),
    "no values": lambda: torch.sparse_coo_tensor(torch.zeros(2, 0, dtype=torch.long), torch.zeros(0), (3, 4)),
    "half precision": lambda: coo().to(torch.bfloat16),
    "strided values": lambda: torch.sparse_coo_tensor([[0, 1, 2]], torch.arange(12.0)[::4], (3,)),
    "csr": lambda: DENSE.to_sparse_csr(),
    "csr, requires grad": lambda: DENSE.to_sparse_csr().requires_grad_(),
    "csc": lambda: DENSE.to_sparse_csc(),
    "bsr": lambda: BLOCKS.to_sparse_bsr((2, 2)),
    "bsc": lambda: BLOCKS.to_sparse_bsc((2, 2)),
    "large": lambda: torch.eye(5000).to_sparse(),
}


@pytest.mark.parametrize("name", TENSORS)
def test_arrive_as_they_were(name: str) -> None:
    tensor = TENSORS[name]()
    found = there(tensor)
    assert (found.layout, found.dtype, found.shape, found.requires_grad, found.is_leaf) == (
        tensor.layout,
        tensor.dtype,
        tensor.shape,
        tensor.requires_grad,
        True,
    )
    assert torch.equal(found.detach().to_dense(), tensor.detach().to_dense())
    if tensor.layout is torch.sparse_coo:
        assert found.is_coalesced() == tensor.is_coalesced()
        assert found._nnz() == tensor._nnz()


def test_among_other_tensors() -> None:
    """Memory that a sparse and a dense tensor share is shared again."""
    values = torch.arange(3.0)
    first, dense, second, again = there([coo(), values, torch.sparse_coo_tensor([[0, 2, 4]], values, (5,)), values])
    assert torch.equal(first.to_dense(), coo().to_dense())
    assert again is dense
    dense += 1
    assert second.to_dense().tolist() == [1, 0, 2, 0, 3]


def test_a_parameter_of_a_module() -> None:
    """Stays one, wherever autograd follows the message."""
    module = nn.Module()
    module.table = nn.Parameter(coo())
    assert isinstance(there(module).table, nn.Parameter)


def added(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def picked(x: Tensor, rows: Tensor) -> Tensor:
    return torch.nn.functional.embedding(rows, x, sparse=True)


@pytest.mark.parametrize("order", ["sparse, sparse", "sparse, dense", "dense, sparse"])
def test_a_dense_tensor_with_sparse_gradients(order: str, right: str, rank: int) -> None:
    """A table that travels; its gradients come back sparse, and add up with each other and with dense ones."""
    x = torch.ones(6, 3, dtype=torch.float64, requires_grad=True)
    rows = torch.tensor([1, 2, 2])
    with dist_autograd.context() as context_id:
        for kind in order.split(", "):
            if kind == "sparse":
                loss = (rpc.rpc_sync(right, picked, (x, rows)) * (rank + 1)).sum()
            else:
                loss = rpc.rpc_sync(right, added, (x, x)).sum()
            dist_autograd.backward(context_id, [loss])
        found = dist_autograd.get_gradients(context_id)[x]
    plain = torch.ones(6, 3, dtype=torch.float64, requires_grad=True)
    for kind in order.split(", "):
        ((picked(plain, rows) * (rank + 1)) if kind == "sparse" else plain + plain).sum().backward()
    assert plain.grad is not None
    agree(found.layout == plain.grad.layout and near(found.to_dense(), plain.grad.to_dense()), (found, plain.grad))


def table() -> nn.EmbeddingBag:
    bag = nn.EmbeddingBag(10, 3, mode="sum", sparse=True)
    nn.init.ones_(bag.weight)
    return bag


def looked_up(bag: RRef[nn.EmbeddingBag], indices: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
    return bag.local_value()(indices, offsets, weights)  # type: ignore[no-any-return]


def weight_of(bag: RRef[nn.EmbeddingBag]) -> RRef[Tensor]:
    return RRef(bag.local_value().weight)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam], ids=lambda o: o.__name__)
def test_training_a_table(optimizer: Any, right: str, rank: int) -> None:
    """Two passes in each context, whose sparse gradients add up, and a step with them; as in one process."""
    remote = rpc.remote(right, table)
    weight = rpc.rpc_sync(right, weight_of, (remote,))
    steps = DistributedOptimizer(optimizer, [weight], lr=0.5)
    arguments = (torch.tensor([1, 2, 4, 5, 4]), torch.tensor([0, 2]), torch.arange(5.0).requires_grad_())
    for _ in range(3):
        with dist_autograd.context() as context_id:
            answer = rpc.rpc_sync(right, looked_up, (remote, *arguments))
            dist_autograd.backward(context_id, [answer.sum()], retain_graph=True)
            dist_autograd.backward(context_id, [answer.sum()])
            steps.step(context_id)
    plain = table()
    alone = optimizer(plain.parameters(), lr=0.5)
    for _ in range(3):
        alone.zero_grad()
        for _ in range(2):
            plain(*arguments).sum().backward()
        alone.step()
    agree(torch.allclose(weight.to_here(), plain.weight), weight.to_here())

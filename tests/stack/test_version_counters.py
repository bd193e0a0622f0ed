"""Through torch.distributed, the same results count as in-place writes as with a Gloo group, in each form of each operation.

And the classic collectives take what functional ones return, an AsyncCollectiveTensor: a tensor round the one with the memory.
"""

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh, zeros

import mpicoll
from tests.stack.operations import Operation, operations, waited
from tests.support import agree

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*(is|will be) deprecated.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),  # torch 2.11
]


@pytest.fixture
def gloo() -> Iterator[Any]:
    group = dist.new_group(backend="gloo")
    yield group
    dist.destroy_process_group(group)


def contiguous(*shape: int) -> Tensor:
    return torch.ones(shape)


def strided(*shape: int) -> Tensor:
    return torch.ones(*shape, 2)[..., 0]


def halves(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bfloat16)


def counted(operation: Operation, group: Any) -> list[bool]:
    """Which of the tensors the operation counts as written."""
    before = [tensor._version for tensor in operation.tensors]
    waited(operation.call(group))
    return [tensor._version > start for tensor, start in zip(operation.tensors, before, strict=True)]


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("make", [contiguous, strided])
def test_the_same_counts_as_with_gloo(
    make: Callable[..., Tensor], async_op: bool, gloo: Any, rank: int, size: int
) -> None:  # trap 27
    """Not how often: Gloo counts a tensor that all_gather_into_tensor fills once for each rank."""
    seen = {}
    for name in operations(rank, size, make, async_op):
        try:
            expected = counted(operations(rank, size, make, async_op)[name], gloo)
        except RuntimeError as error:
            if "gloo does not support" not in str(error):  # all_to_all of lists, before torch 2.13
                raise
            continue
        seen[name] = counted(operations(rank, size, make, async_op)[name], dist.group.WORLD), expected
    wrong = {name: pair for name, pair in seen.items() if pair[0] != pair[1]}
    agree(any(any(expected) for _, expected in seen.values()) and not wrong, f"mpi, gloo: {wrong}")


@pytest.mark.parametrize("make", [contiguous, strided, halves])
def test_the_end_of_an_operation_counts_as_no_write(make: Callable[..., Tensor], rank: int, size: int) -> None:  # trap 27
    """autograd saves the output of a collective that is under way; had its end counted as a write, backward would refuse."""
    every, output, parts = operations(rank, size, make, async_op=True), make(4), [make(4) for _ in range(size)]
    every["average"] = Operation(
        [output, *parts], lambda group: dist.reduce_scatter(output, parts, dist.ReduceOp.AVG, group, async_op=True)
    )
    wrong = {}
    for name, (tensors, call) in every.items():
        before = [tensor._version for tensor in tensors]
        work = call(None)
        under_way = [tensor._version for tensor in tensors]
        waited(work)
        ended = [tensor._version for tensor in tensors]
        if ended != under_way or any(last > first + 1 for first, last in zip(before, ended, strict=True)):  # +1: its begin
            wrong[name] = (before, under_way, ended)
    agree(not wrong, wrong)


def test_sparse_and_functional(gloo: Any) -> None:  # trap 27
    """all_reduce of a sparse tensor, and functional collectives in place. Others write new tensors, which nobody has saved."""
    seen = []
    for group in (dist.group.WORLD, gloo):
        native, name = torch.ops._c10d_functional, group.group_name
        sparse = torch.sparse_coo_tensor([[0, 2]], torch.ones(2), (4,), check_invariants=True).coalesce()
        before = sparse._version
        dist.all_reduce(sparse, group=group)
        results = {
            "all_reduce_": native.all_reduce_(torch.ones(4), "sum", name),
            "broadcast_": native.broadcast_(torch.ones(4), 0, name),
        }
        counts = {name: funcol.wait_tensor(tensor)._version > 0 for name, tensor in results.items()}
        seen.append({"sparse": sparse._version > before, **counts})
    agree(seen[0] == seen[1], seen)


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)], ids=str)
def test_distribute_tensor_while_views_are_out(placement: Any, rank: int, size: int) -> None:
    """DTensor broadcasts into the program's own tensor; its pieces from chunk(), taken before, can still be used."""
    mesh = init_device_mesh("cpu", (size,))
    tensor = torch.arange(8.0 * size, requires_grad=True)
    pieces = tensor.chunk(2)
    distributed = distribute_tensor(tensor, mesh, [placement])
    sum(piece.sum() for piece in pieces).backward()
    whole = distributed.full_tensor().detach()
    agree(torch.equal(tensor.grad, torch.ones(8 * size)) and torch.equal(whole, torch.arange(8.0 * size)), tensor.grad)


# -- tensors that are not finished -------------------------------------------------------------------------------------

through_both_doors = pytest.mark.parametrize("library", [dist, mpicoll], ids=["torch", "mpicoll"])


made: list[Tensor] = []


def finished(*shape: int) -> Tensor:
    return torch.randint(100, shape).float()


def unfinished(*shape: int) -> Tensor:
    """Returns such values as the result of an all_reduce that nobody has waited for (collective)."""
    tensor = funcol.all_reduce(finished(*shape), "max", dist.group.WORLD)  # type: ignore[arg-type]
    assert type(tensor) is funcol.AsyncCollectiveTensor
    made.append(tensor)
    return tensor


@through_both_doors
@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
def test_unfinished_tensors(library: ModuleType, async_op: bool, rank: int, size: int) -> None:
    """It is waited for and unwrapped, whether it is read or written: it has no memory at its own address."""
    wrong = {}
    for name in operations(0, size, finished, async_op):  # rank 0 has all of them
        results = []
        for make, door in ((finished, dist), (unfinished, library)):
            torch.manual_seed(0)  # the same numbers in both, and on all ranks
            operation = operations(rank, size, make, async_op, door).get(name)
            if operation is not None:
                waited(operation.call(None))
                results.append([tensor.tolist() for tensor in operation.tensors])
        if results and results[0] != results[1]:
            wrong[name] = results
        while made:
            funcol.wait_tensor(made.pop())  # those that only some ranks have used
    agree(not wrong, wrong)


@through_both_doors
def test_dtensors_are_refused(library: ModuleType, rank: int, size: int) -> None:
    """Every rank raises an error that says so, and the group goes on. torch's dispatcher raises NotImplementedError."""
    tensor = zeros(size, 3, device_mesh=init_device_mesh("cpu", (size,)), placements=[Shard(0)])
    with pytest.raises((TypeError, NotImplementedError), match=r"DTensor|sharding strategy"):
        library.all_reduce(tensor)
    one = torch.ones(1)
    library.all_reduce(one)
    agree(one.item() == size)

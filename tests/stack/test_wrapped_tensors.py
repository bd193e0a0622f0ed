"""The classic collectives take what functional ones return, an AsyncCollectiveTensor: a tensor round the one with the memory."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.tensor import Shard, init_device_mesh, zeros

import mpicoll
from tests.stack.operations import operations, waited
from tests.support import agree

SECTION = "Functional collectives and torch.compile"

pytestmark = pytest.mark.filterwarnings("ignore:.*(is|will be) deprecated.*:FutureWarning")

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


@pytest.mark.feature("AsyncCollectiveTensor given to the classic collectives")
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


@pytest.mark.feature("a DTensor given to a classic collective is refused")
@through_both_doors
def test_dtensors_are_refused(library: ModuleType, rank: int, size: int) -> None:
    """By an error that says so, on every rank, and the group goes on; torch's own is a NotImplementedError of its dispatcher."""
    tensor = zeros(size, 3, device_mesh=init_device_mesh("cpu", (size,)), placements=[Shard(0)])
    with pytest.raises((TypeError, NotImplementedError), match=r"DTensor|sharding strategy"):
        library.all_reduce(tensor)
    one = torch.ones(1)
    library.all_reduce(one)
    agree(one.item() == size)

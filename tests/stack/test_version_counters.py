"""Through torch.distributed, the same results count as in-place writes as with a Gloo group, in each form of each operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

import mpicoll
from tests.support import agree

SECTION = "Mixed backends and debugging"
Case = tuple[list[Tensor], Callable[[Any], Any]]  # the tensors of an operation, and the operation on a group

pytestmark = [
    pytest.mark.feature("version counters: what autograd counts as an in-place write, as with Gloo"),
    pytest.mark.filterwarnings("ignore:.*(is|will be) deprecated.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks"),  # torch 2.11
]


def waited(answer: Any) -> None:
    if answer is not None:
        answer.wait()


def cases(rank: int, size: int, make: Callable[..., Tensor], async_op: bool) -> dict[str, Case]:
    """Every operation of torch.distributed; ``make`` returns a tensor of a shape."""
    one, whole, many, more = make(4), make(4 * size), [make(4) for _ in range(size)], [make(4) for _ in range(size)]
    root, lists = rank == 0, [[make(4), make(4)] for _ in range(size)]
    flat = [tensor for tensors in lists for tensor in tensors]

    def ring(group: Any) -> None:
        works = [dist.irecv(more[0], (rank - 1) % size, group), dist.isend(one, (rank + 1) % size, group)]
        for work in works:
            waited(work)

    def pair(src: int | None) -> Callable[[Any], None]:
        def send_or_receive(group: Any) -> None:
            if rank == 0:
                dist.send(one, 1, group)
            elif rank == 1:
                dist.recv(more[0], src, group)

        return send_or_receive

    args: dict[str, Any] = {"async_op": async_op}
    found: dict[str, Case] = {
        "all_reduce": ([one], lambda group: dist.all_reduce(one, group=group, **args)),
        "broadcast": ([one], lambda group: dist.broadcast(one, 0, group=group, **args)),
        "reduce": ([one], lambda group: dist.reduce(one, 0, group=group, **args)),
        "all_gather": ([one, *many], lambda group: dist.all_gather(many, one, group=group, **args)),
        "all_gather_into_tensor": ([one, whole], lambda group: dist.all_gather_into_tensor(whole, one, group=group, **args)),
        "gather": ([one, *many], lambda group: dist.gather(one, many if root else None, 0, group=group, **args)),
        "scatter": ([one, *many], lambda group: dist.scatter(one, many if root else None, 0, group=group, **args)),
        "reduce_scatter": ([one, *many], lambda group: dist.reduce_scatter(one, many, group=group, **args)),
        "reduce_scatter_tensor": ([one, whole], lambda group: dist.reduce_scatter_tensor(one, whole, group=group, **args)),
        "all_to_all": ([*many, *more], lambda group: dist.all_to_all(many, more, group=group, **args)),
        "all_reduce_coalesced": (many, lambda group: dist.all_reduce_coalesced(many, group=group, **args)),
        "all_gather_coalesced": (
            [*lists[0], *flat],
            lambda group: dist.all_gather_coalesced(lists, [make(4), make(4)], group=group, **args),
        ),
    }
    if one.is_contiguous():  # Gloo refuses others
        other = make(4 * size)
        found["all_to_all_single"] = (
            [whole, other],
            lambda group: dist.all_to_all_single(whole, other, group=group, **args),
        )
    if size > 1 and one.is_contiguous() and not async_op:
        found["isend, irecv"] = ([one, more[0]], ring)
        found["send, recv"] = ([one, more[0]], pair(0))
        found["recv from anybody"] = ([one, more[0]], pair(None))
    return found


def contiguous(*shape: int) -> Tensor:
    return torch.ones(shape)


def strided(*shape: int) -> Tensor:
    return torch.ones(*shape, 2)[..., 0]


def counted(case: Case, group: Any) -> list[bool]:
    """Which of the tensors the operation counts as written."""
    tensors, operation = case
    before = [tensor._version for tensor in tensors]
    waited(operation(group))
    return [tensor._version > start for tensor, start in zip(tensors, before, strict=True)]


@pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("make", [contiguous, strided])
def test_the_same_counts_as_with_gloo(make: Callable[..., Tensor], async_op: bool, rank: int, size: int) -> None:  # trap 27
    """Not how often: Gloo counts a tensor that all_gather_into_tensor fills once for each rank."""
    gloo: Any = dist.new_group(backend="gloo")
    seen = {}
    for name in cases(rank, size, make, async_op):
        try:
            expected = counted(cases(rank, size, make, async_op)[name], gloo)
        except RuntimeError as error:
            if "gloo does not support" not in str(error):  # all_to_all of lists, before torch 2.13
                raise
            continue
        seen[name] = counted(cases(rank, size, make, async_op)[name], dist.group.WORLD), expected
    dist.destroy_process_group(gloo)
    wrong = {name: pair for name, pair in seen.items() if pair[0] != pair[1]}
    agree(any(any(expected) for _, expected in seen.values()) and not wrong, f"mpi, gloo: {wrong}")


def test_sparse_and_functional(rank: int, size: int) -> None:  # trap 27
    """all_reduce of a sparse tensor, and functional collectives in place. Others write new tensors, which nobody has saved."""
    gloo: Any = dist.new_group(backend="gloo")
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
    dist.destroy_process_group(gloo)
    agree(seen[0] == seen[1], seen)


@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "all_gather", "all_to_all_single"])
def test_autograd_notices_what_it_notices_with_gloo(name: str, rank: int, size: int) -> None:  # trap 27
    """The operation writes tensors that autograd has saved for the backward pass."""
    gloo: Any = dist.new_group(backend="gloo")
    noticed = []
    for group in (dist.group.WORLD, gloo):
        tensors, operation = cases(rank, size, contiguous, async_op=False)[name]
        loss = sum((tensor.detach().requires_grad_() ** 2).sum() for tensor in tensors)
        operation(group)
        try:
            loss.backward()  # type: ignore[union-attr]
            noticed.append(False)
        except RuntimeError as error:
            noticed.append("modified by an inplace operation" in str(error))
    dist.destroy_process_group(gloo)
    agree(noticed == [name == "all_gather"] * 2, noticed)


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)], ids=str)
def test_distribute_tensor_while_views_are_out(placement: Any, rank: int, size: int) -> None:
    """DTensor broadcasts into the program's own tensor; its pieces from chunk(), taken before, can still be used."""
    mesh = init_device_mesh("cpu", (size,))
    tensor = torch.arange(8.0 * size, requires_grad=True)
    pieces = tensor.chunk(2)
    distributed = distribute_tensor(tensor, mesh, [placement])
    sum(piece.sum() for piece in pieces).backward()  # type: ignore[union-attr]
    whole = distributed.full_tensor().detach()
    agree(torch.equal(tensor.grad, torch.ones(8 * size)) and torch.equal(whole, torch.arange(8.0 * size)), tensor.grad)


def test_mpicolls_own_functions_count_all_writes(rank: int, size: int) -> None:  # trap 27
    """all_reduce through mpicoll, and the same through torch.distributed."""
    versions = []
    for library in (mpicoll, dist):
        tensor = torch.ones(4)
        library.all_reduce(tensor)  # type: ignore[attr-defined]
        library.all_reduce(tensor, async_op=True).wait()  # type: ignore[attr-defined]
        versions.append(tensor._version)
    agree(versions == [2, 0], versions)

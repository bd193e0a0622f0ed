"""Complex numbers, objects, coalescing and functional collectives through init_process_group("mpi")."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from tests.support import agree
from tests.support.torch_backend import NEW_NAMES, both, ended, of_rank, same


@pytest.fixture(autouse=True)
def mpi_world(_end_of_world: None) -> None:
    if not dist.is_initialized():
        dist.init_process_group("mpi")


@both
@pytest.mark.parametrize(
    "name", ["all_reduce", "broadcast", "reduce", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all"]
)
def test_complex(name: str, async_op: bool, rank: int, size: int) -> None:
    """trap 24: c10d views some of them as real and hands over others as they are."""

    def z(r: int) -> Tensor:
        return torch.complex(of_rank(r, 3), -2 * of_rank(r, 3))

    total = sum(z(r) for r in range(size))
    mine, outputs = z(rank), [torch.zeros(3, dtype=torch.complex64) for _ in range(size)]
    everybody = [z(r) for r in range(size)]
    if name == "all_reduce":
        answer, got, expected = dist.all_reduce(mine, async_op=async_op), [mine], [total]
    elif name == "broadcast":
        answer, got, expected = dist.broadcast(mine, 0, async_op=async_op), [mine], [z(0)]
    elif name == "reduce":
        answer, got = dist.reduce(mine, 0, async_op=async_op), [mine]
        expected = [total if rank == 0 else z(rank)]
    elif name == "all_gather":
        answer, got, expected = dist.all_gather(outputs, mine, async_op=async_op), outputs, everybody
    elif name == "gather":
        answer = dist.gather(mine, outputs if rank == 0 else None, 0, async_op=async_op)
        got, expected = (outputs, everybody) if rank == 0 else ([], [])
    elif name == "scatter":
        answer = dist.scatter(outputs[0], everybody if rank == 0 else None, 0, async_op=async_op)
        got, expected = [outputs[0]], [z(rank)]
    elif name == "reduce_scatter":
        answer = dist.reduce_scatter(outputs[0], [mine] * size, async_op=async_op)
        got, expected = [outputs[0]], [total]
    else:
        answer, got, expected = dist.all_to_all(outputs, [mine] * size, async_op=async_op), outputs, everybody
    done = ended(answer, async_op)
    agree(done and all(map(same, got, expected)), got)


def test_objects(rank: int, size: int) -> None:
    """trap 40."""

    def thing(r: int) -> dict[str, Any]:
        return {"rank": r, "text": "x" * (r * 100), "list": list(range(r))}

    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, thing(rank))
    collected: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(thing(rank), collected, dst=0)
    spread = [thing(9), "b", 3] if rank == size - 1 else [None, None, None]
    dist.broadcast_object_list(spread, src=size - 1)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [thing(r) for r in range(size)] if rank == 0 else None, src=0)
    everything = [thing(r) for r in range(size)]
    agree(
        gathered == everything
        and (collected is None or collected == everything)
        and spread == [thing(9), "b", 3]
        and mine == [thing(rank)],
        (gathered, collected, spread, mine),
    )


def test_coalescing_manager(rank: int, size: int) -> None:
    """trap 47: several calls arrive as one coalesced call; other calls between start and end."""
    reduced = [of_rank(rank, 3), of_rank(rank, 4)]
    with c10d._coalescing_manager():
        for tensor in reduced:
            dist.all_reduce(tensor)
    gather = dist.all_gather_single if NEW_NAMES else dist.all_gather_into_tensor
    outputs = [torch.empty(size * 2), torch.empty(size)]
    with c10d._coalescing_manager(async_ops=True) as manager:
        for output, k in zip(outputs, (2, 1), strict=True):
            gather(output, of_rank(rank, k))
    manager.wait()
    scatter = dist.reduce_scatter_single if NEW_NAMES else dist.reduce_scatter_tensor
    pieces = [torch.empty(2), torch.empty(1)]
    with c10d._coalescing_manager():
        for piece, k in zip(pieces, (2, 1), strict=True):
            scatter(piece, of_rank(rank, size * k))
    plain = of_rank(rank, 2)
    with c10d._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        dist.broadcast(plain, 0, async_op=True)
    manager.wait()
    agree(
        all(same(t, sum(of_rank(r, k) for r in range(size))) for t, k in zip(reduced, (3, 4), strict=True))
        and all(same(t, torch.cat([of_rank(r, k) for r in range(size)])) for t, k in zip(outputs, (2, 1), strict=True))
        and all(
            same(t, sum(of_rank(r, size * k) for r in range(size))[rank * k : (rank + 1) * k])
            for t, k in zip(pieces, (2, 1), strict=True)
        )
        and same(plain, of_rank(0, 2)),
        (reduced, outputs, pieces, plain),
    )


def test_functional_collectives(rank: int, size: int) -> None:
    """traps 81-83: resolved by group name in C++, waited for by storage."""
    import torch.distributed._functional_collectives as funcol

    world = dist.group.WORLD
    reduced = funcol.all_reduce(of_rank(rank, 4, 4)[:, ::2], "sum", world)
    all_gather = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
    reduce_scatter = getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor
    gathered = all_gather(of_rank(rank, 2, 3), 0, world)
    scattered = reduce_scatter(of_rank(rank, size * 2, 3), "avg", 0, world)
    swapped = funcol.all_to_all_single(of_rank(rank, size, 2), None, None, world)
    sent = funcol.broadcast(of_rank(rank, 3), 0, world)
    agree(
        same(reduced + 0, sum(of_rank(r, 4, 4) for r in range(size))[:, ::2])
        and same(gathered + 0, torch.cat([of_rank(r, 2, 3) for r in range(size)]))
        and torch.allclose(
            scattered + 0, torch.stack([of_rank(r, size * 2, 3)[rank * 2 : rank * 2 + 2] for r in range(size)]).mean(0)
        )
        and same(swapped + 0, torch.stack([of_rank(r, size, 2)[rank] for r in range(size)]))
        and same(sent + 0, of_rank(0, 3)),
        (reduced, gathered, scattered, swapped, sent),
    )

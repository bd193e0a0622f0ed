"""Whatever layout each rank's tensor has, and whichever of them waits at once, all ranks make the same MPI calls.

Otherwise ranks would be in different collectives: they would hang, or get bytes of one another that mean something else.
"""

from collections.abc import Callable, Iterator
from itertools import count

import pytest
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from mpicoll._engine.communicator import Communicator
from mpicoll._engine.registry import registry
from tests.support import agree, everyone
from tests.support.mpi_calls import recorded

pytestmark = pytest.mark.usefixtures("world")
_numbers = count()

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda dense: dense,
    "every other element": lambda dense: torch.stack([dense, dense], -1)[..., 0],
    "transposed": lambda dense: dense.view(2, -1).t().contiguous().t().reshape(2, -1) if dense.numel() % 2 == 0 else dense,
    "a leaf": lambda dense: dense.clone().requires_grad_() if dense.is_floating_point() else dense,
    "a negative bit": lambda dense: torch._neg_view(dense) if dense.is_floating_point() else dense,
    "an inference tensor": lambda dense: _in_inference_mode(dense),
}


def _in_inference_mode(dense: Tensor) -> Tensor:
    with torch.inference_mode():
        return dense.clone()


Operation = Callable[[Communicator, Callable[[int], Tensor], int, bool], object]
OPERATIONS: dict[str, Operation] = {
    "all_reduce": lambda group, make, n, later: group.all_reduce(make(n), async_op=later),
    "all_reduce of MAX": lambda group, make, n, later: group.all_reduce(make(n), ReduceOp.MAX, later),
    "all_reduce_coalesced": lambda group, make, n, later: group.all_reduce_coalesced([make(n), make(4)], async_op=later),
    "reduce": lambda group, make, n, later: group.reduce(make(n), 0, async_op=later),
    "scan": lambda group, make, n, later: group.scan(make(n), async_op=later),
    "exscan": lambda group, make, n, later: group.exscan(make(n), async_op=later),
    "broadcast": lambda group, make, n, later: group.broadcast(make(n), group.size - 1, later),
    "all_gather": lambda group, make, n, later: group.all_gather([make(n) for _ in range(group.size)], make(n), later),
    "all_gather_single": lambda group, make, n, later: group.all_gather_single(make(n * group.size), make(n), later),
    "reduce_scatter": lambda group, make, n, later: group.reduce_scatter(
        make(n), [make(n) for _ in range(group.size)], async_op=later
    ),
    "reduce_scatter_single": lambda group, make, n, later: group.reduce_scatter_single(
        make(n), make(n * group.size), async_op=later
    ),
    "all_to_all": lambda group, make, n, later: group.all_to_all(
        [make(n) for _ in range(group.size)], [make(n) for _ in range(group.size)], later
    ),
    "all_to_all_single": lambda group, make, n, later: group.all_to_all_single(
        make(n * group.size), make(n * group.size), async_op=later
    ),
    "barrier": lambda group, make, n, later: group.barrier(later),
}


@pytest.fixture
def group() -> Iterator[Communicator]:
    made = registry.create(f"one path {next(_numbers)}", None, 60)
    yield made
    made.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool], ids=str)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_all_ranks_make_the_same_calls(
    operation: str, dtype: torch.dtype, group: Communicator, rank: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank r has layout number r + shift, and every other rank does not wait at once."""
    record = recorded(group, monkeypatch)
    # all_to_all_single splits dim 0, of which the transposed layout has two rows.
    names = [name for name in LAYOUTS if (operation, name) != ("all_to_all_single", "transposed")]
    for n in (2, 64, 1 << 18):
        for shift in range(len(names)):
            layout = LAYOUTS[names[(rank + shift) % len(names)]]

            def make(numel: int, layout: Callable[[Tensor], Tensor] = layout) -> Tensor:
                return layout(torch.ones(numel).to(dtype))

            later = bool((rank + shift) % 2)
            work = OPERATIONS[operation](group, make, n, later)
            if later:
                work.wait()  # type: ignore[attr-defined]
            record.append(f"end of {n} {shift}")
    calls = everyone(record)
    different = [(r, [pair for pair in zip(calls[0], calls[r], strict=False) if pair[0] != pair[1]][:3]) for r in range(size)]
    agree(all(of_rank == calls[0] for of_rank in calls) and len(record) > 3 * len(names), different)

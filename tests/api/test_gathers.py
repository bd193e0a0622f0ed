"""Gather, scatter, all-gather, reduce-scatter, all-to-all: blocks of different sizes, lists in the wrong place, one tensor
for all blocks, in-place slices."""

from typing import Any

import pytest
import torch
from torch import Tensor

import mpicoll as dist
from mpicoll._host import algorithm_choice
from tests.support import agree
from tests.support.doors import doors
from tests.support.tensors import of_rank, same

pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.filterwarnings("ignore:.*deprecated.*:FutureWarning")]


def block(source: int, target: int, rows: int, dtype: torch.dtype = torch.float32, width: int = 3) -> Tensor:
    """What ``source`` has for ``target``."""
    return of_rank(source, dtype, (rows, width), salt=target + 1)


def test_uneven_all_gather(rank: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:  # trap 34
    """Rank r brings r + 1 rows, or none; by Allgatherv, and as for more than 2^31 - 1 bytes by messages between pairs."""
    for limit in (algorithm_choice.LARGEST_DISPLACEMENT, 0):
        monkeypatch.setattr(algorithm_choice, "LARGEST_DISPLACEMENT", limit)
        for rows in ([r + 1 for r in range(size)], [r % 2 * 5 for r in range(size)], [70_000 * r + 1 for r in range(size)]):
            parts = [block(r, 0, rows[r]) for r in range(size)]
            flat = torch.full((sum(rows) + 2, 6), -9.0)
            outputs = list(flat[1:-1, ::2].split(rows))  # slices of one tensor, strided
            dist.all_gather(outputs, parts[rank])
            again = [torch.empty(n, 3) for n in rows]
            dist.all_gather(again, parts[rank].t().contiguous().t(), async_op=True).wait()
            good = all(same(t, part) and same(a, part) for t, a, part in zip(outputs, again, parts, strict=True))
            agree(good and bool((flat[:, 1::2] == -9).all()) and bool((flat[[0, -1]] == -9).all()))


def test_same_numel_other_shape(rank: int, size: int) -> None:  # trap 34
    outputs = [torch.empty(6) if r % 2 else torch.empty(3, 2) for r in range(size)]
    dist.all_gather(outputs, block(rank, 0, 2))
    agree(all(same(t.reshape(2, 3), block(r, 0, 2)) for r, t in enumerate(outputs)))


def test_all_gather_into_slices_of_what_is_gathered(rank: int, size: int) -> None:  # trap 34
    flat = torch.zeros(size, 4)
    flat[rank] = float(rank + 1)
    dist.all_gather(list(flat), flat[rank])
    agree(same(flat, torch.arange(1.0, size + 1).view(-1, 1).expand(-1, 4).contiguous()), flat)


@doors
@pytest.mark.parametrize("form", ["concat", "stack"])
def test_all_gather_single_in_place(form: str, door: Any, rank: int, size: int) -> None:  # trap 35
    """The input is a slice of the output, as FSDP does it; also of an output that is not contiguous."""
    for wide in (torch.zeros(size, 4, 3), torch.zeros(size, 4, 6)[..., ::2]):
        wide[rank] = block(rank, 0, 4)
        output = wide if form == "stack" or not wide.is_contiguous() else wide.view(size * 4, 3)
        getattr(door, "all_gather_single", door.all_gather_into_tensor)(output, wide[rank])
        agree(all(same(wide[r], block(r, 0, 4)) for r in range(size)))
        wide[rank] += 1
        door.all_gather_into_tensor(output, wide[rank], async_op=True).wait()
        agree(all(same(wide[r], block(r, 0, 4) + 1) for r in range(size)))


def test_roots_default_to_rank_0(rank: int, size: int) -> None:
    outputs = [torch.empty(2, 3) for _ in range(size)] if rank == 0 else None
    dist.gather(block(rank, 0, 2), outputs)
    mine = torch.empty(2, 3)
    dist.scatter(mine, outputs)
    agree(same(mine, block(rank, 0, 2)))


def test_in_place_gather_and_scatter(rank: int, size: int) -> None:
    """The root's own tensor is its slot of the list."""
    flat = torch.zeros(size, 4)
    flat[rank] = float(rank)
    dist.gather(flat[rank], list(flat) if rank == size - 1 else None, size - 1)
    if rank == size - 1:
        assert flat[:, 0].tolist() == list(map(float, range(size)))
        flat += 10
    dist.scatter(flat[rank], list(flat) if rank == size - 1 else None, size - 1)
    agree(flat[rank].tolist() == [rank + 10.0] * 4, flat)


def test_lists_in_the_wrong_place(rank: int, size: int) -> None:  # trap 5
    """Given where nothing is received or sent, or missing where it is; on that rank, before a byte moves."""
    few = [torch.zeros(2) for _ in range(size)]
    for missing in (None, []):
        given, where = (missing, "given on {}") if rank == 0 else (few, f"None on rank {rank}")
        with pytest.raises(ValueError, match=f"gather: gather_list must be {where.format('dst')}"):
            dist.gather(torch.zeros(2), given, 0)
        with pytest.raises(ValueError, match=f"scatter: scatter_list must be {where.format('src')}"):
            dist.scatter(torch.zeros(2), given, 0)
    dist.barrier()
    agree(True)


# -- all-to-all --------------------------------------------------------------------------------------------------------


def test_all_to_all_single_in_place(rank: int, size: int) -> None:
    mine = torch.cat([block(rank, target, 2) for target in range(size)])
    dist.all_to_all_single(mine, mine)
    tensors = list(torch.cat([block(rank, target, 2) for target in range(size)]).split(2))
    dist.all_to_all(tensors, tensors)
    expected = torch.cat([block(source, rank, 2) for source in range(size)])
    agree(same(mine, expected) and same(torch.cat(tensors), expected))


def test_wrong_splits(rank: int, size: int) -> None:  # trap 37
    """Refused on every rank, and the message says what the rows are."""
    tensor, name = torch.zeros(2 * size, 3), "all_to_all_single"
    even = [2] * size
    for wrong, error, text in [
        ([2] * (size + 1), ValueError, f"has {size + 1} entries, the group has {size} ranks"),
        ([3] + [2] * (size - 1), ValueError, f"must be >= 0 and add up to {2 * size}"),
        ([2 * size + 1, -1] + [0] * (size - 2) if size > 1 else [-2], ValueError, "must be >= 0"),
        ([2.0] * size, TypeError, r"split_sizes\[0\] must be an int, got float"),
        (["2"] * size, TypeError, r"split_sizes\[0\] must be an int, got str"),
        (7, TypeError, "must be a list of ints or None, got int"),
    ]:
        with pytest.raises(error, match=f"{name}: input_split_sizes.*{text}|{name}: input_{text}"):
            dist.all_to_all_single(torch.zeros_like(tensor), tensor, even, wrong)
        with pytest.raises(error, match=f"{name}: output_split_sizes.*{text}|{name}: output_{text}"):
            dist.all_to_all_single(torch.zeros_like(tensor), tensor, wrong, even)
    if size > 1:
        with pytest.raises(ValueError, match=f"dim 0 has {size + 1} rows, which {size} ranks cannot share equally"):
            dist.all_to_all_single(torch.zeros(size + 1, 3), torch.zeros(size + 1, 3))
    with pytest.raises(ValueError, match="need a dim 0"):
        dist.all_to_all_single(torch.tensor(0.0), torch.tensor(0.0))
    with pytest.raises(ValueError, match="as many elements"):
        dist.all_to_all_single(torch.zeros(2 * size, 4), tensor)
    dist.all_to_all_single(torch.zeros_like(tensor), tensor, torch.tensor(even), tuple(even))
    agree(True)

# python -m mpicoll.run -n 2 examples/collectives_tour.py
"""A tour of the collectives: what each rank puts in, what each rank gets out.

Any number of ranks (3 or 4 show most). Each line is one operation; the columns are the ranks. Every result is asserted.
"""

from typing import Any

import torch

import mpicoll as dist


def line(name: str, mine: Any) -> None:
    """Prints what every rank holds, side by side, on rank 0 (collective: all must call)."""
    rank, size = dist.get_rank(), dist.get_world_size()
    text = "-" if mine is None else str(mine.tolist() if isinstance(mine, torch.Tensor) else mine)
    held: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(text, held, dst=0)
    if held is not None:
        print(f"{name:<32}" + "".join(f" {column:<18}" for column in held))


def vector(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def same(got: torch.Tensor | list[torch.Tensor], expected: torch.Tensor | list[torch.Tensor]) -> None:
    """Asserts that tensors, or lists of them, are equal in shape, dtype and value."""
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def one_to_all_and_back(rank: int, size: int) -> None:
    last = size - 1
    x = vector(7, 8) if rank == 0 else vector(0, 0)
    dist.broadcast(x, src=0)
    line("broadcast from 0", x)
    same(x, vector(7, 8))

    x = vector(0)
    dist.scatter(x, [vector(10 * r) for r in range(size)] if rank == 0 else None, src=0)
    line("scatter from 0", x)
    same(x, vector(10 * rank))

    gathered = [vector(0) for _ in range(size)] if rank == last else None
    dist.gather(x, gathered, dst=last)
    line("gather to the last", None if gathered is None else torch.cat(gathered))
    if gathered is not None:
        same(gathered, [vector(10 * r) for r in range(size)])

    x = vector(rank + 1)
    dist.reduce(x, dst=0, op=dist.ReduceOp.SUM)
    line("reduce SUM to 0", x)  # only rank 0 holds the sum; the others keep their own number
    same(x, vector(size * (size + 1) // 2 if rank == 0 else rank + 1))


def all_to_all_ranks(rank: int, size: int) -> None:
    x = vector(rank + 1)
    dist.all_reduce(x)
    line("all_reduce SUM", x)
    same(x, vector(size * (size + 1) // 2))

    x = vector(rank + 1, -rank)
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    line("all_reduce MAX", x)
    same(x, vector(size, 0))

    parts = [vector(0) for _ in range(size)]
    dist.all_gather(parts, vector(rank * rank))
    line("all_gather", torch.cat(parts))
    same(parts, [vector(r * r) for r in range(size)])

    whole = torch.zeros(2 * size, dtype=torch.int64)
    dist.all_gather_into_tensor(whole, vector(rank, -rank))
    line("all_gather_into_tensor", whole)
    same(whole, torch.tensor([v for r in range(size) for v in (r, -r)]))

    x = vector(0)
    dist.reduce_scatter(x, [vector(r + rank) for r in range(size)])  # rank r receives the sum of everybody's r-th
    line("reduce_scatter SUM", x)
    same(x, vector(size * rank + size * (size - 1) // 2))

    parts = [vector(0) for _ in range(size)]
    dist.all_to_all(parts, [vector(10 * rank + r) for r in range(size)])  # "10 * from + to"
    line("all_to_all", torch.cat(parts))
    same(parts, [vector(10 * r + rank) for r in range(size)])

    # Uneven: every rank sends r + 1 copies of its number to rank r, so rank r receives r + 1 from everyone.
    sends, receives = [r + 1 for r in range(size)], [rank + 1] * size
    x, out = torch.full((sum(sends),), rank), torch.empty(sum(receives), dtype=torch.int64)
    dist.all_to_all_single(out, x, output_split_sizes=receives, input_split_sizes=sends)
    line("all_to_all_single, uneven", out)
    same(out, torch.arange(size).repeat_interleave(rank + 1))


def objects(rank: int, size: int) -> None:
    """Anything that can be pickled. Unpickling runs code: use these among processes that trust each other."""
    names: list[Any] = [None] * size
    dist.all_gather_object(names, {"rank": rank})
    line("all_gather_object", names[-1])
    assert names == [{"rank": r} for r in range(size)]

    box: list[Any] = ["a plan"] if rank == 0 else [None]
    dist.broadcast_object_list(box, src=0)
    line("broadcast_object_list", box[0])
    assert box == ["a plan"]

    out: list[Any] = [None]
    dist.scatter_object_list(out, [f"task {r}" for r in range(size)] if rank == 0 else None, src=0)
    line("scatter_object_list", out[0])
    assert out == [f"task {rank}"]


def without_waiting(rank: int, size: int) -> None:
    x = vector(rank)
    work = dist.all_reduce(x, async_op=True)  # under way; x must not be touched before wait
    answer = sum(range(size))  # something to do meanwhile
    work.wait()
    line("all_reduce, async_op=True", x)
    same(x, vector(answer))


def groups(rank: int, size: int) -> None:
    """A group is a subset of the ranks; every rank of the world calls new_group, the members alone talk."""
    members = list(range(0, size, 2))
    even = dist.new_group(members)
    x = None
    if rank in members:
        x = vector(1)
        dist.all_reduce(x, group=even)
        same(x, vector(len(members)))
    line("all_reduce among even ranks", x)


def main() -> None:
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    line("operation", f"rank {rank}")
    one_to_all_and_back(rank, size)
    all_to_all_ranks(rank, size)
    objects(rank, size)
    without_waiting(rank, size)
    groups(rank, size)
    dist.barrier()
    if rank == 0:
        print("collectives_tour: every result is as expected")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

# python -m mpicoll.run -n 2 examples/collectives_tour.py
"""A tour of the collectives: what each rank puts in, what each rank gets out.

Any number of ranks (3 or 4 show most). Each line is one operation; the columns are the ranks.
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
        print(f"{name:<28}" + "".join(f" {column:<18}" for column in held).rstrip())


def vector(*values: int) -> torch.Tensor:
    return torch.tensor(values)


def one_to_all_and_back(rank: int, size: int) -> None:
    last = size - 1
    x = vector(7, 8) if rank == 0 else vector(0, 0)
    dist.broadcast(x, src=0)
    line("broadcast from 0", x)

    x = vector(0)
    dist.scatter(x, [vector(10 * r) for r in range(size)] if rank == 0 else None, src=0)
    line("scatter from 0", x)

    gathered = [vector(0) for _ in range(size)] if rank == last else None
    dist.gather(x, gathered, dst=last)
    line("gather to the last", None if gathered is None else torch.cat(gathered))

    x = vector(rank + 1)
    dist.reduce(x, dst=0, op=dist.ReduceOp.SUM)
    line("reduce SUM to 0", x)  # only rank 0 holds the sum; the others keep their own number


def all_to_all_ranks(rank: int, size: int) -> None:
    x = vector(rank + 1)
    dist.all_reduce(x)
    line("all_reduce SUM", x)

    x = vector(rank + 1, -rank)
    dist.all_reduce(x, op=dist.ReduceOp.MAX)
    line("all_reduce MAX", x)

    parts = [vector(0) for _ in range(size)]
    dist.all_gather(parts, vector(rank * rank))
    line("all_gather", torch.cat(parts))

    whole = torch.zeros(2 * size, dtype=torch.int64)
    dist.all_gather_into_tensor(whole, vector(rank, -rank))
    line("all_gather_into_tensor", whole)

    x = vector(0)
    dist.reduce_scatter(x, [vector(r + rank) for r in range(size)])  # rank r receives the sum of everybody's r-th
    line("reduce_scatter SUM", x)

    parts = [vector(0) for _ in range(size)]
    dist.all_to_all(parts, [vector(10 * rank + r) for r in range(size)])  # "10 * from + to"
    line("all_to_all", torch.cat(parts))

    # Uneven: every rank sends r + 1 copies of its number to rank r, so rank r receives r + 1 from everyone.
    sends, receives = [r + 1 for r in range(size)], [rank + 1] * size
    x, out = torch.full((sum(sends),), rank), torch.empty(sum(receives), dtype=torch.int64)
    dist.all_to_all_single(out, x, output_split_sizes=receives, input_split_sizes=sends)
    line("all_to_all_single, uneven", out)


def objects(rank: int, size: int) -> None:
    """Anything that can be pickled. Unpickling runs code: use these among processes that trust each other."""
    names: list[Any] = [None] * size
    dist.all_gather_object(names, f"r{rank}")
    line("all_gather_object", names)

    box: list[Any] = ["a plan"] if rank == 0 else [None]
    dist.broadcast_object_list(box, src=0)
    line("broadcast_object_list", box[0])

    out: list[Any] = [None]
    dist.scatter_object_list(out, [f"task {r}" for r in range(size)] if rank == 0 else None, src=0)
    line("scatter_object_list", out[0])


def without_waiting(rank: int, size: int) -> None:
    x = vector(rank)
    work = dist.all_reduce(x, async_op=True)  # under way; x must not be touched before wait
    own = vector(rank)  # something to do meanwhile
    work.wait()
    line("all_reduce, async_op=True", x)
    line("the sum without the own part", x - own)


def groups(rank: int, size: int) -> None:
    """A group is a subset of the ranks; every rank of the world calls new_group, the members alone talk."""
    members = list(range(0, size, 2))
    even = dist.new_group(members)
    x = None
    if rank in members:
        x = vector(1)
        dist.all_reduce(x, group=even)
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
    dist.barrier()  # returns when all ranks are here
    if rank == 0:
        print(f"collectives_tour: a column for each of {size} rank(s)")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

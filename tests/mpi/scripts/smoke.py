"""python smoke.py [LEVEL ...] on any number of ranks: a little of everything at the MPI thread level of the rank's turn.

Prints "rank R at LEVEL: all is well". LEVEL: multiple, serialized, funneled, single; rank r takes the r-th, modulo.
"""

from __future__ import annotations

import os
import sys
import threading

LEVELS = sys.argv[1:] or ["multiple"]
RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0")))
os.environ["MPI4PY_RC_THREAD_LEVEL"] = LEVELS[RANK % len(LEVELS)]

import torch  # noqa: E402

import mpicoll as dist  # noqa: E402


def total(size: int) -> float:
    return size * (size + 1) / 2


def synchronous(rank: int, size: int) -> None:
    tensor = torch.full((5,), rank + 1.0)
    dist.all_reduce(tensor)
    assert torch.all(tensor == total(size))
    gathered = [torch.zeros(rank_ + 1) for rank_ in range(size)]
    dist.all_gather(gathered, torch.full((rank + 1,), float(rank)))
    assert [t[0].item() for t in gathered] == list(range(size))
    output = torch.zeros(2)
    dist.reduce_scatter_tensor(output, torch.full((2 * size,), rank + 1.0))
    assert torch.all(output == total(size))
    half = torch.full((3, 4), rank + 1.0, dtype=torch.bfloat16).t()
    dist.all_reduce(half, dist.ReduceOp.AVG)
    assert torch.all(half == total(size) / size)
    exchanged = torch.zeros(size)
    dist.all_to_all_single(exchanged, torch.full((size,), float(rank)))
    assert exchanged.tolist() == list(range(size))
    tensor.fill_(rank)
    dist.broadcast(tensor, size - 1)
    assert torch.all(tensor == size - 1)
    dist.reduce(tensor.fill_(1), 0)
    assert tensor[0] == (size if rank == 0 else 1)
    dist.scan(tensor.fill_(1))
    assert tensor[0] == rank + 1
    dist.exscan(tensor.fill_(1))
    assert tensor[0] == max(rank, 1)
    assert dist.get_comm().allreduce(1) == size
    dist.gather(torch.ones(1) * rank, [torch.zeros(1) for _ in range(size)] if rank == 0 else None, 0)
    dist.scatter(output[:1], [torch.full((1,), float(r)) for r in range(size)] if rank == 0 else None, 0)
    assert output[0] == rank
    dist.barrier()
    dist.monitored_barrier()
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(size)]


def asynchronous(rank: int, size: int) -> None:
    tensors = [torch.full((1000 + i,), rank + 1.0) for i in range(20)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    assert all(torch.all(tensor == total(size)) for tensor in tensors)
    received = [torch.zeros(1 << (i + 10)) for i in range(8)]
    works = [dist.irecv(tensor, (rank - 1) % size, tag=i) for i, tensor in enumerate(received)]
    works += [dist.isend(torch.full_like(t, float(rank)), (rank + 1) % size, tag=i) for i, t in enumerate(received)]
    while not all(work.is_completed() for work in works):
        pass
    assert all(torch.all(tensor == (rank - 1) % size) for tensor in received)
    if size > 1:
        other = rank ^ 1
        if other < size and rank < other:
            dist.send(torch.ones(1 << 20), other)
        elif other < size:
            assert dist.recv(large := torch.zeros(1 << 20), other) == other
            assert torch.all(large == 1)


def two_groups(rank: int, size: int) -> None:
    groups = dist.new_group(range(size)), dist.new_group(range(size))
    tensors = torch.full((1 << 17,), rank + 1.0), torch.full((1 << 17,), rank + 2.0)
    works = [dist.all_reduce(tensors[i], group=groups[i], async_op=True) for i in ((0, 1) if rank % 2 else (1, 0))]
    for work in works:
        work.wait()
    assert torch.all(tensors[0] == total(size))
    assert torch.all(tensors[1] == total(size) + size)
    errors: list[BaseException] = []

    def loop(index: int) -> None:
        try:
            for _ in range(30):
                tensor = torch.full((10,), 1.0)
                dist.all_reduce(tensor, group=groups[index])
                assert torch.all(tensor == size)
        except BaseException as error:  # noqa: BLE001  shown by the assertion below
            errors.append(error)

    threads = [threading.Thread(target=loop, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    for group in groups:
        dist.destroy_process_group(group)


def callbacks(rank: int, size: int) -> None:
    def again(future: torch.futures.Future) -> torch.Tensor:
        inner = future.value()[0] / size
        dist.all_reduce(inner, async_op=True).wait()
        dist.all_reduce(inner)
        return inner

    outers = [dist.all_reduce(torch.full((i + 1,), rank + 1.0), async_op=True).get_future().then(again) for i in range(10)]
    assert all(torch.all(outer.wait() == total(size) * size) for outer in outers)


def main() -> None:
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    for _ in range(2):
        for part in (synchronous, asynchronous, two_groups, callbacks):
            part(rank, size)
        dist.destroy_process_group()
        dist.init_process_group()
    from mpicoll._mpi import runtime

    there = runtime.current()
    assert there is not None
    level = ("single", "funneled", "serialized", "multiple")[there.thread_level]
    print(f"rank {rank} at {level}: all is well", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""python smoke.py [LEVEL ...] on any number of ranks: random operations and threads at the MPI thread level of the rank's turn.

Prints "rank R at LEVEL: all is well". LEVEL: multiple, serialized, funneled, single; rank r takes the r-th, modulo.
"""

import os
import sys
import threading

LEVELS = sys.argv[1:] or ["multiple"]
RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0")))
os.environ["MPI4PY_RC_THREAD_LEVEL"] = LEVELS[RANK % len(LEVELS)]

import torch  # noqa: E402

import mpicoll as dist  # noqa: E402
from tests.behaviour import random_operations  # noqa: E402


def total(size: int) -> float:
    return size * (size + 1) / 2


def random(rank: int, size: int) -> None:
    random_operations.run(seed=7, count=200)


def others(rank: int, size: int) -> None:
    """Operations that the random ones lack, and a program that polls."""
    tensor = torch.ones(5)
    dist.scan(tensor)
    assert tensor[0] == rank + 1
    dist.exscan(tensor.fill_(1))
    assert tensor[0] == max(rank, 1)
    assert dist.get_comm().allreduce(1) == size
    dist.monitored_barrier()
    received = [torch.zeros(1 << (i + 10)) for i in range(8)]
    works = [dist.irecv(tensor, (rank - 1) % size, tag=i) for i, tensor in enumerate(received)]
    works += [dist.isend(torch.full_like(t, float(rank)), (rank + 1) % size, tag=i) for i, t in enumerate(received)]
    while not all(work.is_completed() for work in works):
        pass
    assert all(torch.all(tensor == (rank - 1) % size) for tensor in received)


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
        for part in (random, others, two_groups, callbacks):
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

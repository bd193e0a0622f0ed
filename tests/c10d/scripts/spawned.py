"""torch.multiprocessing.spawn, and rank and world_size by hand, without MASTER_ADDR or another place to meet."""

import os
import sys
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist

SIZE = 2


def attempt(rank: int, name: str, call: Callable[[], object]) -> None:
    try:
        call()
        result = f"a world of {dist.get_world_size()}"
        dist.destroy_process_group()
    except RuntimeError as error:
        result = f"{type(error).__name__}: {error}"
    sys.stdout.write(f"{rank} {name}: {result}\n")
    sys.stdout.flush()


def worker(rank: int) -> None:
    import mpicoll

    def by_environment() -> None:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(SIZE))
        try:
            dist.init_process_group("mpi")
        finally:
            for name in ("RANK", "WORLD_SIZE"):
                del os.environ[name]

    def by_tutorial() -> None:  # size 0: let MPI say
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            dist.init_process_group("mpi", rank=0, world_size=0)

    attempt(rank, "environment", by_environment)
    attempt(rank, "arguments", lambda: dist.init_process_group("mpi", rank=rank, world_size=SIZE))
    attempt(rank, "scheme", lambda: dist.init_process_group("gloo", init_method="mpi://", rank=rank, world_size=SIZE))
    attempt(rank, "mpicoll", lambda: mpicoll.init_process_group(rank=rank, world_size=SIZE))
    attempt(rank, "environment again", by_environment)
    attempt(rank, "tutorial", by_tutorial)


if __name__ == "__main__":
    torch.multiprocessing.spawn(worker, nprocs=SIZE)

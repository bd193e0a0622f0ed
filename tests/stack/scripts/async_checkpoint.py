"""Checkpoints by a process beside each rank (AsyncCheckpointerType.PROCESS), and some still being written when the script ends.

async_checkpoint.py FOLDER
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh


class Witness:
    """Unpickled in the process that saves; leaves a word there about who that is."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        words = [os.getpid(), dist.get_backend(), dist.get_rank(), dist.get_world_size(), "mpi4py.MPI" in sys.modules]
        (self.folder / f"child of {os.getppid()}").write_text(" ".join(map(str, words)))


def state(whole: torch.Tensor, step: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"sharded": distribute_tensor(whole, mesh, [Shard(0)]), "step": step}


def save(what: dict[str, Any], folder: Path, how: AsyncCheckpointerType, **options: Any) -> Any:
    answer = dcp.async_save(what, checkpoint_id=folder / f"{what['step']}", async_checkpointer_type=how, **options)
    sharded: DTensor = what["sharded"]
    sharded.to_local().fill_(-1)  # what is saved is the moment of the call
    total = torch.ones(1)
    dist.all_reduce(total)  # the world goes on
    assert total.item() == dist.get_world_size(), total
    return getattr(answer, "upload_completion", answer)


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("mpi")
    rank, size = dist.get_rank(), dist.get_world_size()
    whole = torch.arange(21.0).reshape(7, 3)
    for step in range(2):
        save({**state(whole + step, step), "witness": Witness(folder)}, folder, AsyncCheckpointerType.PROCESS).result()
    for step in range(2):
        loaded = state(torch.zeros(7, 3), -1)
        dcp.load(loaded, checkpoint_id=folder / f"{step}")
        assert torch.equal(loaded["sharded"].full_tensor(), whole + step), loaded
        assert loaded["step"] == step, loaded
    child, *words = (folder / f"child of {os.getpid()}").read_text().split()
    assert int(child) != os.getpid(), "nobody was started"
    assert words == ["gloo", str(rank), str(size), "False"], words  # a world of its own; no second copy of this rank in MPI's
    beside = dist.new_group()
    save(state(whole + 2, 2), folder, AsyncCheckpointerType.THREAD, process_group=beside)
    save(state(whole + 3, 3), folder, AsyncCheckpointerType.PROCESS)
    print(f"rank {rank} of {size}: saved beside", flush=True)


if __name__ == "__main__":
    main()

"""Trains two steps more than what it finds in FOLDER, with any number of ranks, and checks itself against one process.

resume.py FOLDER
"""

import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tests.stack import sharded

ROWS, STEPS = 24, 2  # the whole batch, whatever the number of ranks


def go_on(folder: Path, mesh: Any, group: Any = None) -> tuple[range, list[str]]:
    """The steps that the ranks of ``mesh`` have trained, and where the parameters differ from one process that never stopped."""
    model = sharded.sharded(sharded.network(), mesh=mesh)
    optimizer = sharded.adam(model.parameters())
    steps = range(STEPS)
    if (folder / ".metadata").exists():
        state, moments = get_state_dict(model, optimizer)  # lets an optimizer without state step once: not in a fresh one
        loaded = {"model": state, "optimizer": moments, "step": -1}
        dcp.load(loaded, checkpoint_id=folder, process_group=group)
        set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        steps = range(loaded["step"], loaded["step"] + STEPS)
    for step in steps:
        x, y = (part.chunk(mesh.size())[mesh.get_local_rank()] for part in sharded.batch(step, ROWS // sharded.ROWS))
        optimizer.zero_grad()
        sharded.loss_of(model(x), y).backward()
        optimizer.step()
    state, moments = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": moments, "step": steps.stop}, checkpoint_id=folder, process_group=group)
    reference = sharded.alone(steps.stop, ROWS // sharded.ROWS, sharded.adam)
    return steps, sharded.differences(model.parameters(), reference.parameters())


def main() -> None:
    dist.init_process_group("mpi")
    rank, size = dist.get_rank(), dist.get_world_size()
    steps, wrong = go_on(Path(sys.argv[1]), dist.init_device_mesh("cpu", (size,)))
    assert not wrong, wrong
    print(f"rank {rank} of {size}: steps {steps.start} to {steps.stop}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

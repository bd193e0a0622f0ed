"""Trains two steps more than what it finds in FOLDER, with any number of ranks, and checks itself against one process.

resume.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from tests.stack import sharded

ROWS, STEPS = 12, 2  # the whole batch, whatever the number of ranks


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("mpi")
    rank, size = dist.get_rank(), dist.get_world_size()
    model = sharded.sharded(sharded.network(), mesh=dist.init_device_mesh("cpu", (size,)))
    optimizer = sharded.adam(model.parameters())
    first = 0
    if folder.exists():
        state, moments = get_state_dict(model, optimizer)
        loaded = {"model": state, "optimizer": moments, "step": -1}
        dcp.load(loaded, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        first = loaded["step"]
    steps = range(first, first + STEPS)
    for step in steps:
        x, y = (part.chunk(size)[rank] for part in sharded.batch(step, ROWS // sharded.ROWS))
        optimizer.zero_grad()
        sharded.loss_of(model(x), y).backward()
        optimizer.step()
    state, moments = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": moments, "step": steps.stop}, checkpoint_id=folder)
    reference = sharded.alone(steps.stop, ROWS // sharded.ROWS, sharded.adam)
    wrong = sharded.differences(model.parameters(), reference.parameters())
    assert not wrong, wrong
    print(f"rank {rank} of {size}: steps {steps.start} to {steps.stop}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Megatron Core makes the groups of a job, some of them by backend="gloo": gradients and a checkpoint travel in those.

Two arguments: the backend of the world, and an empty folder.
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core import parallel_state
from report import RATE, STEPS, problem, report, share


def main(backend: str, folder: str) -> None:
    dist.init_process_group(backend)
    parallel_state.initialize_model_parallel()
    group = parallel_state.get_data_parallel_group_gloo()
    model, x, y = problem()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(share(x)), share(y))
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= dist.get_world_size(group)
        optimizer.step()
        dist.all_reduce(total := loss.detach().clone(), group=group)
        losses.append(total.item() / dist.get_world_size(group))
    dcp.async_save(model.state_dict(), checkpoint_id=folder, process_group=group).result()
    saved = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    dcp.load(saved, checkpoint_id=folder, process_group=group)
    report(losses, list(saved.values()), named_gloo=int(dist.get_backend(group) == "gloo"), ranks=dist.get_world_size(group))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Tensor parallelism beside FSDP2 over MPI, on 2D meshes: one process's training. DDP: test_three_dimensions.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.stack.meshes import grids, whole
from tests.stack.sharded import differences
from tests.stack.transformers import Transformer, language_loss, made, parallelize, tokens
from tests.support import agree

SECTION = "Tensor and context parallel"

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view:UserWarning"),
]


@pytest.mark.feature("optimizers and gradient clipping on DTensors", section="Meshes and DTensor")
@pytest.mark.feature("tensor parallel with FSDP2 on a 2D mesh")
def test_with_fsdp(rank: int, size: int) -> None:
    """Rows over dp, layers over tp: parameters sharded twice, gradients averaged over dp, clipped over all; one process."""
    wrong = []
    for grid in grids(size, 2):
        mesh = init_device_mesh("cpu", grid, mesh_dim_names=("dp", "tp"))
        model, reference = (made(lambda: Transformer(size)) for _ in range(2))
        parallelize(model, mesh["tp"], split_logits=False)
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh["dp"])
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, reference)]
        for step in range(2):
            rows = tokens(step, 2 * grid[0], 2 * grid[1] + 1)
            norms = []
            for m, optimizer in zip((model, reference), optimizers, strict=True):
                optimizer.zero_grad()
                mine = rows.chunk(grid[0])[mesh.get_local_rank("dp")] if m is model else rows
                language_loss(m, mine).backward()
                norms.append(float(whole(nn.utils.clip_grad_norm_(m.parameters(), 0.1))))
                optimizer.step()
            if norms[0] != pytest.approx(norms[1], rel=1e-9):
                wrong.append((grid, step, norms))
        wrong += [(grid, line) for line in differences(model.parameters(), reference.parameters(), 1e-10)]
    agree(not wrong, wrong[:2])

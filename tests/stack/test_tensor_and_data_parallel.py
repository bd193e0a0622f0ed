"""Tensor parallelism beside FSDP2 and DDP over MPI, on 2D meshes: one process's training."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.parallel import DistributedDataParallel

from tests.stack.meshes import drawn, grids, whole
from tests.stack.transformers import WIDTH, Perceptron, Transformer, differences, language_loss, made, parallelize, tokens
from tests.support import agree

SECTION = "Tensor and context parallel"

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view:UserWarning"),
]


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
        wrong += [(grid, *difference) for difference in differences(model, reference)]
    agree(not wrong, wrong[:2])


@pytest.mark.feature("tensor parallel with DDP on a 2D mesh")
def test_with_ddp(rank: int, size: int) -> None:
    """DDP averages over dp the local parts of parameters that are sharded over tp."""
    wrong = []
    for grid in grids(size, 2):
        mesh = init_device_mesh("cpu", grid, mesh_dim_names=("dp", "tp"))
        model, reference = (made(functools.partial(Perceptron, 4 * grid[1])) for _ in range(2))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        _pre_dp_module_transform(model)
        parallel = DistributedDataParallel(model, process_group=mesh.get_group("dp"))
        inputs = [drawn(2 * grid[0], WIDTH, seed=step) for step in range(3)]
        mine = [x.chunk(grid[0])[mesh.get_local_rank("dp")] for x in inputs]
        for m, batches in ((parallel, mine), (reference, inputs)):
            optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
            for x in batches:
                optimizer.zero_grad()
                m(x).square().mean().backward()
                optimizer.step()
        expected = dict(reference.named_parameters())
        for layer, name in itertools.product(("up", "down"), ("weight", "bias")):  # DDP's model lists its local parts no more
            found, right = whole(getattr(getattr(model, layer), name).detach()), expected[f"{layer}.{name}"]
            wrong += [] if torch.allclose(found, right, rtol=0, atol=1e-10) else [(grid, layer, name, found, right)]
    agree(not wrong, wrong[:2])

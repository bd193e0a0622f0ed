"""fully_shard over MPI on meshes: HSDP (replicate x shard), subgroups, tensor parallelism beside it; and `replicate`."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed._composable import replicate
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_as_fsdp
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.stack.meshes import grids
from tests.stack.sharded import (
    TOLERANCE,
    adam,
    alone,
    backward,
    batch,
    differences,
    gradients,
    loss_of,
    network,
    sgd,
    sharded,
    share,
    train,
)
from tests.support import agree, everyone

SECTION = "Fully sharded"

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")

BF16, FP32 = torch.bfloat16, torch.float32
HSDP = "fully_shard: HSDP on a 2D mesh (replicate x shard)"


def plane(shape: tuple[int, ...], *names: str) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names or ("replicate", "shard"))


@pytest.mark.feature(HSDP)
@pytest.mark.parametrize("dtype", [torch.float64, FP32], ids=["float64", "float32"])
def test_hybrid_equals_one_process(dtype: torch.dtype, rank: int, size: int) -> None:
    """Reduce-scatter in the rows and all-reduce in the columns make the mean over all ranks, on every grid."""
    bad = []
    for shape in grids(size, 2):
        model = sharded(network(dtype), mesh=plane(shape))
        train(model, sgd(model.parameters()), range(3), rank, size, dtype)
        bad += differences(model.parameters(), alone(3, size, sgd, dtype).parameters(), TOLERANCE[dtype])
        held = model[0].weight
        if held.placements != (Replicate(), Shard(0)) or held.to_local().shape[0] > -(-7 // shape[1]):
            bad.append(f"{shape}: {held.placements}")
        replicas = everyone(held.to_local().detach().numpy().tobytes())
        if any(replicas[r] != replicas[rank] for r in range(rank % shape[1], size, shape[1])):
            bad.append(f"{shape}: replicas differ")  # trap 32
    agree(not bad, bad)


@pytest.mark.feature(HSDP)
def test_hybrid_mixed_precision_rounds_once_per_reduction(rank: int, size: int) -> None:
    """bf16 gradients: one rounding after the rows, one after the columns."""
    bad = []
    for shape in grids(size, 2):
        policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16)
        model = sharded(network(FP32), mesh=plane(shape), mp_policy=policy)
        x, y = batch(0, size, BF16)
        loss_of(model(share(x, rank)), share(y, rank)).backward()
        per_rank = []
        for r in range(size):
            local = network(FP32).to(BF16)
            loss_of(local(share(x, r)), share(y, r)).backward()
            per_rank.append([p.grad.float() for p in local.parameters()])
        right = []
        for found in zip(*per_rank, strict=True):
            rows = torch.stack(found).unflatten(0, shape).mean(1).to(BF16).float()
            right.append(rows.mean(0).to(BF16).float())
        bad += [f"{shape} {line}" for line in differences(gradients(model), right, 1e-7, torch.finfo(BF16).eps)]
    agree(not bad, bad)


@pytest.mark.feature(HSDP)
@pytest.mark.parametrize("force_sum", [False, True], ids=["premul", "sum"])
def test_hybrid_divide_factor(force_sum: bool, rank: int, size: int) -> None:
    """The factor is for all ranks together: applied once, not in each of the two reductions."""
    reference = network(FP32)
    backward(reference, 0, None, size, FP32)
    bad = []
    shapes = [shape for shape in grids(size, 2) if shape[1] > 1 or not force_sum]  # else FSDP itself divides twice
    for factor in (3.0, 2.0):  # 2 may be the number of columns, which takes AVG
        for shape in shapes:
            model = sharded(network(FP32), mesh=plane(shape))
            for module in (model[0], model[2], model):
                module.set_gradient_divide_factor(factor)
                module.set_force_sum_reduction_for_comms(force_sum)
            backward(model, 0, rank, size, FP32)
            right = [p.grad * size / factor for p in reference.parameters()]
            bad += [f"{shape} {factor} {line}" for line in differences(gradients(model), right, TOLERANCE[FP32])]
    agree(not bad, bad)


@pytest.mark.feature("fully_shard: HSDP accumulation (set_requires_all_reduce)")
def test_hybrid_adds_up_in_the_rows_first(rank: int, size: int) -> None:
    """The micro-batches are reduced in the rows; the columns meet once."""
    reference = network()
    for step in range(3):
        backward(reference, step, None, size)
    bad = []
    for shape in grids(size, 2):
        model = sharded(network(), mesh=plane(shape))
        for step in range(3):
            model.set_requires_all_reduce(step == 2)
            model.set_is_last_backward(step == 2)
            backward(model, step, rank, size)
        bad += [f"{shape} {line}" for line in differences(gradients(model), gradients(reference))]
    agree(not bad, bad)


@pytest.mark.feature("fully_shard: reshard_after_forward True, False, int")
@pytest.mark.ranks(4, 8)
def test_hybrid_reshards_to_a_smaller_world(rank: int, size: int) -> None:
    """Three groupings of the same ranks at once: rows of four, columns, and pairs for the gathers of backward."""
    model = sharded(network(), mesh=plane((size // 4, 4)), reshard_after_forward=2)
    train(model, sgd(model.parameters()), range(2), rank, size)
    bad = differences(model.parameters(), alone(2, size).parameters())
    agree(not bad, bad)


@pytest.mark.feature("fully_shard: set_all_reduce_hook")
def test_all_reduce_of_ones_own(rank: int, size: int) -> None:
    """HSDP by hand: sharded in the rows; the hook is called with each reduced shard and averages the columns."""
    bad = []
    for shape in grids(size, 2):
        mesh, calls = plane(shape), []

        def hook(shard: Tensor, mesh: DeviceMesh = mesh, calls: list[int] = calls) -> None:
            calls.append(shard.numel())
            dist.all_reduce(shard, dist.ReduceOp.AVG, group=mesh.get_group("replicate"))

        model, reference = sharded(network(), mesh=mesh["shard"]), network()
        for module in (model[0], model[2], model):
            module.set_all_reduce_hook(hook)
        backward(model, 0, rank, size)
        backward(reference, 0, None, size)
        bad += differences(gradients(model), gradients(reference)) + ([] if len(calls) == 3 else [str(calls)])
    agree(not bad, bad)


@pytest.mark.feature("fully_shard: on the mesh of a subgroup")
def test_rows_of_a_mesh_train_apart(rank: int, size: int) -> None:
    """Each row is a world of its own: sharded among its ranks, with its own batches and its own model."""
    columns = 2 if size % 2 == 0 else 1
    row, column = divmod(rank, columns)
    model = sharded(network(), mesh=plane((size // columns, columns))["shard"])
    train(model, sgd(model.parameters()), range(10 * row, 10 * row + 3), column, columns)
    reference = network()
    train(reference, sgd(reference.parameters()), range(10 * row, 10 * row + 3), None, columns)
    bad = differences(model.parameters(), reference.parameters())
    agree(not bad, bad)


@pytest.mark.feature("fully_shard: on the mesh of a subgroup")
@pytest.mark.min_ranks(2)
def test_some_ranks_train_and_others_do_not(rank: int, size: int) -> None:
    """A mesh from a process group that leaves rank 0 out, ranks in falling order where torch keeps it."""
    members = list(range(1, size))
    group = dist.new_group(members)
    bad = []
    if rank in members:
        model = sharded(network(), mesh=DeviceMesh.from_group(group, "cpu"))
        train(model, adam(model.parameters()), range(3), dist.get_rank(group), size - 1)
        bad = differences(model.parameters(), alone(3, size - 1, adam).parameters())
    agree(not bad, bad)


@pytest.mark.feature("fully_shard with tensor parallelism on a 2D mesh, gradients clipped")
def test_with_tensor_parallelism(rank: int, size: int) -> None:
    """A weight split twice along the same dimension is put together in the right order, and its norm counts each part once."""
    bad = []
    for shape in grids(size, 2):
        mesh = plane(shape, "data", "tensor")
        widths = (4 * shape[1], 3, 3)
        model, reference = network(widths=widths)[:3], network(widths=widths)[:3]
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        sharded(model, mesh=mesh["data"])
        row = rank // shape[1]
        for m, r in ((model, row), (reference, None)):
            optimizer = sgd(m.parameters())
            for step in range(2):
                optimizer.zero_grad()
                backward(m, step, r, shape[0])
                norm = nn.utils.clip_grad_norm_(m.parameters(), 0.1)
                optimizer.step()
            if r is not None:
                mine = norm
        bad += [f"{shape} {line}" for line in differences([mine, *model.parameters()], [norm, *reference.parameters()])]
    agree(not bad, bad)


@pytest.mark.feature("replicate (torch.distributed._composable): training, gradient sync off, communication hook")
def test_replicate(rank: int, size: int) -> None:
    """DDP without a wrapper: its first forward broadcasts and verifies; its hooks are DDP's."""
    model, reference = network(), network()
    replicate(model)
    for m, r in ((model, rank), (reference, None)):
        optimizer = sgd(m.parameters())
        train(m, optimizer, range(2), r, size)
        optimizer.zero_grad()
        for step in range(2):
            if r is not None:
                m.set_requires_gradient_sync(step == 1)
            backward(m, step, r, size)
        optimizer.step()
    bad = differences(model.parameters(), reference.parameters())
    hooked, plain = network(FP32), network(FP32)
    replicate(hooked).register_comm_hook(None, fp16_compress_hook)
    backward(hooked, 0, rank, size, FP32)
    backward(plain, 0, None, size, FP32)
    bad += differences(gradients(hooked), gradients(plain), 2e-3)
    rounded = all(torch.equal(p.grad, p.grad.half().float()) for p in hooked.parameters())
    agree(not bad and (rounded or size & (size - 1)), bad)


@pytest.mark.feature("replicate_with_fsdp: training, mixed precision, accumulation")
def test_replicate_as_a_kind_of_fsdp(rank: int, size: int) -> None:
    """The newer replicate: all-reduce of whole gradients by FSDP's machinery."""
    model, reference = network(FP32), network(FP32)
    for module in (model[0], model[2], model):
        replicate_as_fsdp(module)
    train(model, sgd(model.parameters()), range(2), rank, size, FP32)
    train(reference, sgd(reference.parameters()), range(2), None, size, FP32)
    bad = differences(model.parameters(), reference.parameters(), TOLERANCE[FP32])
    for m, r in ((model, rank), (reference, None)):
        m.zero_grad()
        for step in range(2):
            if r is not None:
                m.set_requires_gradient_sync(step == 1)
            backward(m, step, r, size, FP32)
    bad += differences(gradients(model), gradients(reference), TOLERANCE[FP32])
    half = network(FP32)
    replicate_as_fsdp(half, mp_policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32, output_dtype=FP32))
    plain = network(FP32)
    backward(half, 0, rank, size, FP32)
    backward(plain, 0, None, size, FP32)
    bad += differences(gradients(half), gradients(plain), 0.05)
    agree(not bad, bad)


@pytest.mark.feature("fully_shard: dp_mesh_dims, parameters as DTensors on the whole mesh")
@pytest.mark.skipif(not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"), reason="needs torch >= 2.13")
def test_parameters_on_the_whole_mesh(rank: int, size: int) -> None:
    """FSDP flattens or concatenates dimensions of the mesh, which makes further groups."""
    from torch.distributed.fsdp import DataParallelMeshDims

    ways = [{"shard": ("a", "b")}, {"shard": "b", "replicate": "a"}]
    bad = []
    for shape in grids(size, 2):
        mesh = plane(shape, "a", "b")  # one mesh for both ways: FSDP wants the very object that DTensor remembers
        for way in ways:
            model, reference = network(), network()
            for module in model.modules():
                for name, p in list(module.named_parameters(recurse=False)):
                    setattr(module, name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Replicate(), Replicate()])))
            sharded(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(**way))
            x, y = (DTensor.from_local(share(t, rank), mesh, [Shard(0), Shard(0)]) for t in batch(0, size))
            loss_of(model(x), y).backward()
            backward(reference, 0, None, size)
            bad += [f"{shape} {way} {line}" for line in differences(gradients(model), gradients(reference))]
    agree(not bad, bad)

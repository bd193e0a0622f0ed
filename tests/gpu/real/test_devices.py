"""Which device: the world's, a barrier's, several of one rank, NCCL's side of a mixed group, RPC's maps."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed
from torch import Tensor

import mpicoll as dist
from mpicoll import rpc
from tests.support import agree

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def mapped(device: torch.device, rank: int, size: int) -> Iterator[torch.device]:
    """RPC whose calls keep the caller's device: ranks see the same GPUs."""
    maps = {f"worker{r}": {device: device} for r in range(size) if r != rank} if device.type == "cuda" else {}
    options = rpc.MPIRpcBackendOptions(device_maps=maps)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    yield device
    rpc.shutdown()


def doubled(x: Tensor) -> Tensor:
    return x * 2


@pytest.mark.min_ranks(2)
def test_device_maps(mapped: torch.device, rank: int, size: int) -> None:
    """There and back; the answer goes by the caller's map the other way round."""
    x = torch.arange(100_000.0, device=mapped) + rank
    came = rpc.rpc_sync(f"worker{(rank + 1) % size}", doubled, (x,))
    agree(came.device == x.device and torch.equal(came, x * 2), came[:3])


def test_a_world_that_is_bound_to_a_device(device: torch.device, rank: int, size: int) -> None:
    """As init_process_group(device_id=...) does it; groups, splits and barriers then name the device, too."""
    dist.init_process_group(**({"device_id": device} if device.type == "cuda" else {}))  # torch refuses others
    x = torch.full((1000,), rank + 1.0, device=device)
    dist.all_reduce(x)
    torch.distributed.barrier(device_ids=[device.index or 0] if device.type == "cuda" else None)
    group = torch.distributed.new_group()
    torch.distributed.all_reduce(x, group=group)
    torch.distributed.destroy_process_group(group)
    objects: list[object] = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "on": str(x.device)})
    right = x.eq(size * size * (size + 1) / 2).all().item() and [o["rank"] for o in objects] == list(range(size))  # type: ignore[index]
    dist.destroy_process_group()
    assert right


def test_nccl_beside_mpi(device: torch.device, rank: int, size: int) -> None:
    """MPI launches, bootstraps and carries the CPU's side."""
    if device.type != "cuda" or not torch.distributed.is_nccl_available():
        pytest.skip("needs a GPU, and NCCL in torch")
    if torch.cuda.device_count() < size:
        pytest.skip("ranks share a GPU, which NCCL refuses")
    dist.init_process_group("cpu:mpi,cuda:nccl")
    x, y = torch.ones(1000, device=device), torch.ones(1000)
    dist.all_reduce(x)
    dist.all_reduce(y)
    right = x.eq(size).all().item() and y.eq(size).all().item()
    dist.destroy_process_group()
    assert right


@pytest.mark.usefixtures("world")
def test_tensors_of_several_devices(device: torch.device, rank: int, size: int) -> None:
    """Of one rank, in one operation: of all GPUs that it sees."""
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())] if device.type == "cuda" else [device]
    outputs = [torch.empty(50_000, device=devices[(rank + r) % len(devices)]) for r in range(size)]
    dist.all_gather(outputs, torch.full((50_000,), float(rank), device=devices[rank % len(devices)]))
    agree(all(output.eq(r).all().item() for r, output in enumerate(outputs)), [output[:2] for output in outputs])

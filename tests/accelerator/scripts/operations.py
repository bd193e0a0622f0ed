"""Operations on tensors of a device that mpicoll knows nothing of: ``operations.py LIBRARY mpicoll|torch``."""

import sys
from types import ModuleType

import torch

torch.ops.load_library(sys.argv[1])
torch.utils.rename_privateuse1_backend("npu")
module = ModuleType("torch.npu")
for name, value in {"is_available": True, "device_count": 1, "current_device": 0, "_is_in_bad_fork": False}.items():
    setattr(module, name, lambda value=value: value)
torch._register_device_module("npu", module)
torch.utils.generate_methods_for_privateuse1_backend()

if sys.argv[2] == "mpicoll":
    import mpicoll as dist

    dist.init_process_group()
else:
    import torch.distributed as dist  # type: ignore[no-redef]

    dist.init_process_group("mpi")

rank, size = dist.get_rank(), dist.get_world_size()
after, before = (rank + 1) % size, (rank - 1) % size


def own(count: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(count) + 10 * rank).to(dtype).to("npu")


def empty(count: int = 4) -> torch.Tensor:
    return torch.full((count,), -1.0, device="npu")


def of(other: int, count: int = 4) -> list[float]:
    return (torch.arange(count) + 10 * other).float().tolist()


def check(what: str, tensor: torch.Tensor, expected: list[float]) -> None:
    assert tensor.device.type == "npu", what
    assert tensor.cpu().float().tolist() == expected, f"{what}: rank {rank} has {tensor.cpu()}, not {expected}"


total = [sum(column) for column in zip(*(of(other) for other in range(size)), strict=True)]
everybody = [of(other) for other in range(size)]

for dtype in (torch.float32, torch.bfloat16, torch.int64):
    tensor = own(dtype=dtype)
    dist.all_reduce(tensor)
    check("all_reduce", tensor, total)
work = dist.all_reduce(tensor := own(), async_op=True)
assert work is not None
work.wait()
check("asynchronous all_reduce", tensor, total)
whole = torch.zeros(4, 3, device="npu")
whole[:, 1] = own()
dist.all_reduce(whole[:, 1])
check("all_reduce of a column", whole[:, 1], total)
assert whole.cpu().sum() == sum(total)
dist.all_reduce(large := torch.full((1 << 19,), rank + 1.0, device="npu"))
assert torch.all(large.cpu() == size * (size + 1) / 2)

dist.broadcast(tensor := own(), src=size - 1)
check("broadcast", tensor, of(size - 1))
dist.reduce(tensor := own(), dst=0)
check("reduce", tensor, total if rank == 0 else of(rank))
dist.all_gather(several := [empty() for _ in range(size)], own())
dist.all_gather_into_tensor(flat := empty(4 * size), own())
for other in range(size):
    check("all_gather", several[other], everybody[other])
check("all_gather_into_tensor", flat, [value for each in everybody for value in each])
dist.gather(own(), several := [empty() for _ in range(size)] if rank == 0 else None, dst=0)
for tensor, expected in zip(several or [], everybody, strict=False):
    check("gather", tensor, expected)
dist.scatter(tensor := empty(), [own() + 10 * other for other in range(size)] if rank == 0 else None, src=0)
check("scatter", tensor, of(rank))
dist.reduce_scatter(tensor := empty(), [own() for _ in range(size)])
check("reduce_scatter", tensor, total)
dist.reduce_scatter_tensor(tensor := empty(1), torch.full((size,), rank + 1.0, device="npu"))
check("reduce_scatter_tensor", tensor, [size * (size + 1) / 2])
dist.all_to_all_single(tensor := empty(size), 10.0 * rank + torch.arange(size, device="npu"))
check("all_to_all_single", tensor, [10.0 * other + rank for other in range(size)])
dist.all_to_all(several := [empty(1) for _ in range(size)], list((10.0 * rank + torch.arange(size, device="npu")).split(1)))
check("all_to_all", torch.cat(several), [10.0 * other + rank for other in range(size)])

work = dist.irecv(later := empty(), before, tag=1)
dist.isend(own(), after, tag=1).wait()
work.wait()
check("irecv", later, of(before))
if rank % 2 or rank == size - 1:
    dist.send(own(), after)
    dist.recv(tensor := empty(), before)
else:
    dist.recv(tensor := empty(), before)
    dist.send(own(), after)
check("recv", tensor, of(before))
dist.all_gather_object(objects := [None] * size, {"rank": rank})
assert objects == [{"rank": other} for other in range(size)]

dist.barrier()
if rank == 0:
    print("every operation is right")

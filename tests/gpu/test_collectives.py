"""Tensors on a GPU (traps 63 to 68): by every way, in order with what was launched, whatever the other ranks' tensors are on.

No GPU is needed: see fake_gpu.py and ways.py.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor
from torch.distributed import ReduceOp

from mpicoll._api import groups
from mpicoll._engine.communicator import Communicator
from tests.gpu.fake_gpu import Gpu, OnGpu, OnGpu1, plain
from tests.gpu.ways import engine, gpu, group_that_goes, on_gpu, total, values, way
from tests.support import agree

pytestmark = pytest.mark.usefixtures("world")
Make = Callable[[int, int], Tensor]  # (rank, count) -> a tensor with its values, on a GPU or not
Result = tuple[Tensor, Tensor]  # what came, what should have


def flat(*tensors: Tensor) -> Tensor:
    return torch.cat([plain(tensor).reshape(-1) for tensor in tensors])


def all_reduce(engine: Communicator, make: Make, n: int) -> Result:
    x = make(engine.rank, n)
    engine.all_reduce(x)
    return x, total(engine.size, n)


def asynchronous(engine: Communicator, make: Make, n: int) -> Result:
    x = make(engine.rank, n)
    work = engine.all_reduce(x, async_op=True)
    assert work is not None
    work.wait()
    return x, total(engine.size, n)


def coalesced(engine: Communicator, make: Make, n: int) -> Result:
    x, y = make(engine.rank, n), make(engine.rank, 8)
    engine.all_reduce_coalesced([x, y])
    return flat(x, y), torch.cat([total(engine.size, n), total(engine.size, 8)])


def reduce(engine: Communicator, make: Make, n: int) -> Result:
    x = make(engine.rank, n)
    last = engine.size - 1
    engine.reduce(x, last)
    return x, total(engine.size, n) if engine.rank == last else values(engine.rank, n)


def scan(engine: Communicator, make: Make, n: int) -> Result:
    x = make(engine.rank, n)
    engine.scan(x)
    return x, total(engine.rank + 1, n)


def exscan(engine: Communicator, make: Make, n: int) -> Result:
    x = make(engine.rank, n)
    engine.exscan(x)
    return x, total(engine.rank, n) if engine.rank else values(0, n)


def broadcast(engine: Communicator, make: Make, n: int) -> Result:
    x = make(engine.rank, n)
    engine.broadcast(x, engine.size - 1)
    return x, values(engine.size - 1, n)


def all_gather(engine: Communicator, make: Make, n: int) -> Result:
    outputs = [make(9, n) for _ in range(engine.size)]
    engine.all_gather(outputs, make(engine.rank, n))
    return flat(*outputs), torch.cat([values(r, n) for r in range(engine.size)])


def all_gather_uneven(engine: Communicator, make: Make, n: int) -> Result:
    outputs = [make(9, n + 2 * r) for r in range(engine.size)]
    engine.all_gather(outputs, make(engine.rank, n + 2 * engine.rank))
    return flat(*outputs), torch.cat([values(r, n + 2 * r) for r in range(engine.size)])


def all_gather_single(engine: Communicator, make: Make, n: int) -> Result:
    output = make(9, n * engine.size)
    engine.all_gather_single(output, make(engine.rank, n))
    return output, torch.cat([values(r, n) for r in range(engine.size)])


def all_gather_in_place(engine: Communicator, make: Make, n: int) -> Result:
    """The input is another rank's slice of the output."""
    output = make(9, n * engine.size)
    other = (engine.rank + 1) % engine.size
    mine = output.reshape(-1)[other * n : (other + 1) * n]
    plain(mine).copy_(values(engine.rank, n))
    engine.all_gather_single(output, mine)
    return output, torch.cat([values(r, n) for r in range(engine.size)])


def reduce_scatter_single(engine: Communicator, make: Make, n: int) -> Result:
    output = make(9, n)
    engine.reduce_scatter_single(output, make(engine.rank, n * engine.size))
    return output, total(engine.size, n * engine.size).view(engine.size, n)[engine.rank]


def reduce_scatter(engine: Communicator, make: Make, n: int) -> Result:
    output = make(9, n + 2 * engine.rank)
    engine.reduce_scatter(output, [make(engine.rank, n + 2 * r) for r in range(engine.size)])
    return output, total(engine.size, n + 2 * engine.rank)


def all_to_all_single(engine: Communicator, make: Make, n: int) -> Result:
    output = make(9, n * engine.size)
    engine.all_to_all_single(output, make(engine.rank, n * engine.size))
    return output, torch.cat([values(r, n * engine.size).view(engine.size, n)[engine.rank] for r in range(engine.size)])


def all_to_all(engine: Communicator, make: Make, n: int) -> Result:
    rank, size = engine.rank, engine.size
    outputs = [make(9, n + 2 * (r + rank)) for r in range(size)]
    engine.all_to_all(outputs, [make(5 * rank + r, n + 2 * (r + rank)) for r in range(size)])
    return flat(*outputs), torch.cat([values(5 * r + rank, n + 2 * (r + rank)) for r in range(size)])


def gather(engine: Communicator, make: Make, n: int) -> Result:
    outputs = [make(9, n + 2 * r) for r in range(engine.size)]
    engine.gather(make(engine.rank, n + 2 * engine.rank), outputs if engine.rank == 0 else None, 0)
    return flat(*outputs), torch.cat([values(r if engine.rank == 0 else 9, n + 2 * r) for r in range(engine.size)])


def scatter(engine: Communicator, make: Make, n: int) -> Result:
    x = make(9, n)
    engine.scatter(x, [make(r, n) for r in range(engine.size)] if engine.rank == 0 else None, 0)
    return x, values(engine.rank, n)


def ring(engine: Communicator, make: Make, n: int) -> Result:
    rank, size = engine.rank, engine.size
    x, y = make(9, n), make(9, n)
    requests = [engine.irecv(x, (rank - 1) % size), engine.irecv(y, (rank - 1) % size)]
    engine.send(make(rank, n), (rank + 1) % size)
    sent = engine.isend(make(rank + 1, n), (rank + 1) % size)
    for request in [*requests, sent]:
        request.wait()
    return flat(x, y), torch.cat([values((rank - 1) % size + more, n) for more in (0, 1)])


def shorter(engine: Communicator, make: Make, n: int) -> Result:
    """Messages shorter than the tensors that receive them: the rest stays as it was."""
    rank, size = engine.rank, engine.size
    x = make(9, n + 10)
    request = engine.irecv(x, None)
    engine.send(make(rank, n), (rank + 1) % size)
    request.wait()
    assert request.source_rank() == (rank - 1) % size
    return x, torch.cat([values((rank - 1) % size, n), values(9, n + 10)[n:]])


OPERATIONS = [
    all_reduce, asynchronous, coalesced, reduce, scan, exscan, broadcast, all_gather, all_gather_uneven, all_gather_single,
    all_gather_in_place, reduce_scatter_single, reduce_scatter, all_to_all_single, all_to_all, gather, scatter, ring, shorter,
]  # fmt: skip
Operation = Callable[[Communicator, Make, int], Result]


def right(engine: Communicator, operation: Operation, make: Make, counts: tuple[int, ...]) -> list[object]:
    wrong: list[object] = []
    for n in counts:
        came, expected = operation(engine, make, n)
        if not torch.equal(plain(came).reshape(-1), expected.reshape(-1)):
            wrong.append((n, came, expected))
    return wrong


DEVICES = itertools.cycle((OnGpu, OnGpu1))
TENSORS: dict[str, Make] = {
    "contiguous": on_gpu,
    "transposed": partial(on_gpu, layout="transposed"),
    "of two devices in turn": lambda rank, n: on_gpu(rank, n).as_subclass(next(DEVICES)),
}


@pytest.mark.parametrize("tensors", TENSORS)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
def test_every_operation(operation: Operation, tensors: str, engine: Communicator) -> None:
    """What is small, what fits a chunk, what takes many."""
    wrong = right(engine, operation, TENSORS[tensors], (6, 600, 20_000))
    agree(not wrong, wrong)


LISTS = {
    "all_gather": lambda engine, cpu, gpu: engine.all_gather([gpu.clone() for _ in range(engine.size)], cpu),
    "all_gather_single": lambda engine, cpu, gpu: engine.all_gather_single(gpu.repeat(engine.size), cpu),
    "reduce_scatter": lambda engine, cpu, gpu: engine.reduce_scatter(gpu, [cpu] * engine.size),
    "reduce_scatter_single": lambda engine, cpu, gpu: engine.reduce_scatter_single(gpu, cpu.repeat(engine.size)),
    "all_to_all": lambda engine, cpu, gpu: engine.all_to_all([gpu] * engine.size, [cpu] * engine.size),
}


@pytest.mark.parametrize("operation", LISTS)
def test_one_operation_on_two_kinds_of_device(operation: str, engine: Communicator) -> None:
    """As with torch's own backends: an operation's tensors are all on the CPU, or all on GPUs."""
    with pytest.raises(ValueError, match=rf"{operation}: one tensor is on .* must all be on the same kind of device"):
        LISTS[operation](engine, values(0, 12), on_gpu(0, 12))
    agree(True)


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("count", [6, 20_000])
def test_ranks_on_two_kinds_of_device(count: int, engine: Communicator) -> None:
    """Rank 0 has its tensors on the CPU, rank 1 on a GPU. They use different communicators, so that neither gets bytes."""
    rank, kinds = engine.rank, (values, on_gpu)
    came, untouched, works = False, True, []
    if rank < 2:
        x = kinds[rank](3, count)
        kept = plain(x).clone()
        works = [engine.irecv(x, 1 - rank), engine.isend(kinds[rank](7, count), 1 - rank)]
        came = any(works[0].is_completed() for _ in range(200))
        untouched = torch.equal(plain(x), kept)
    engine.barrier()
    if rank < 2:  # so that all of it ends
        other = kinds[1 - rank]
        works += [engine.irecv(other(3, count), 1 - rank), engine.isend(other(7, count), 1 - rank)]
        for work in works:
            work.wait()
    agree(not came and untouched, (came, untouched))


REDUCTIONS = [
    (torch.float32, "SUM"), (torch.bfloat16, "SUM"), (torch.float16, "AVG"), (torch.int64, "MAX"), (torch.uint8, "BOR"),
    (torch.float64, "PRODUCT"), (torch.complex64, "SUM"), (torch.bool, "SUM"), (torch.float32, "MIN"), (torch.uint16, "MIN"),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "op"), REDUCTIONS, ids=str)
def test_reductions_are_those_of_the_cpu(dtype: torch.dtype, op: str, engine: Communicator) -> None:
    wrong = []
    for n in (6, 5000):
        given = values(engine.rank, n, dtype) % 2 if op == "PRODUCT" else values(engine.rank, n, dtype)
        expected = given.clone()
        cpu = groups.of(None)
        assert cpu is not None
        cpu.all_reduce(expected, getattr(ReduceOp, op))
        x = given.clone().as_subclass(OnGpu)
        engine.all_reduce(x, getattr(ReduceOp, op))
        if not torch.equal(plain(x), expected):
            wrong.append((n, x, expected))
    agree(not wrong, wrong)


@pytest.mark.min_ranks(2)
def test_each_way_is_taken(way: str, engine: Communicator, gpu: Gpu) -> None:
    """And no other: nothing goes through pinned memory where MPI, or the other rank, takes it as it is."""
    engine.all_reduce(on_gpu(engine.rank, 600))  # a window is made
    counts = dict(gpu.counts)
    engine.all_reduce(on_gpu(engine.rank, 20_000))
    engine.broadcast(on_gpu(engine.rank, 20_000), 0)
    used = {name: gpu.counts[name] - counts[name] for name in counts}
    sent = 40 if engine.rank == 0 else 20  # chunks, of both operations on the root
    staged = way == "staged" or engine.channel.serialized
    agree(used["fetch"] == sent if staged else not used["fetch"] and used["wait_for_internal"], used)


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("lacking", ["can_share", "can_open"])
def test_memory_that_cannot_be_shared(lacking: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    """On one rank, for one that the other side sees: everybody goes the staged way."""
    engine = group_that_goes("ipc", monkeypatch)
    setattr(gpu, lacking, rank != 1)
    wrong = [w for operation in (all_reduce, broadcast, ring, shorter) for w in right(engine, operation, on_gpu, (600, 20_000))]
    agree(not wrong and gpu.counts["fetch"], wrong)
    engine.barrier()
    engine.close()


@pytest.mark.parametrize("kind", [Tensor, OnGpu], ids=["on the CPU", "on a GPU"])
@pytest.mark.parametrize("operation", [all_reduce, broadcast, gather, ring, all_gather], ids=lambda operation: operation.__name__)
def test_one_element_of_any_strides(operation: Operation, kind: type[Tensor], engine: Communicator) -> None:
    """Which is contiguous, whatever its strides say."""
    wrong = []
    for shape, strides in (((1,), (0,)), ((1, 1), (7, 0)), ((), ())):

        def make(rank: int, n: int, shape: Any = shape, strides: Any = strides) -> Tensor:
            made = values(rank, n)
            return (made.as_strided(shape, strides) if n == 1 else made).as_subclass(kind)

        wrong += right(engine, operation, make, (1,))
    agree(not wrong, wrong)


@pytest.mark.parametrize("mode", [False, True], ids=["outside", "in inference mode"])
@pytest.mark.parametrize("operation", [it for it in OPERATIONS if it is not all_gather_in_place], ids=lambda it: it.__name__)
def test_inference_tensors_and_leaves(operation: Operation, mode: bool, engine: Communicator) -> None:
    """Every other tensor is of inference mode; the others require a gradient."""
    turns = itertools.count()

    def make(rank: int, n: int) -> Tensor:
        if next(turns) % 2:
            return on_gpu(rank, n).requires_grad_()
        with torch.inference_mode():
            return on_gpu(rank, n)

    wrong = []
    for inside in (mode, not mode):  # what the first one has made serves the second one
        with torch.inference_mode(inside):
            wrong += right(engine, operation, make, (6, 20_000))
    agree(not wrong, wrong)


def test_what_is_launched_before_is_sent(engine: Communicator, gpu: Gpu) -> None:
    """A kernel that is still to run when the operation is called: it must have run before a byte is read."""
    x = on_gpu(engine.rank, 600)
    gpu.later(lambda: plain(x).fill_(engine.rank + 1.0))
    work = engine.all_reduce(x, async_op=True)
    assert work is not None
    work.wait()
    agree(plain(x).eq(engine.size * (engine.size + 1) / 2).all(), x)


@pytest.mark.parametrize("call", ["all_reduce", "isend", "broadcast"])
def test_capture_into_a_graph_is_refused(call: str, engine: Communicator, gpu: Gpu) -> None:
    gpu.captured = True
    arguments = {"all_reduce": (), "isend": (0,), "broadcast": (0,)}[call]
    with pytest.raises(RuntimeError, match=r"is being captured into a CUDA graph; MPI cannot be captured"):
        getattr(engine, call)(on_gpu(engine.rank, 12), *arguments)
    gpu.captured = False
    agree(True)


@pytest.mark.min_ranks(2)
def test_slots_are_opened_once(gpu: Gpu, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """However many operations there are; and let go of with the group."""
    engine = group_that_goes("ipc", monkeypatch)
    for _ in range(3):
        wrong = right(engine, all_reduce, on_gpu, (600, 20_000)) + right(engine, ring, on_gpu, (20_000,))
    opened = gpu.counts["opened"]
    engine.barrier()
    engine.close()
    agree(
        not wrong and opened == (0 if engine.channel.serialized else size - 1) + 1 and engine.devices._shared.window is None,
        opened,
    )


def test_a_gpus_tensors_are_ours_where_the_group_says_so() -> None:
    """Both APIs then take them the same way, and layouts that torch refuses are not refused. Only a torch with CUDA has them."""
    mixed = torch.distributed.new_group(backend="cpu:mpi,cuda:gloo")
    ours = [groups._carries(group, torch.device(kind)) for group in (None, mixed) for kind in ("cuda", "meta", "xpu")]
    torch.distributed.destroy_process_group(mixed)
    agree(ours == [torch.backends.cuda.is_built(), True, False, False, True, False], ours)

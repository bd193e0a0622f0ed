"""Window and empty_shared: puts, gets, accumulates and signals, in mapped memory and over MPI, and torch's own door."""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor

import mpicoll as dist
from mpicoll._api import groups
from mpicoll._engine.poller import poller
from mpicoll._faults.late_ranks import Looks
from mpicoll._mpi import remote_memory
from tests.support import agree, everyone, raised_by

pytestmark = pytest.mark.usefixtures("world")
COUNT = 1000
both = pytest.mark.parametrize("async_op", [False, True], ids=["sync", "async"])


def open_by_torch(tensor: Tensor | None = None, group: Any = None) -> dist.Window:
    assert torch.distributed._supports_window(group)  # type: ignore[attr-defined]
    return torch.distributed._new_window(tensor, group)  # type: ignore[attr-defined, no-any-return]


needs_door = pytest.mark.skipif(not hasattr(torch.distributed, "_new_window"), reason="needs torch >= 2.14")
DOORS = [pytest.param(dist.Window, id="mpicoll"), pytest.param(open_by_torch, id="torch", marks=needs_door)]


def zeros(shared: bool, count: int = COUNT, dtype: torch.dtype = torch.float32, group: Any = None) -> Tensor:
    return dist.empty_shared(count, dtype=dtype, group=group).zero_() if shared else torch.zeros(count, dtype=dtype)


@pytest.fixture(params=[False, True], ids=["by MPI", "mapped"])
def shared(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def window(shared: bool) -> Iterator[dist.Window]:
    """Of COUNT zeros on each rank."""
    with dist.Window(zeros(shared)) as made:
        yield made


@both
@pytest.mark.parametrize("door", DOORS)
def test_put_and_signal(door: Callable[..., dist.Window], async_op: bool, shared: bool, rank: int, size: int) -> None:
    """Around a ring: the signal comes behind the put. Nothing else is written."""
    window = door(zeros(shared))
    after, before, wrong = (rank + 1) % size, (rank - 1) % size, []
    for turn in range(20):
        sent = torch.full((10,), rank + turn / 100)
        works = [
            window.put(sent, after, 5 + turn, async_op),
            window.signal(after, async_op),
            window.wait_signal(before, async_op),
        ]
        if not async_op and not all(work.is_completed() for work in works):
            wrong.append(f"{works}")
        for work in works:
            work.wait()
        expected = torch.zeros(COUNT)
        expected[5 + turn : 15 + turn] = before + turn / 100
        expected[5 : 5 + turn] = torch.tensor([before + done / 100 for done in range(turn)])
        if not torch.equal(window.tensor, expected):
            wrong.append(f"turn {turn}: {window.tensor[:40]}")
        window.signal(before)  # it may write again
        window.wait_signal(after)
    window.tensor_deregister()
    agree(not wrong, wrong)


@both
def test_get(async_op: bool, window: dist.Window, rank: int, size: int) -> None:
    window.tensor.copy_(torch.arange(COUNT) + rank)
    window.fence()
    result, version = torch.zeros(7), 0
    work = window.get(result, (rank + 1) % size, 3, async_op)
    version = result._version
    work.wait()
    agree(torch.equal(result, torch.arange(3, 10) + float((rank + 1) % size)) and version > 0, result)


@both
@pytest.mark.parametrize(
    ("op", "dtype", "result"),
    [
        (dist.ReduceOp.SUM, torch.float32, lambda size: size * (size + 1) / 2),
        (dist.ReduceOp.MAX, torch.int64, lambda size: size),
        (dist.ReduceOp.BOR, torch.uint8, lambda size: (1 << size.bit_length()) - 1),
    ],
)
def test_accumulate(op: Any, dtype: torch.dtype, result: Any, async_op: bool, shared: bool, rank: int, size: int) -> None:
    """All ranks into the same elements of the last one."""
    with dist.Window(zeros(shared, dtype=dtype)) as window:
        works = [window.accumulate(torch.full((100,), rank + 1, dtype=dtype), size - 1, 50, op, async_op) for _ in range(1)]
        window.fence()
        for work in works:
            work.wait()
        expected = torch.zeros(COUNT, dtype=dtype)
        if rank == size - 1:
            expected[50:150] = result(size)
        agree(torch.equal(window.tensor, expected), window.tensor[45:60])
        window.fence()
        with pytest.raises(dist.UnsupportedReduction, match=r"accumulate: AVG on .*: MPI does not reduce it as it is"):
            window.accumulate(torch.ones(1, dtype=dtype), rank, 0, dist.ReduceOp.AVG)


WRONG: dict[str, tuple[Callable[[dist.Window, int, int], Any], type[Exception], str]] = {
    "rank": (lambda w, r, n: w.put(torch.ones(1), n), ValueError, r"put: the peer is rank \d, the group has ranks 0 to \d"),
    "negative rank": (lambda w, r, n: w.signal(-1), ValueError, "signal: the peer is rank -1"),
    "rank of a wait": (lambda w, r, n: w.wait_signal(n), ValueError, "wait_signal: the peer is rank"),
    "end": (
        lambda w, r, n: w.put(torch.ones(10), r, COUNT - 9),
        ValueError,
        "put: 10 elements at offset 991 do not fit",
    ),
    "start": (lambda w, r, n: w.get(torch.ones(1), r, -1), ValueError, "get: 1 elements at offset -1 do not fit"),
    "end, accumulate": (lambda w, r, n: w.accumulate(torch.ones(2), r, 999), ValueError, "accumulate: 2 elements at offset 999"),
    "dtype": (
        lambda w, r, n: w.put(torch.ones(1).double(), r),
        TypeError,
        "put: the tensor is torch.float64, that of rank",
    ),
    "strides": (lambda w, r, n: w.put(torch.ones(4, 4).t(), r), ValueError, r"put: the tensor is not contiguous: .* \(1, 4\)"),
    "offset": (lambda w, r, n: w.put(torch.ones(1), r, 0.5), TypeError, "put: the offset must be an int"),  # type: ignore[arg-type]
    "device": (lambda w, r, n: w.put(torch.ones(1, device="meta"), r), ValueError, "put: tensor is on device meta"),
    "list": (lambda w, r, n: w.put([1.0], r), TypeError, "put: tensor must be a torch.Tensor"),  # type: ignore[arg-type]
    "twice": (lambda w, r, n: w.tensor_register(torch.ones(1)), ValueError, "tensor_register: the window has a tensor"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_write_nothing(case: str, window: dist.Window, rank: int, size: int) -> None:
    call, kind, text = WRONG[case]
    with pytest.raises(kind, match=text):
        call(window, (rank + 1) % size, size)
    window.fence()
    agree(torch.equal(window.tensor, torch.zeros(COUNT)), "something was written")
    window.put(torch.ones(1), rank)
    agree(window.tensor[0].item() == 1.0)


def test_use_before_registration_and_after_it(rank: int) -> None:
    window = dist.Window()
    calls: list[Callable[[], object]] = [
        lambda: window.put(torch.ones(1), rank), lambda: window.get(torch.ones(1), rank), lambda: window.signal(rank),
        lambda: window.wait_signal(rank), window.fence, window.tensor_deregister, lambda: window.get_attr(rank),
        lambda: window.map_remote_tensor(rank), lambda: window.accumulate(torch.ones(1), rank), lambda: window.tensor,
    ]  # fmt: skip
    errors = [raised_by(call) for call in calls]
    window.tensor_register(torch.ones(3))
    state = repr(window)
    window.tensor_deregister()
    errors += [raised_by(call) for call in calls]
    agree(all(isinstance(error, ValueError) and "no tensor is registered" in str(error) for error in errors), errors)
    agree("3 elements" in state and "no tensor" in repr(window), state)


def test_registration_is_refused(rank: int) -> None:
    for wrong, text in ((torch.ones(4, 4).t(), "not contiguous"), (torch.ones(1, device="meta"), "on device meta")):
        with pytest.raises(ValueError, match=f"tensor_register: .*{text}"):
            dist.Window(wrong)
    dist.barrier()
    with pytest.raises(ValueError, match=r"Window: this rank is not in the group"):
        dist.Window(group=dist.GroupMember.NON_GROUP_MEMBER)
    gloo = dist.new_group(backend="gloo")
    with pytest.raises(ValueError, match=r"empty_shared: the group's backend is 'gloo'; empty_shared needs 'mpi'"):
        dist.empty_shared(1, group=gloo)
    everyone(None)
    dist.destroy_process_group(gloo)


def test_ranks_register_tensors_of_their_own_kind(shared: bool, rank: int, size: int) -> None:
    """Rank r has 10 * r elements, of int64 where r is odd; rank 0 has none."""
    own = zeros(shared, 10 * rank, torch.int64 if rank % 2 else torch.float32)
    with dist.Window(own) as window:
        after = (rank + 1) % size
        if after:
            window.put(torch.ones(10 * after, dtype=torch.int64 if after % 2 else torch.float32), after)
        window.put(torch.empty(0), 0)
        window.fence()
        agree(bool((own == 1).all()), own)


@pytest.mark.one_node
def test_map_remote_tensor(rank: int, size: int) -> None:
    tensor = dist.empty_shared(2, 3, dtype=torch.int32)
    with dist.Window(tensor) as window:
        tensor.fill_(rank)
        window.fence()
        views = [window.map_remote_tensor(other) for other in range(size)]
        agree(all(torch.equal(view, torch.full((6,), other, dtype=torch.int32)) for other, view in enumerate(views)), views)
        window.fence()
        views[(rank + 1) % size][4] = 77  # no copy
        window.fence()
        agree(tensor[1, 1].item() == 77 and tensor[0, 0].item() == rank, tensor)
    agree(views[rank - 1].sum().item() == 5 * ((rank - 1) % size) + 77, "a view outlives the window")


@pytest.mark.min_ranks(2)
def test_memory_that_is_not_mapped(rank: int, size: int) -> None:
    with dist.Window(torch.zeros(3)) as window:
        own = window.map_remote_tensor(rank)
        with pytest.raises(ValueError, match=r"map_remote_tensor: rank \d: its tensor is not from empty_shared"):
            window.map_remote_tensor((rank + 1) % size)
        agree(own.data_ptr() == window.tensor.data_ptr())


@pytest.mark.min_ranks(2)
@pytest.mark.one_node
def test_copies_in_mapped_memory_need_no_mpi(rank: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with dist.Window(dist.empty_shared(4).zero_()) as window:
        window.fence()
        monkeypatch.setattr(remote_memory.RemoteMemory, "move", None)
        window.put(torch.full((1,), rank + 1.0), (rank + 1) % size)
        monkeypatch.undo()
        window.fence()
        agree(window.tensor[0].item() == (rank - 1) % size + 1, window.tensor)


def test_part_of_shared_memory(rank: int, size: int) -> None:
    """A tensor that begins in the middle; the memory lives as long as someone uses it."""
    others = len(remote_memory._shared)
    part = dist.empty_shared(100).zero_()[40:]
    with dist.Window(part) as window:
        window.put(torch.ones(60), (rank + 1) % size)
        window.fence()
    agree(bool((part == 1).all()), part)
    del part, window
    everyone(None)
    agree(len(remote_memory._shared) == others)


def test_sizes_and_dtypes_of_empty_shared() -> None:
    made = [
        dist.empty_shared(2, 3),
        dist.empty_shared((4,), dtype=torch.bfloat16),
        dist.empty_shared(0, 5),
        dist.empty_shared([]),
    ]
    shapes = [(tuple(each.shape), each.dtype) for each in made]
    agree(shapes == [((2, 3), torch.float32), ((4,), torch.bfloat16), ((0, 5), torch.float32), ((), torch.float32)], shapes)


def test_a_signal_belongs_to_its_window_and_group(rank: int, size: int) -> None:
    group = dist.new_group()
    windows = [dist.Window(torch.zeros(3)), dist.Window(torch.zeros(3)), dist.Window(torch.zeros(3), group)]
    after, before = (rank + 1) % size, (rank - 1) % size
    waits = [window.wait_signal(before, async_op=True) for window in windows]
    early = []
    for number in (2, 0, 1):
        everyone(None)
        windows[number].put(torch.full((3,), float(number)), after)
        windows[number].signal(after).wait()
        waits[number].wait()
        early.append(windows[number].tensor[2].item())
    message = torch.zeros(1)
    receive = dist.irecv(message, before)
    dist.isend(torch.ones(1), after).wait()
    receive.wait()
    for window in reversed(windows):
        window.close()
        window.close()
    agree(early == [2.0, 0.0, 1.0] and message.item() == 1, early)
    dist.destroy_process_group(group)


def test_signals_add_up(rank: int, size: int) -> None:
    with dist.Window(torch.zeros(1)) as window:
        for _ in range(5):
            window.signal((rank + 1) % size, async_op=True)
        for _ in range(5):
            window.wait_signal((rank - 1) % size)
        more = window.wait_signal((rank - 1) % size, async_op=True)
        everyone(None)
        pending = not more.is_completed()
        everyone(None)
        window.signal((rank + 1) % size)
        more.wait()
        agree(pending, "a sixth signal")


@pytest.mark.min_ranks(2)
def test_the_poller_moves_puts_until_the_last_window_has_gone() -> None:
    """It went on until the group was closed, at 4 % of a core, and each small message rang it."""
    channel = groups.of(None).channel
    with dist.Window(torch.zeros(1)):
        with dist.Window(torch.zeros(1)):
            pass
        served = channel in poller._served
    agree(served and channel not in poller._served)


@pytest.mark.parametrize("looks", [False, True])
def test_two_threads_wait_for_signals(looks: bool, rank: int, size: int) -> None:
    """A signal ends one wait, in whichever thread. ``looks``: each wait looks for its signal before it calls MPI's receive."""
    group = dist.new_group()
    communicator = groups.of(group)
    assert communicator is not None
    if looks:
        communicator.receives = Looks(0)
    with dist.Window(torch.zeros(1), group) as window, ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(lambda: [window.wait_signal((rank - 1) % size) for _ in range(50)]) for _ in range(2)]
        for _ in range(100):
            window.signal((rank + 1) % size)
        counts = [len(each.result(60)) for each in waits]
    agree(counts == [50, 50], counts)
    dist.destroy_process_group(group)


@pytest.mark.min_ranks(2)
def test_a_put_needs_no_help_of_its_target(rank: int) -> None:
    """Rank 0 makes no call until what rank 1 has put is there."""
    with dist.Window(torch.zeros(100_000)) as window:
        window.fence()
        if rank == 1:
            window.put(torch.ones(100_000), 0)
        deadline = time.monotonic() + 30
        while rank == 0 and window.tensor[-1].item() == 0 and time.monotonic() < deadline:
            time.sleep(1e-3)
        agree(rank != 0 or window.tensor[-1].item() == 1)


def test_what_is_registered_ends_with_its_group(rank: int, size: int) -> None:
    group = dist.new_group()
    window = dist.Window(torch.zeros(3), group)
    dist.destroy_process_group(group)
    error = raised_by(lambda: window.put(torch.ones(1), (rank + 1) % size))
    agree(isinstance(error, dist.GroupDestroyed), error)


def test_the_memory_model(window: dist.Window) -> None:
    agree(window.get_attr(0).access_type.name == "UNIFIED")
    with pytest.raises(ValueError, match="get_attr: the peer is rank"):
        window.get_attr(99)


@pytest.mark.parametrize("shape", [(1 << 28) + 1])
@pytest.mark.slow
def test_more_than_a_gib(shape: int, rank: int, size: int) -> None:
    """In pieces, each of which MPI takes. Only the first rank has so much memory."""
    with dist.Window(torch.zeros(shape if rank == 0 else 1)) as window:
        if rank == size - 1:
            window.put(torch.arange(shape, dtype=torch.float32), 0)
        window.fence()
        agree(rank != 0 or torch.equal(window.tensor, torch.arange(shape, dtype=torch.float32)))


@needs_door
def test_torchs_options_and_other_backends(rank: int, size: int) -> None:
    from torch._C import _distributed_c10d as c10d

    window = open_by_torch(torch.zeros(3))
    assert isinstance(window, dist.Window)
    agree(window.get_attr(0).access_type == c10d.WindowAccessType.UNIFIED)  # type: ignore[attr-defined]
    window.put(torch.ones(1), rank, 0, False, c10d.PutOptions()).wait()  # type: ignore[attr-defined]
    window.signal(rank, True, c10d.SignalOptions())  # type: ignore[attr-defined]
    window.wait_signal(rank, False, c10d.WaitSignalOptions())  # type: ignore[attr-defined]
    window.close()
    by_other_name = dist.new_group(backend="mpicoll")
    with open_by_torch(torch.zeros(3), by_other_name) as window:
        agree(isinstance(window, dist.Window))
    gloo = dist.new_group(backend="gloo")
    agree(not torch.distributed._supports_window(gloo))  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="gloo does not support new_window"):
        torch.distributed._new_window(None, gloo)  # type: ignore[attr-defined]
    everyone(None)
    dist.destroy_process_group(gloo)

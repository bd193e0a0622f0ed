"""Messages between two ranks, which have their tensors on GPUs: order, waiting, slots (traps 63, 64)."""

from functools import partial
from random import Random

import pytest
import torch
from torch import Tensor

from mpicoll._engine.communicator import Communicator
from mpicoll.errors import TruncationError
from tests.gpu.fake_gpu import Gpu, OnGpu, OnGpu1, plain
from tests.gpu.ways import engine, gpu, on_gpu, values, way
from tests.support import agree

pytestmark = pytest.mark.usefixtures("world")


def around(engine: Communicator, n: int) -> list[object]:
    """A message to the next rank; what is wrong with the one that comes."""
    source, x = (engine.rank - 1) % engine.size, on_gpu(9, n)
    request = engine.irecv(x, source)
    engine.send(on_gpu(engine.rank, n), (engine.rank + 1) % engine.size)
    request.wait()
    return [] if torch.equal(plain(x), values(source, n)) else [x]


@pytest.mark.min_ranks(2)
def test_a_message_of_each_way(way: str, engine: Communicator, gpu: Gpu) -> None:
    around(engine, 20_000)
    counts = dict(gpu.counts)
    around(engine, 20_000)
    used = {name: gpu.counts[name] - counts[name] for name in counts}
    expected = {"staged": (10, 10, 0), "ipc": (0, 20, 0), "direct": (0, 0, 0)}[way]
    agree((used["fetch"], used["push"], used["opened"]) == expected, used)


@pytest.mark.parametrize("n", [6, 600, 20_000])
def test_messages_wait_for_what_was_launched(n: int, engine: Communicator, gpu: Gpu) -> None:
    """A kernel that writes what is sent, and one that reads what a receive will overwrite; neither call waits for them."""
    rank, size, seen = engine.rank, engine.size, list[Tensor]()
    x, y = on_gpu(9, n), on_gpu(rank, n)
    gpu.later(lambda: seen.append(plain(x).clone()))
    gpu.later(lambda: plain(y).fill_(rank + 50.0))
    receive = engine.irecv(x, (rank - 1) % size)
    send = engine.isend(y, (rank + 1) % size)
    late = engine.isend(values(rank, 2), (rank + 1) % size)  # behind it, though it is there at once
    z = values(9, 2)
    second = engine.irecv(z, (rank - 1) % size)
    for work in (receive, send, late, second):
        work.wait()
    came = torch.equal(plain(x), torch.full((n,), (rank - 1) % size + 50.0)) and torch.equal(z, values((rank - 1) % size, 2))
    agree(came and len(seen) == 1 and torch.equal(seen[0], values(9, n)), (x, z, seen))


@pytest.mark.min_ranks(2)
def test_what_nobody_receives_yet_holds_up_nothing(engine: Communicator) -> None:
    """More large messages than there are slots, and then one that is received."""
    rank, size = engine.rank, engine.size
    to, source = (rank + 1) % size, (rank - 1) % size
    early = [engine.isend(on_gpu(rank + turn, 20_000), to, turn) for turn in range(6)]
    x = on_gpu(9, 20_000)
    receive = engine.irecv(x, source, 99)
    engine.send(on_gpu(rank + 99, 20_000), to, 99)
    receive.wait()
    wrong = [] if torch.equal(plain(x), values(source + 99, 20_000)) else [x]
    engine.barrier()
    for turn in (3, 1, 5, 0, 4, 2):
        engine.recv(x, source, turn)
        wrong += [] if torch.equal(plain(x), values(source + turn, 20_000)) else [(turn, x)]
    for work in early:
        work.wait()
    agree(not wrong, wrong)


@pytest.mark.parametrize("seed", range(8))
def test_any_messages_at_a_time(seed: int, engine: Communicator, gpu: Gpu) -> None:
    """Of all sizes, between all ranks, on the CPU or on any GPU at either end, posted in any order that MPI's rule allows."""
    random, rank, size = Random(seed), engine.rank, engine.size
    messages = [
        (random.randrange(size), random.randrange(size), random.choice((0, 3, 600, 1100, 20_000)), random.randrange(2))
        for _ in range(30)
    ]
    # A message is between two tensors on the CPU, or between two on GPUs.
    kinds = [tuple(random.choices(random.choice(((Tensor,), (OnGpu, OnGpu1))), k=2)) for _ in messages]
    sends = [number for number, (src, *_) in enumerate(messages) if src == rank]
    receives = [number for number, (_, dst, *_) in enumerate(messages) if dst == rank]
    came: dict[int, Tensor] = {}
    works = []
    while sends or receives:
        if sends and (not receives or random.random() < 0.5):
            number = sends.pop(0)
            _, dst, n, tag = messages[number]
            x = values(number, n).as_subclass(kinds[number][0])
            if random.random() < 0.3 and isinstance(x, OnGpu):
                late, x = x, values(0, n).as_subclass(kinds[number][0])
                gpu.later(partial(plain(x).copy_, plain(late)))
            works.append(engine.isend(x, dst, tag))
        else:
            number = receives.pop(0)
            src, _, n, tag = messages[number]
            came[number] = torch.full((n + 5,), -1.0).as_subclass(kinds[number][1])
            works.append(engine.irecv(came[number], src, tag))
    random.shuffle(works)
    for work in works:
        work.wait()
    expected = {number: torch.cat([values(number, x.numel() - 5), torch.full((5,), -1.0)]) for number, x in came.items()}
    wrong = [(messages[number], x, expected[number]) for number, x in came.items() if not torch.equal(plain(x), expected[number])]
    agree(not wrong, wrong)


def test_a_message_that_is_too_long(engine: Communicator) -> None:
    """Is taken, so that its sender ends; what follows is right."""
    rank, size = engine.rank, engine.size
    wrong = []
    for long, short in ((600, 4), (20_000, 600), (20_000, 4)):
        request = engine.irecv(on_gpu(9, short), (rank - 1) % size)
        sent = engine.isend(on_gpu(rank, long), (rank + 1) % size)
        with pytest.raises(TruncationError, match="longer than the tensor"):
            request.wait()
        sent.wait()
        wrong += around(engine, 600)
    agree(not wrong, wrong)


@pytest.mark.min_ranks(2)
def test_a_callback_that_sends(engine: Communicator) -> None:
    """A callback may wait for messages, in whatever thread it runs, while that thread waits for another one."""
    rank, size = engine.rank, engine.size
    to, source = (rank + 1) % size, (rank - 1) % size
    x, y, z = values(9, 2000), on_gpu(9, 20_000), on_gpu(9, 2000)  # a GPU's Future wants a torch with CUDA
    early = engine.isend(on_gpu(rank + 2, 2000), to, 3)
    received = engine.irecv(x, source, 1).get_future().then(lambda _: engine.recv(z, source, 3))
    answer = engine.irecv(y, source, 2)
    engine.isend(values(rank, 2000), to, 1).wait()
    engine.send(on_gpu(rank + 1, 20_000), to, 2)
    answer.wait()
    early.wait()
    received.wait()
    came = [torch.equal(plain(t), values(source + more, t.numel())) for more, t in enumerate((x, y, z))]
    agree(all(came), came)


def test_a_default_device(engine: Communicator) -> None:
    """torch.set_default_device is for the program's tensors; what MPI is handed here is the CPU's."""
    with torch.device("meta"):
        wrong = [w for n in (6, 2000, 20_000) for w in around(engine, n)]
        x = values(engine.rank, 20_000)
        engine.all_reduce(on_gpu(engine.rank, 20_000))
    agree(not wrong, (wrong, x.device))

"""Tests for several ranks on several pretended nodes (_MPICOLL_NODE_SIZE); tests/host/test_hierarchical.py starts them.

Groups are made afresh, so that each test sees the first use; values are whole numbers, exact in any order of summation.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor
from torch.distributed import ReduceOp

from mpicoll._algorithms import direct, hierarchical
from mpicoll._base.cpus import longer
from mpicoll._engine.communicator import Communicator
from mpicoll._engine.registry import registry
from mpicoll._host.collectives import MET_FROM
from mpicoll._mpi import shared_segment
from tests.faults.test_late_ranks import sleeps
from tests.support import agree, everyone
from tests.support.tensors import raw, reduced

pytestmark = pytest.mark.usefixtures("world")
made_of: Counter[Sequence[int]] = Counter()  # groups, by their members: equal on these
Make = Callable[..., Communicator]
LONG = 1 << 18  # elements
LIMIT_S = 90.0  # for one operation: beside two other jobs whose ranks poll on the same two cores, one took 62 s


@pytest.fixture
def make(size: int) -> Iterator[Make]:
    """Makes a group of some ranks in any order (all: None); only its members call."""
    made = []

    def function(ranks: Sequence[int] | None = None) -> Communicator:
        members = tuple(range(size)) if ranks is None else ranks
        made_of[tuple(members)] += 1
        made.append(registry.create(f"nodes {made_of[tuple(members)]} of {members}", members, longer(LIMIT_S)))
        return made[-1]

    yield function
    for communicator in made:
        communicator.close()


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often which algorithm was taken. One that another one uses does not count."""
    counts: Counter[str] = Counter()
    under_way: list[str] = []

    def counted(module: str, name: str, function: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: object, **options: object) -> None:
            if not under_way:
                counts[f"{module}.{name}"] += 1
            under_way.append(name)
            function(*arguments, **options)
            under_way.pop()

        return call

    for module in (hierarchical, direct):
        word = module.__name__.rpartition(".")[2]
        for name in ("all_reduce", "reduce_scatter", "all_gather", "broadcast"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, counted(word, name, getattr(module, name)))
    return counts


def numbers(rank: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return ((torch.arange(count) * 7 + rank * 5) % 11 - 3).to(dtype)


def nodes_of(group: Communicator) -> list[int]:
    """How many ranks each node has."""
    return list(Counter(group.host.windows._topology.nodes).values())


def even(group: Communicator) -> bool:
    return len(set(nodes_of(group))) == 1


def total(group: Communicator, count: int, dtype: torch.dtype = torch.float32, op: str = "SUM") -> Tensor:
    return reduced(op, [numbers(r, count, dtype) for r in range(group.size)])


def digests_agree(*tensors: Tensor) -> bool:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(raw(tensor))
    return len(set(everyone(digest.hexdigest()))) == 1


def test_the_ways(make: Make, taken: Counter[str]) -> None:
    """Each operation is taken where it should be, and nowhere else."""
    group = make()
    tensor = numbers(group.rank, LONG)
    group.all_reduce(tensor)
    right = torch.equal(tensor, total(group, LONG))
    group.broadcast(tensor, 0)
    group.reduce(tensor.clone(), 1)
    blocks = numbers(group.rank, LONG * group.size)
    group.reduce_scatter_single(torch.empty(LONG), blocks)
    group.all_gather_single(torch.empty(LONG * group.size), tensor)
    halves = numbers(group.rank, LONG, torch.bfloat16)
    group.all_reduce(halves)
    group.reduce_scatter_single(torch.empty(LONG // group.size, dtype=torch.bfloat16), halves[: LONG // group.size * group.size])
    group.all_reduce(torch.ones(2))
    several = max(nodes_of(group)) > 1
    broadcasts = int(tensor.nbytes >= group.host.thresholds.least["broadcast"])  # of one rank each: from larger sizes on
    everything = {"all_reduce": 3, "broadcast": broadcasts, "reduce_scatter": 2 * even(group), "all_gather": int(even(group))}
    way = "hierarchical" if several else "direct"
    expected = Counter({f"{way}.{name}": n for name, n in everything.items()})
    if not even(group):
        expected["direct.reduce_scatter"] += 1
    if group.host.thresholds.least["all_reduce"] <= 8:  # MPICOLL_WINDOW_FROM
        expected[f"{way}.all_reduce"] += 1
    agree(len(nodes_of(group)) > 1 and right and +taken == +expected, f"{taken} is not {expected}")


@pytest.mark.parametrize("operation", ["all_reduce", "broadcast", "all_gather_single", "reduce_scatter_single", "reduce"])
def test_a_rank_that_waits_for_another_node_sleeps(operation: str, make: Make) -> None:
    group = make()
    tensor, large = torch.ones(MET_FROM // 4), torch.ones(group.size * MET_FROM // 4)
    arguments = {"all_gather_single": [large, tensor], "reduce_scatter_single": [tensor, large], "all_reduce": [tensor]}
    call = getattr(group, operation)
    call(*arguments.get(operation, [tensor, 0]))  # windows are made
    sleeps(lambda: call(*arguments.get(operation, [tensor, 0])), group.rank)


def lengths(chunk: int) -> list[int]:
    """Elements of 4 bytes about the ends of LINEs, slices and chunks."""
    n = chunk // 4
    return [1, 2, 15, 16, 17, 33, n // 2 - 1, n // 2 + 1, n - 1, n, n + 1, 2 * n, 2 * n + 17, 3 * n - 5]


@pytest.mark.parametrize("op", ["SUM", "MAX", "AVG"])
def test_the_ends_of_chunks(op: str, make: Make) -> None:
    """Every length, one after the other through the same window; reductions and what only moves."""
    group = make()
    group.host.windows.make()
    nodes = group.host.windows.nodes
    chunk = direct.CHUNK // 16 if nodes is None else nodes.window.chunk
    wrong, results = [], []
    for count in lengths(chunk):
        tensor = numbers(group.rank, count)
        root = count % group.size
        group.all_reduce(tensor, getattr(ReduceOp, op))
        results.append(tensor)
        if not torch.equal(tensor, total(group, count, op=op)):
            wrong.append(f"all_reduce of {count}")
        tensor = numbers(group.rank, count)
        group.reduce(tensor, root, getattr(ReduceOp, op))
        if not torch.equal(tensor, total(group, count, op=op) if root == group.rank else numbers(group.rank, count)):
            wrong.append(f"reduce of {count}")
        if op != "SUM":
            continue
        tensor = numbers(group.rank, count)
        group.broadcast(tensor, root)
        if not torch.equal(tensor, numbers(root, count)):
            wrong.append(f"broadcast of {count}")
    agree(not wrong, wrong)
    agree(digests_agree(*results), "the ranks have different bits")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_ends_of_blocks(dtype: torch.dtype, make: Make, size: int) -> None:
    """Reduce-scatter and all-gather of every length of block, an input that lies in its output among them."""
    group = make()
    group.host.windows.make()
    nodes = group.host.windows.nodes
    chunk = direct.CHUNK // 16 if nodes is None else nodes.window.chunk
    wrong = []
    for count in lengths(chunk // size // 64 * 64) + lengths(chunk // 2):
        source, output = numbers(group.rank, count * size, dtype), torch.empty(count, dtype=dtype)
        group.reduce_scatter_single(output, source, ReduceOp.SUM)
        if not torch.equal(output, total(group, count * size, dtype).view(size, count)[group.rank]):
            wrong.append(f"reduce_scatter of {count}")
        gathered = torch.zeros(size, count, dtype=dtype)
        mine = gathered[group.rank].copy_(output) if count % 2 else output
        group.all_gather_single(gathered, mine)
        if not torch.equal(gathered, total(group, count * size, dtype).view(size, count)):
            wrong.append(f"all_gather of {count}")
    agree(not wrong, wrong)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_halves_are_rounded_once(dtype: torch.dtype, make: Make, size: int) -> None:
    """Where rounding what a node has, or one rank after the other, gives another answer."""
    group = make()
    big = 256.0 if dtype == torch.bfloat16 else 2048.0  # from here on, two numbers are 2 apart
    generator = torch.Generator().manual_seed(group.rank)
    given = torch.randint(-200, 200, (LONG + 3,), generator=generator).float()
    given[: LONG // 2] = big if group.rank == 0 else 1.0
    mine = given.to(dtype)
    parts = [torch.frombuffer(bytearray(part), dtype=dtype) for part in everyone(raw(mine))]
    exact = torch.stack([part.float() for part in parts]).sum(0)
    one_by_one = parts[0].clone()
    for part in parts[1:]:
        one_by_one += part
    told = size < 3 or not torch.equal(one_by_one, exact.to(dtype))
    summed, averaged, scattered = mine.clone(), mine.clone(), torch.empty(LONG // size, dtype=dtype)
    group.all_reduce(summed)
    group.all_reduce(averaged, ReduceOp.AVG)
    group.reduce_scatter_single(scattered, mine[: LONG // size * size].contiguous())
    right = torch.equal(summed, exact.to(dtype)) and torch.equal(averaged, (exact / size).to(dtype))
    block = exact[: LONG // size * size].view(size, -1)[group.rank]
    agree(told and right and torch.equal(scattered, block.to(dtype)), (summed[:3], exact[:3]))
    agree(digests_agree(summed, averaged))


@pytest.mark.parametrize("order", [(3, 0, 2), (2, 1, 0, 3), (1, 2)], ids=str)
def test_a_group_across_nodes_in_any_order(order: tuple[int, ...], make: Make, taken: Counter[str], rank: int, size: int) -> None:
    """Uneven nodes, nodes whose ranks are crossed, and one rank of each."""
    if max(order) >= size or rank not in order:
        agree(True)
        return
    group = make(order)
    n = group.size
    tensor, gathered, scattered = numbers(group.rank, LONG), torch.empty(n, LONG), torch.empty(LONG)
    group.all_reduce(tensor)
    right = torch.equal(tensor, total(group, LONG))
    for root in range(n):
        tensor = numbers(group.rank, LONG)
        group.broadcast(tensor, root)
        right &= torch.equal(tensor, numbers(root, LONG))
        tensor = numbers(group.rank, LONG)
        group.reduce(tensor, root)
        right &= group.rank != root or torch.equal(tensor, total(group, LONG))
    group.all_gather_single(gathered, numbers(group.rank, LONG))
    right &= torch.equal(gathered, torch.stack([numbers(r, LONG) for r in range(n)]))
    group.reduce_scatter_single(scattered, numbers(group.rank, LONG * n))
    right &= torch.equal(scattered, total(group, LONG * n).view(n, LONG)[group.rank])
    expected = max(nodes_of(group)) > 1 and len(nodes_of(group)) > 1
    agree(right and bool(taken["hierarchical.all_reduce"]) == expected, (taken, nodes_of(group)))


def test_a_node_without_a_window(make: Make, taken: Counter[str], rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then no node uses its own: MPI carries everything, halves excepted, and the answers are the same. One rank needs none."""

    def refuse(*arguments: object) -> None:
        raise OSError("no memory")

    group = make()
    if group.host.windows._topology.nodes[rank] == 0:
        monkeypatch.setattr(shared_segment, "_mapped", refuse)
    tensor, halves = numbers(rank, LONG), numbers(rank, LONG, torch.bfloat16)
    group.all_reduce(tensor)
    group.all_reduce(halves)
    group.all_gather_single(torch.empty(LONG * group.size), tensor)
    right = torch.equal(tensor, total(group, LONG)) and torch.equal(halves, total(group, LONG, torch.bfloat16))
    several = max(nodes_of(group)) > 1
    expected = {"direct.all_reduce": 1} if several else {"direct.all_reduce": 2, "direct.all_gather": 1}
    agree(right and taken == Counter(expected), taken)


def test_two_groups_used_first_in_opposite_orders(make: Make, rank: int) -> None:
    """What a first use makes, it makes among the group's ranks; other groups do not wait. (With communicators, they did.)"""
    right = []
    for _ in range(10):
        one, two = make(), make()
        first, second = (one, two) if rank % 2 else (two, one)
        a, b = numbers(rank, LONG), numbers(rank, LONG)
        work = first.all_reduce(a, async_op=True)
        second.all_reduce(b)
        assert work is not None
        work.wait()
        right.append(torch.equal(a, total(one, LONG)) and torch.equal(b, a))
    agree(all(right), right)


def test_first_used_in_inference_mode(make: Make) -> None:
    """The memory that is made there is written outside, too."""
    group = make()
    with torch.inference_mode():
        group.all_reduce(numbers(group.rank, LONG))
    tensor = numbers(group.rank, LONG)
    group.all_reduce(tensor)
    agree(torch.equal(tensor, total(group, LONG)))


def test_many_groups_after_each_other(make: Make, size: int) -> None:
    """Each gives back what it has made: MPICH has 2048 communicators, and a window has memory."""
    right = []
    for _ in range(30):
        group = make()
        tensor = numbers(group.rank, LONG)
        group.all_reduce(tensor)
        right.append(torch.equal(tensor, total(group, LONG)))
        group.close()
    agree(all(right))

"""The event loop of benchmarks/model.py, and what it says about mpicoll's algorithms and thresholds. Sizes are in bytes."""

from itertools import product

import pytest
import torch

from benchmarks import model
from benchmarks.model import NETWORKS, Network
from mpicoll._host import algorithm_choice
from mpicoll._host.algorithm_choice import NEVER, WINDOW_FROM, Choices
from tests.host.recorder import Job

pytestmark = pytest.mark.ranks(1)

KIB, MIB = 1 << 10, 1 << 20
ALWAYS = {name: {2: 1} for name in WINDOW_FROM}
OWN = Choices(window_from=ALWAYS, between_from=ALWAYS, apart_from=ALWAYS)  # mpicoll's algorithms from the first byte on
INFINIBAND = NETWORKS["InfiniBand 100 Gbit/s"]

# -- the loop ------------------------------------------------------------------------------------------------------------


def test_a_message_occupies_both_cards() -> None:
    """Two senders to one node: the second message waits for the receiver's card. Nothing else takes time."""
    network = Network(latency=10, overhead=0, per_message=1, per_byte=2)

    def sender(node: int) -> model.Program:
        yield "send", 0, ("from", node), 3, 1, node, 2
        yield "send", 1, ("again", node), 3, 1, node, 2
        yield "sent", 1

    def receiver() -> model.Program:
        yield "await", ("from", 0), 0
        yield "await", ("from", 1), 0

    assert model.run({0: sender(0)}, network, 1) == 2 * (1 + 3 * 2)
    assert model.run({0: sender(0), 1: sender(1), 2: receiver()}, network, 1) == 10 + 2 * (1 + 3 * 2)


def test_a_rank_that_waits_for_nothing_is_found() -> None:
    with pytest.raises(AssertionError, match="never comes"):
        model.run({0: iter([("await", ("from", 1), 0)])}, INFINIBAND, 1)


@pytest.mark.parametrize(
    ("operation", "ranks", "ranks_per_node"),
    [
        *[("all_reduce", *shape) for shape in ((16, 1), (8, 2), (32, 8), (8, 8))],
        *[("all_gather", *shape) for shape in ((16, 1), (8, 2), (8, 8))],
        *[("reduce_scatter", *shape) for shape in ((16, 1), (8, 2), (8, 8))],
        *[("broadcast", *shape) for shape in ((8, 8), (64, 8))],
        *[("reduce", *shape) for shape in ((8, 8), (64, 8))],
    ],
)
def test_one_rank_stands_for_all(operation: str, ranks: int, ranks_per_node: int) -> None:
    """It takes longer where the ranks of a node send one after the other: its card counts as busy for all of them."""
    for nbytes in (64 * KIB, 2 * MIB):
        job = Job(ranks, ranks_per_node, OWN)
        alone, together = (model.played(job, operation, nbytes, every_rank=every)(INFINIBAND) for every in (False, True))
        assert 0.95 <= alone / together <= 1.2


# -- what it says --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nodes", "limit"), [(4, 1.1), (16, 1.35), (48, 1.5)])
def test_a_broadcast_keeps_all_cards_busy(nodes: int, limit: float) -> None:
    """Each rank received the pieces in their order before it sent its own. 48 nodes took 23 times the bandwidth limit."""
    nbytes = 32 * MIB
    assert model.played(Job(nodes, 1), "broadcast", nbytes)(INFINIBAND) <= limit * nbytes * INFINIBAND.per_byte


def test_all_to_all_in_pieces_keeps_all_cards_busy() -> None:
    """A rank that waits for pieces cannot be recorded alone. When all sent to rank 0 first, 16 ranks took 1.8 times as long."""
    nbytes, ranks = 16 * MIB, 16
    seconds = model.played(Job(ranks, 1), "all_to_all", nbytes, every_rank=True)(INFINIBAND)
    assert seconds <= 1.3 * nbytes * (ranks - 1) / ranks * INFINIBAND.per_byte


FLOAT, HALF = torch.float32, torch.bfloat16
OPERATIONS = {  # by the names of the thresholds
    "all_reduce": ("all_reduce", FLOAT),
    "halves": ("all_reduce", HALF),
    "reduce": ("reduce", FLOAT),
    "reduce_scatter": ("reduce_scatter", FLOAT),
    "all_gather": ("all_gather", FLOAT),
    "broadcast": ("broadcast", FLOAT),
}  # fmt: skip
SHAPES = [  # nodes, ranks of each
    *((1, ranks) for ranks in (8, 32, 64, 96)),
    *((nodes, 1) for nodes in (8, 32, 64, 1024)),
    *((nodes, 2) for nodes in (16, 1024)),
    *((nodes, 8) for nodes in (8, 32, 512)),
    *((8, 24), (8, 64), (16, 16), (64, 128), (1024, 4), (1024, 128)),
]


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "all_reduce")) for name in OPERATIONS])
def test_no_choice_is_slower_than_mpi(name: str) -> None:
    """On three networks, by more than 10 %, from the threshold on. Windows of 2 to 7 ranks, and up to 4 nodes, are measured."""
    operation, dtype = OPERATIONS[name]
    slower = {}
    for (nodes, per_node), times in product(SHAPES, (1, 6)):
        job = Job(nodes * per_node, per_node, algorithm_choice.choices())
        known, whole = algorithm_choice.of_group(job.choices, [per_node] * nodes), job.ranks * dtype.itemsize
        nbytes = -(-known.least[name] * times // whole) * whole
        if known.least[name] == NEVER or nbytes > 64 * MIB or (operation in model.ROOTED and per_node == 1 and nodes > 8):
            continue
        worst = max(x for _, x in model.ratios(job, operation, nbytes, dtype).values())
        if worst > 1.1:
            slower[nodes, per_node, nbytes >> 10] = worst
    assert slower == {}

"""Which messages, copies and MPI calls each algorithm makes on 4 to 1,024 ranks: recorder.py runs it without any of them.

These tests need no other rank. Sizes are those of the tensor, or of all blocks together.
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from mpicoll._algorithms.direct import AHEAD, BROADCAST_LEAST, BROADCAST_PIECES, CHUNK, SLICE, broadcast_piece
from mpicoll._algorithms.rail import LEAST_SLICE
from mpicoll._host.algorithm_choice import WINDOW_FROM, Choices
from tests.host.recorder import OPERATIONS, Job, Records
from tests.support import ROOT

pytestmark = pytest.mark.ranks(1)

KIB, MIB = 1 << 10, 1 << 20
ALWAYS = {name: {2: 1} for name in WINDOW_FROM}
OWN = Choices(window_from=ALWAYS, between_from=ALWAYS, apart_from=ALWAYS)  # mpicoll's algorithms from the first byte on
SHAPES = {"apart": (9, 1), "pairs": (8, 2), "nodes": (24, 8), "node": (8, 8)}  # ranks, ranks of a node

# -- both sides agree ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overruns", [False, True], ids=["posted", "matched"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_message_meets_its_receive(operation: str, shape: str, overruns: bool) -> None:
    """In size, tag and order of each pair; none is left over, and no rank waits for a message that nobody sends."""
    job = Job(*SHAPES[shape], OWN, overruns)
    for nbytes in (job.ranks * 4, job.ranks * 4 * 1009, 9 * (256 if overruns else 1024) * KIB):
        assert job.record(operation, nbytes).unmatched() == []


def test_a_message_without_its_receive_is_found() -> None:
    records = Job(4, 1, OWN).record("all_gather", 64 * KIB)
    assert records.unmatched() == []
    lost = next(event for event in records.of[2].events if event.kind == "receive")
    records.of[2].events.remove(lost)
    events = records.of[1].events
    first, second, *_ = (index for index, event in enumerate(events) if event.kind == "send")
    events[first], events[second] = events[second], events[first]  # to different ranks: no order between them
    assert len(records.unmatched()) == 1


# -- what leaves a node --------------------------------------------------------------------------------------------------

# Of the bytes of the tensor, the least that some node must send, by the number of nodes.
LEAST: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda nodes: 2 * (nodes - 1) / nodes,
    "reduce_scatter": lambda nodes: (nodes - 1) / nodes,
    "all_gather": lambda nodes: (nodes - 1) / nodes,
    "reduce": lambda nodes: 1,
    "broadcast": lambda nodes: 1,
}


@pytest.mark.parametrize(
    ("operation", "ranks", "ranks_per_node", "nbytes"),
    [
        *[(operation, nodes, 1, 4 * MIB) for operation in LEAST for nodes in (2, 4)],
        *[(operation, 64, 1, 4 * MIB) for operation in ("all_reduce", "reduce_scatter", "all_gather", "reduce")],
        ("all_reduce", 16, 4, 4 * MIB),
        ("all_reduce", 12, 4, 4 * MIB),
        ("reduce_scatter", 16, 4, 4 * MIB),
        ("all_gather", 64, 8, 16 * MIB),
        ("broadcast", 8, 2, 4 * MIB),
        ("broadcast", 32, 2, 4 * MIB),
        *[("broadcast", nodes, 1, nbytes) for nodes in (6, 16, 64) for nbytes in (nodes * 16 * KIB, 4 * MIB)],
    ],
)
def test_no_card_sends_more_than_it_must(operation: str, ranks: int, ranks_per_node: int, nbytes: int) -> None:
    job = Job(ranks, ranks_per_node, OWN)
    records = job.record(operation, nbytes)
    assert all(record.collectives == [] for record in records.of.values())  # so the record has all messages
    assert 0.99 <= records.card() / nbytes / LEAST[operation](job.nodes) <= 1.05


@pytest.mark.parametrize("operation", ["all_to_all", "all_gather", "reduce_scatter", "all_reduce"])
def test_no_rank_is_overrun(operation: str) -> None:
    """At each step each sends to another one. In all_to_all all sent to rank 0 first: 256 KiB blocks took 1.8 times as long."""
    ranks = 16
    records = Job(ranks, 1, OWN).record(operation, ranks * 64 * KIB).of
    targets = zip(*([message.rank for message in records[rank].sends] for rank in range(ranks)), strict=True)
    sources = zip(*([message.rank for message in records[rank].receives] for rank in range(ranks)), strict=True)
    for step_targets, step_sources in zip(targets, sources, strict=True):
        assert sorted(step_targets) == [*range(ranks)]
        assert [step_targets[source] for source in step_sources] == [*range(ranks)]  # received in the order of the sends


def test_direct_exchange_is_made_for_one_rank_on_each_node() -> None:
    """Without windows it still reduces half precision. Every rank of a node then sends what one rank would."""
    job = Job(16, 4, Choices(window_bytes=0))
    assert job.record("all_reduce", 4 * MIB, torch.bfloat16).card() == 4 * 4 * MIB * 2 * 12 // 16


# -- how the numbers grow ------------------------------------------------------------------------------------------------


class Expected(NamedTuple):
    """The largest numbers of one rank."""

    sends: int = 0
    mpi_calls: int = 0
    most_open: int = 0  # requests at a time
    most_receives: int = 0
    turns: int = 0  # of the window
    copies: int = 0
    operands: int = 0  # calls of torch kernels

    @classmethod
    def of(cls, records: Records) -> "Expected":
        return cls(
            records.most(lambda record: len(record.sends)),
            *(records.most(lambda record, name=name: getattr(record, name)) for name in cls._fields[1:]),  # type: ignore[misc]
        )


def direct_all_reduce(ranks: int, nbytes: int) -> Expected:
    """2 (p - 1) messages for each chunk; as many receives, and a wait for both."""
    chunk = ranks * min(SLICE, CHUNK // ranks)
    chunks, ahead = -(-nbytes // chunk), min(AHEAD, CHUNK // chunk)
    sends, under_way = 2 * (ranks - 1) * chunks, (ranks - 1) * min(chunks, 2 * ahead + 1)
    return Expected(sends, 4 * sends + MEETING, 2 * under_way, under_way, operands=ranks * chunks)


def direct_all_gather(ranks: int, nbytes: int) -> Expected:
    turns = -(-nbytes // ranks // SLICE)
    sends, under_way = (ranks - 1) * turns, (ranks - 1) * min(AHEAD, turns)
    return Expected(sends, 4 * sends + MEETING, 2 * under_way, under_way, copies=1)


def pairwise_all_to_all(ranks: int, nbytes: int) -> Expected:
    return Expected(ranks - 1, 4 * (ranks - 1), 2 * (ranks - 1), ranks - 1, copies=1)


def window_all_reduce(ranks: int, nbytes: int, nodes: int = 1) -> Expected:
    """Each turn writes two parts of a slot, reads the parts of all ranks, and copies the result."""
    turns = -(-nbytes // (Choices().chunk(ranks, nodes) // 2))
    return Expected(turns=turns, copies=3 * turns, operands=ranks * turns)


def hierarchical_all_reduce(ranks: int, nbytes: int) -> Expected:
    """Two ranks on each of N nodes. For each turn of their window, 2 (N - 1) messages over the rail, N - 1 calls to reduce."""
    window, others = window_all_reduce(2, nbytes, ranks // 2), ranks // 2 - 1
    sends = 2 * others * window.turns
    calls = 4 * sends + others * window.turns + MEETING
    return window._replace(sends=sends, mpi_calls=calls, most_open=2 * others, most_receives=others, copies=2 * window.turns)


def window_all_gather(ranks: int, nbytes: int) -> Expected:
    turns = -(-nbytes // ranks // (Choices().chunk(ranks) // 2))
    return Expected(turns=turns, copies=(ranks + 1) * turns)


MEETING = 2  # MPI calls: the barrier that ranks of several nodes make before a large operation, and its test


@pytest.mark.parametrize(("ranks", "nbytes"), [(16, 256 * KIB), (64, 4 * MIB), (1024, 64 * MIB)])
def test_the_pieces_of_a_broadcast_are_shared_alike(ranks: int, nbytes: int) -> None:
    """64 ranks: 16 of them sent 62 pieces each, and the others none."""
    sends = [
        len(record.sends) for record in Job(ranks, 1, OWN).record("broadcast", nbytes, ranks=[0, 2, 3, ranks - 1]).of.values()
    ]
    assert set(sends) == {ranks - 2}


@pytest.mark.parametrize("others", [1, 2, 3, 4, 15, 63, 1023])
def test_pieces_of_a_broadcast(others: int) -> None:
    for nbytes in (1, 65, BROADCAST_LEAST, 64 * KIB, MIB + 1, 16 * MIB, 1 << 30):
        piece = broadcast_piece(nbytes, others)
        pieces = -(-nbytes // piece)
        assert 0 < piece <= SLICE
        assert -(-pieces // others) * (others - 1) <= 1.05 * pieces or nbytes < LEAST_SLICE * others
        if others < 4 and nbytes > BROADCAST_LEAST:  # as measured
            assert piece == (SLICE if others == 1 else min(SLICE, max(BROADCAST_LEAST, nbytes // BROADCAST_PIECES)))


@pytest.mark.parametrize(
    ("operation", "ranks", "ranks_per_node", "nbytes", "formula"),
    [
        *[("all_reduce", ranks, 1, nbytes, direct_all_reduce) for ranks in (4, 16, 64, 256) for nbytes in (8 * MIB, 16 * MIB)],
        *[("all_gather", ranks, 1, nbytes, direct_all_gather) for ranks in (4, 16, 64) for nbytes in (4 * MIB, 64 * MIB)],
        ("all_gather", 1024, 1, 16 * MIB, direct_all_gather),
        *[("all_to_all", ranks, 2, ranks * 8, pairwise_all_to_all) for ranks in (4, 64, 1024)],
        *[("all_reduce", ranks, ranks, 8 * MIB, window_all_reduce) for ranks in (4, 16, 64, 128)],
        *[("all_reduce", ranks, 2, 8 * MIB, hierarchical_all_reduce) for ranks in (4, 16, 64)],
        *[("all_gather", ranks, ranks, 8 * MIB, window_all_gather) for ranks in (4, 16, 64, 128)],
    ],
)
def test_numbers_grow_as_expected(
    operation: str, ranks: int, ranks_per_node: int, nbytes: int, formula: Callable[[int, int], Expected]
) -> None:
    records = Job(ranks, ranks_per_node, OWN).record(operation, nbytes, ranks=range(1, 4))
    assert Expected.of(records) == formula(ranks, nbytes)
    assert records.unmatched() == []
    assert records.most(lambda record: record.copied) <= 2 * nbytes


def test_many_ranks_on_each_of_many_nodes() -> None:
    """A turn of the window makes one call of MPI, over the rail; its slice has 1 / R of a turn's bytes."""
    job = Job(1024, 64, OWN)
    record = job.record("all_reduce", 8 * MIB, ranks=[0]).of[0]
    piece = job.choices.chunk(64, 16) // 2
    assert record.turns == len(record.collectives) == -(-8 * MIB // piece)
    assert {ranks for _, ranks, _ in record.collectives} == {16}
    assert max(nbytes for *_, nbytes in record.collectives) <= -(-piece // 64 // 64) * 64


@pytest.mark.parametrize(
    ("operation", "ranks", "ranks_per_node", "nbytes", "turns"),
    [
        *[("all_reduce", ranks, ranks, nbytes, turns) for ranks, nbytes, turns in [(2, 8, 2), (4, 8, 2), (8, 6, 2), (8, 8, 3)]],
        ("all_reduce", 16, 8, 6, 2),
        ("broadcast", 4, 4, 8, 2),
        ("all_gather", 4, 4, 32, 2),
        ("reduce_scatter", 4, 4, 8, 2),
    ],
)
def test_a_turn_of_ranks_with_threads_is_longer(operation: str, ranks: int, ranks_per_node: int, nbytes: int, turns: int) -> None:
    """As long as all threads have work: 4 MiB if 32 threads reduce. Turns of ranks with one thread have 512 KiB."""
    job = Job(ranks, ranks_per_node, threads=32 // ranks_per_node)
    assert job.record(operation, nbytes * MIB, ranks=[1]).of[1].turns == turns


def test_a_small_operation_is_one_call() -> None:
    records = Job(1024, 64).record("all_reduce", 4 * KIB, ranks=[0])
    assert records.of[0].calls == {"Allreduce": 1}
    assert records.algorithm() == {"one MPI call"}


# -- the page ------------------------------------------------------------------------------------------------------------

# Rows of docs/guides/clusters.md: operations, and the most messages that one of p ranks sends or receives for 8 MiB.
GROWTH: dict[str, tuple[tuple[str, ...], Callable[[int], int]]] = {
    "messages of all_reduce, reduce, reduce_scatter": (("all_reduce", "reduce", "reduce_scatter"), lambda p: 256),
    "messages of all_gather, broadcast": (("all_gather", "broadcast"), lambda p: max(256, p)),
    "messages of all_to_all, of the root of gather and scatter": (("all_to_all", "gather"), lambda p: p),
}


@pytest.mark.parametrize("row", GROWTH)
def test_what_grows_on_one_rank(row: str) -> None:
    operations, most = GROWTH[row]
    page = (ROOT / "docs/guides/clusters.md").read_text()
    assert f"| {row} | {'-' if most(4096) == most(16) else 'p'} |" in page
    for nodes, per_node in ((16, 1), (64, 1), (512, 1), (32, 2), (16, 8)):
        job = Job(nodes * per_node, per_node)
        for operation in operations:
            nbytes = 8 * job.ranks if operation in ("all_to_all", "gather") else 8 * MIB
            record = job.record(operation, nbytes, ranks=[1]).of[1]
            assert max(len(record.sends), len(record.receives)) <= most(job.ranks), (operation, job.ranks)

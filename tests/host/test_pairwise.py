"""Blocks that only their sender and their receiver know."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mpicoll
from mpicoll._algorithms import pairwise
from mpicoll._algorithms.pairwise import TESTED_FROM
from mpicoll._algorithms.windows import Windows
from mpicoll._mpi.channel import Channel
from mpicoll.errors import CollectiveMismatch, TruncationError
from tests.support import agree

pytestmark = [pytest.mark.min_ranks(2), pytest.mark.usefixtures("world")]


def _block(count: int) -> torch.Tensor:
    return torch.zeros(count)


def _scatter(group: Any, rank: int, size: int, sent: int, expected: int) -> None:
    lengths = [4] * (size - 1) + [sent]
    target = _block(expected if rank == size - 1 else 4)
    mpicoll.scatter(target, [_block(length) for length in lengths] if rank == 0 else None, 0, group=group)


def _gather(group: Any, rank: int, size: int, sent: int, expected: int) -> None:
    lengths = [4] * (size - 1) + [expected]
    source = _block(sent if rank == size - 1 else 4)
    mpicoll.gather(source, [_block(length) for length in lengths] if rank == 0 else None, 0, group=group)


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """For each wait of a channel: for how many requests, and whether they are large."""
    found: list[tuple[int, bool]] = []
    wait_all = Channel.wait_all

    def noting(channel: Channel, requests: Any, statuses: Any = (), large: bool = False) -> None:
        found.append((len(requests), large))
        wait_all(channel, requests, statuses, large)

    monkeypatch.setattr(Channel, "wait_all", noting)
    return found


@pytest.mark.parametrize("operation", [_scatter, _gather])
@pytest.mark.parametrize(("sent", "error"), [(3, CollectiveMismatch), (4, None), (5, TruncationError)])
def test_the_receiver_compares_the_sizes(
    rank: int, size: int, operation: Callable[..., None], sent: int, error: type[Exception] | None
) -> None:
    """A block that was too short left the rest of its tensor unchanged, and nobody was told."""
    group, raised = mpicoll.new_group(), None
    try:
        operation(group, rank, size, sent, 4)
    except (CollectiveMismatch, TruncationError) as caught:
        raised = caught
    receives = rank == (size - 1 if operation is _scatter else 0)
    agree(type(raised) is (error if receives and error else type(None)), repr(raised))
    peer = 0 if operation is _scatter else size - 1
    words = f"Rank {peer} of the group has sent 12 bytes, and this rank expects 16"
    agree(error is not CollectiveMismatch or not receives or words in str(raised), raised)


@pytest.mark.parametrize(("apart", "nbytes"), [(True, TESTED_FROM), (True, TESTED_FROM - 4), (False, TESTED_FROM)])
def test_large_blocks_between_nodes_leave_the_core_while_they_move(
    rank: int, size: int, apart: bool, nbytes: int, waited: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """all_to_all of 1 MiB between hosts that share cores took 2.5 times the bandwidth limit, and takes 1.1."""
    group = mpicoll.new_group()
    members = [[of] for of in range(size)] if apart else [list(range(size))]
    monkeypatch.setattr(Windows, "node_members", members)
    waited.clear()
    outputs = [torch.empty(nbytes // 4) for _ in range(size)] if rank == 0 else None
    mpicoll.gather(torch.full((nbytes // 4,), float(rank)), outputs, 0, group=group)
    agree([large for _, large in waited] == [apart and nbytes >= TESTED_FROM], waited)
    agree(outputs is None or all(bool(output.eq(of).all()) for of, output in enumerate(outputs)))


@pytest.mark.parametrize(
    ("operation", "sent", "expected"),
    [
        (_scatter, 0, 16), (_scatter, 16, 0), (_gather, 15, 16), (_gather, 40, 32), (_scatter, 300, 250), (_gather, 250, 300),
        (_scatter, 1_000_000, 4), (_gather, 1_000_000, 4),
    ],
)  # fmt: skip
def test_messages_in_pieces_of_another_number_than_expected(
    rank: int, size: int, operation: Callable[..., None], sent: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes in elements; a piece has 16 and more, or 64 Ki. The sender waits for no piece that nobody receives."""
    group, raised = mpicoll.new_group(), None
    monkeypatch.setattr(Windows, "node_members", [[of] for of in range(size)])
    if sent < 1000:
        monkeypatch.setattr(pairwise, "PIECE", 64)
    try:
        operation(group, rank, size, sent, expected)
    except (CollectiveMismatch, TruncationError) as caught:
        raised = caught
    error = CollectiveMismatch if sent < expected else TruncationError
    receives = rank == (size - 1 if operation is _scatter else 0)
    agree(type(raised) is (error if receives else type(None)), repr(raised))


@pytest.mark.parametrize("count", [0, 7, 8, 100, 300])
def test_pieces_arrive_in_order(
    rank: int, size: int, count: int, waited: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice, so that a piece that is left over would come to the second exchange."""
    monkeypatch.setattr(Windows, "node_members", [[of] for of in range(size)])
    monkeypatch.setattr(pairwise, "PIECE", 64)
    group = mpicoll.new_group()
    waited.clear()
    for call in range(2):
        targets = [torch.empty(count, dtype=torch.int64) for _ in range(size)] if rank == 0 else None
        mpicoll.gather(torch.arange(count) + 1000 * rank + call, targets, 0, group=group)
        whole = [torch.arange(count) + 1000 * of + call for of in range(size)]
        agree(targets is None or torch.equal(torch.stack(targets), torch.stack(whole)), targets)
    pieces = {0: 1, 7: 1, 8: 2, 100: 13, 300: 10}[count]  # 8 bytes each; of 300, pieces have 256 bytes
    agree([requests for requests, _ in waited] == [pieces * (size - 1 if rank == 0 else 1)] * 2, waited)
    mpicoll.destroy_process_group(group)


@given(nbytes=st.integers(0, 1 << 40))
def test_the_last_piece_is_the_shorter_one(nbytes: int) -> None:
    sizes = [size for _, size in pairwise._pieces((0, nbytes))]
    assert sum(sizes) == nbytes
    assert len(sizes) <= 17
    assert set(sizes[:-1]) <= {sizes[0]}
    assert sizes[-1] < (pairwise.PIECE if len(sizes) == 1 else sizes[0])
    assert len(sizes) == 1 or sizes[0] >= pairwise.PIECE

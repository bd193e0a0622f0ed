"""What becomes of GPU memory is decided once, when the world is made, by the weakest rank (traps 65, 68)."""

from dataclasses import dataclass

import pytest

from mpicoll._api import groups
from mpicoll._device import consensus, streams
from mpicoll._device.consensus import DeviceChoices
from mpicoll._engine.consensus import agree as agree_on_choices
from mpicoll.errors import MpicollError
from tests.support import agree

pytestmark = pytest.mark.usefixtures("world")


@dataclass
class Rank:
    """What this rank would say, and how often it was asked for a trial."""

    gpu: bool = True
    claims: bool = True
    passes: bool = True
    trials: int = 0

    def proven(self) -> bool:
        self.trials += 1
        return self.passes


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Rank:
    made = Rank()
    monkeypatch.setattr(streams, "seen", lambda: made.gpu)
    monkeypatch.setattr(consensus, "claimed", lambda: made.claims)
    monkeypatch.setattr(consensus, "proven", made.proven)
    for name in ("MPICOLL_CUDA_AWARE", "MPICOLL_CUDA_IPC"):
        monkeypatch.delenv(name, raising=False)
    return made


def agreed() -> DeviceChoices | None:
    group = groups.of(None)
    assert group is not None
    return agree_on_choices(group.channel)[1]


def ways(found: DeviceChoices | None) -> tuple[bool, bool, bool]:
    """Whether there are GPUs, MPI takes their memory, ranks share it."""
    return (False, False, False) if found is None else (True, found.direct, found.shares)


@pytest.mark.parametrize(
    ("lacks", "ranks", "expected", "tried"),
    [
        (None, "no", (True, True, False), True),
        ("passes", "all", (True, False, True), True),
        ("claims", "the last", (True, False, True), False),
        pytest.param(
            "gpu", "the last", (True, False, False), False, marks=pytest.mark.min_ranks(2)
        ),  # others cannot share with it
        ("gpu", "all", (False, False, False), False),
    ],
)
def test_the_weakest_rank_decides(
    lacks: str | None, ranks: str, expected: tuple[bool, bool, bool], tried: bool, here: Rank, rank: int, size: int
) -> None:
    """One that lacks a GPU, or its MPI's claim. A trial is made by rank 0 alone, and by nobody unless all claim."""
    if lacks is not None and (ranks == "all" or rank == size - 1):
        setattr(here, lacks, False)
    agree(ways(agreed()) == expected and here.trials == (tried and rank == 0), here)


@pytest.mark.parametrize(("aware", "ipc", "expected"), [("1", "1", (True, True, False)), ("0", "0", (True, False, False))])
def test_rank_0_is_told(
    here: Rank, aware: str, ipc: str, expected: tuple[bool, bool, bool], rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No evidence counts then, and what the others are told does not."""
    monkeypatch.setenv("MPICOLL_CUDA_AWARE", aware if rank == 0 else "0")
    monkeypatch.setenv("MPICOLL_CUDA_IPC", ipc if rank == 0 else "1")
    here.claims = False
    agree(ways(agreed()) == expected and here.trials == 0, here)


@pytest.mark.parametrize("question", ["claimed", "proven"])
def test_a_rank_that_cannot_tell(question: str, here: Rank, rank: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Holds up nobody: all ranks say who, and why."""
    fails = size - 1 if question == "claimed" else 0

    def fail() -> bool:
        raise OSError("no libmpi.so to ask")

    if rank == fails:
        monkeypatch.setattr(consensus, question, fail)
    with pytest.raises(MpicollError, match=rf"rank {fails} cannot tell .* OSError: no libmpi.so to ask; set MPICOLL_CUDA_AWARE"):
        agreed()
    agree(True)

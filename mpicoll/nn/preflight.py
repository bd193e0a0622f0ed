"""What all ranks find out together before anything moves: that what they ask for fits together, and who wants a gradient.

    with Agreement("all_reduce", group, [tensor]) as ranks:
        checks.movable("all_reduce", tensor)            # a TypeError or ValueError in here is raised on every rank
        ranks.equal = f"{tensor.dtype} {tuple(tensor.shape)}"
    ranks.wanted                                        # the answer: somebody's tensor requires grad

It costs one all_reduce of 32 bytes. See Note [One sum tells].
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

import torch
import torch.distributed as torchs
from torch import Tensor
from torch.distributed import ProcessGroup

from mpicoll._api import collectives
from mpicoll._tensors import checks
from mpicoll.errors import UnsupportedReduction

# Note [One sum tells]
# Whether all ranks hold the same value is one sum: rank r adds value * w(r) - value * w(r + 1), so that the sum over all ranks
# is that of (value of r - value of r - 1) * w(r), which is 0 if all are equal, and else is not, w being random numbers. In the
# same way the sender and the receiver of a message add +count * w and -count * w, with a w for each pair of ranks. All of it is
# done modulo a prime: a disagreement goes unnoticed in one of 10^12 cases. An all_gather of everybody's shape would grow with
# the number of ranks; the words that say who differs are gathered when an error is certain.
PRIME = 2**40 - 87  # sums over up to 2^23 ranks stay within an int64
SHOWN = 16  # ranks that an error names, at most


class Agreement:
    """One question to all ranks of a group, asked on leaving the ``with`` (collective).

    Set inside:     equal: what must be the same on all ranks; even: what may differ; about: what an error says of this rank.
                    ``ring`` and ``pairs`` say what else must fit.
    There after:    wanted: some rank's tensor requires grad there (and grad mode is on); is_even: ``even`` is the same on all.
    Raises:         on leaving, on every rank alike: the error that a rank met inside; ValueError: the ranks do not fit together.
    """

    def __init__(self, operation: str, group: ProcessGroup | None, tensors: Iterable[Any] = ()) -> None:
        self.operation, self.group = operation, group
        self.rank, self.size = torchs.get_rank(group), torchs.get_world_size(group)
        if self.rank < 0:
            raise ValueError(f"{operation}: this rank is not in the group")
        self.equal: object = None
        self.even: object = None
        self.about = ""
        self.wanted = needs_grad(tensors)
        self.is_even = True
        self._sum = 0

    def __enter__(self) -> Agreement:
        return self

    def group_rank(self, what: str, global_rank: int) -> int:
        """The rank within the group of a global rank."""
        ranks = torchs.get_process_group_ranks(self.group)
        rank = checks.integer(self.operation, what, global_rank)
        if rank not in ranks:
            raise ValueError(f"{self.operation}: {what}: global rank {rank} is not in the group, which has ranks {ranks}")
        return ranks.index(rank)

    def ring(self, value: object, me: int, successor: int) -> None:
        """``value`` must be the same on the ranks of a ring; me, successor: this rank's number in it, and the next one's."""
        self._sum += _number(value) * (_weight(1, me) - _weight(1, successor))

    def pairs(self, sent: Sequence[int], received: Sequence[int]) -> None:
        """What this rank sends to rank i must be what rank i expects from it: counts, one for each rank."""
        for rank, (to, back) in enumerate(zip(sent, received, strict=True)):
            self._sum += to * _weight(2, self.rank, rank) - back * _weight(2, rank, self.rank)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if error is not None and not isinstance(error, (TypeError, ValueError)):
            return False
        here, following = _weight(0, self.rank), _weight(0, (self.rank + 1) % self.size)
        must = (self._sum + _number(self.equal) * (here - following)) % PRIME
        may = _number(self.even) * (here - following) % PRIME
        said = _summed(self.group, [error is not None, self.wanted, must, may])
        self.wanted, self.is_even = said[1] > 0, said[3] % PRIME == 0
        if said[0] or said[2] % PRIME:
            raise self._error(error) from error
        return True

    def _error(self, error: BaseException | None) -> Exception:
        kind: type[Exception] = next((known for known in (TypeError, UnsupportedReduction) if type(error) is known), ValueError)
        mine = None if error is None else (kind, f"{self.operation}: {str(error).removeprefix(self.operation + ': ')}")
        everybody: list[Any] = [None] * self.size
        torchs.all_gather_object(everybody, (mine, self.about or str(self.equal)), group=self.group)
        met = {rank: problem for rank, (problem, _) in enumerate(everybody) if problem is not None}
        if not met:
            return ValueError(_listed(f"{self.operation}: the ranks do not fit together", [words for _, words in everybody]))
        kinds = {kind for kind, _ in met.values()}
        kind = kinds.pop() if len(kinds) == 1 else ValueError
        texts = {text for _, text in met.values()}
        if len(texts) == 1 and len(met) == self.size:
            return kind(texts.pop())
        return kind(_listed(f"{self.operation}: wrong on some rank", [met.get(r, (None, None))[1] for r in range(self.size)]))


def needs_grad(tensors: Iterable[Any]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors)


def _summed(group: ProcessGroup | None, numbers: Sequence[int]) -> list[int]:
    total = torch.tensor([int(number) for number in numbers], device="cpu")
    collectives.all_reduce(total, group=group)
    return total.tolist()


def _listed(title: str, lines: Sequence[str | None]) -> str:
    """The title, and below it each rank's words, ranks of the same words in one line."""
    by_words: dict[str, list[int]] = {}
    for rank, words in enumerate(lines):
        if words is not None:
            by_words.setdefault(words, []).append(rank)
    said = []
    for words, ranks in by_words.items():
        named = ", ".join(map(str, ranks[:SHOWN])) + (", ..." if len(ranks) > SHOWN else "")
        said.append(f"  rank {named}: {words}")
    return "\n".join([title, *said[:SHOWN], *(["  ..."] if len(said) > SHOWN else [])])


def _number(value: object) -> int:
    """The same on every rank for the same value, unlike Python's hash."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=5).digest(), "little")


def _weight(*key: int) -> int:
    """A random number below PRIME that all ranks know: splitmix64 of the key."""
    number = 0
    for part in key:
        number = (number + part + 1) * 0x9E3779B97F4A7C15 & 2**64 - 1
        number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & 2**64 - 1
        number = (number ^ number >> 27) * 0x94D049BB133111EB & 2**64 - 1
        number ^= number >> 31
    return number % PRIME

"""What all ranks check together before data moves: their arguments fit together, and whether some tensor requires grad.

    with Preflight("all_reduce", group, [tensor]) as ranks:
        checks.movable("all_reduce", tensor)            # a TypeError or ValueError in here is raised on every rank
        ranks.equal = f"{tensor.dtype} {tuple(tensor.shape)}"
    ranks.requires_grad                                 # the answer: some rank's tensor requires grad

It costs one all_reduce of 32 bytes. See Note [Agreement by one sum].
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mpicoll._api import reductions
from mpicoll._base.errors import UnsupportedReduction
from mpicoll._base.facts import ranks_in_words
from mpicoll._tensors import checks

# Note [Agreement by one sum]
# One sum tells whether all ranks hold the same value: rank r adds value * w(r) - value * w(r + 1), where w are random numbers
# that all ranks know. Over all ranks this is the sum of (value of r - value of r - 1) * w(r): 0 if all values are equal, and
# otherwise not 0. In the same way the sender and the receiver of a message add +count * w and -count * w, with one w for each
# pair of ranks. All of it is done modulo a prime: a disagreement goes unnoticed in one of 10^12 cases.
# A MAX of (value, -value) would tell equality without random numbers, but not whether sends and receives match: that needs the
# sum, so there would be two reductions. An all_gather of all shapes would grow with the number of ranks; the texts that say
# which ranks differ are gathered after an error is certain.
PRIME = 2**40 - 87  # sums over up to 2^23 ranks stay within an int64
MAX_TEXTS = 16  # that an error shows


class Preflight:
    """One question to all ranks of a group, asked when the ``with`` block ends (collective).

    Raises:
        TypeError, ValueError: On every rank alike, when the block ends: a rank raised one inside, or the ranks do not fit
            together.
    """

    def __init__(self, operation: str, group: ProcessGroup | None, tensors: Iterable[Any] = ()) -> None:
        self.operation, self.group = operation, group
        self.rank, self.size = torch_dist.get_rank(group), torch_dist.get_world_size(group)
        if self.rank < 0:
            raise ValueError(f"{operation}: this rank is not in the group")
        self.equal: object = None  # set inside: what must be the same on all ranks; `ring` and `pairs` say what else must fit
        self.even: object = None  # set inside: what may differ between ranks
        self.about = ""  # set inside: what an error says about this rank; default: ``equal``
        self.requires_grad = any_requires_grad(tensors)  # afterwards: some rank's tensor does, with grad mode on
        self.is_even = True  # afterwards: ``even`` is the same on all ranks
        self._sum = 0

    def __enter__(self) -> Preflight:
        return self

    def group_rank(self, name: str, global_rank: int) -> int:
        """Returns the group rank of the argument ``name``, a global rank. Raises ValueError if it is not in the group."""
        return checks.global_rank(self.operation, name, global_rank, torch_dist.get_process_group_ranks(self.group))

    def ring(self, value: object, place: int, successor: int) -> None:
        """Requires that ``value`` is the same on all ranks of a ring, given this rank's number and the next one's."""
        self._sum += _hash(value) * (_hash((1, place)) - _hash((1, successor)))

    def pairs(self, sent: Sequence[int], received: Sequence[int]) -> None:
        """Requires that each rank receives from another what that one sends to it: counts, one for each rank."""
        for rank, (to, back) in enumerate(zip(sent, received, strict=True)):
            self._sum += to * _hash((2, self.rank, rank)) - back * _hash((2, rank, self.rank))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if error is not None and not isinstance(error, (TypeError, ValueError)):
            return False
        weight = _hash((0, self.rank)) - _hash((0, (self.rank + 1) % self.size))
        must_match = (self._sum + _hash(self.equal) * weight) % PRIME
        may_match = _hash(self.even) * weight % PRIME
        total = torch.tensor([int(error is not None), int(self.requires_grad), must_match, may_match], device="cpu")
        reductions.all_reduce(total, group=self.group)
        errors, requiring, must_match, may_match = total.tolist()
        self.requires_grad, self.is_even = requiring > 0, may_match % PRIME == 0
        if errors or must_match % PRIME:
            raise self._error(error) from error
        return True

    def _error(self, error: BaseException | None) -> Exception:
        """Gathers every rank's problem, and returns the same error on all ranks (collective)."""
        kind: type[Exception] = next((known for known in (TypeError, UnsupportedReduction) if type(error) is known), ValueError)
        local = None if error is None else (kind, f"{self.operation}: {str(error).removeprefix(self.operation + ': ')}")
        gathered: list[Any] = [None] * self.size
        torch_dist.all_gather_object(gathered, (local, self.about or str(self.equal)), group=self.group)
        problems = {rank: problem for rank, (problem, _) in enumerate(gathered) if problem is not None}
        if not problems:
            return ValueError(_by_rank(f"{self.operation}: the ranks do not fit together", [about for _, about in gathered]))
        kinds = {kind for kind, _ in problems.values()}
        kind = kinds.pop() if len(kinds) == 1 else ValueError
        texts = {text for _, text in problems.values()}
        if len(texts) == 1 and len(problems) == self.size:
            return kind(texts.pop())
        lines = [problems.get(rank, (None, None))[1] for rank in range(self.size)]
        return kind(_by_rank(f"{self.operation}: wrong on some rank", lines))


def any_requires_grad(tensors: Iterable[Any]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors)


def _by_rank(title: str, texts: Sequence[str | None]) -> str:
    """Returns the title and each rank's text below it, with one line for ranks of the same text."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        if text is not None:
            ranks_of.setdefault(text, []).append(rank)
    lines = [f"  {ranks_in_words(ranks)}: {text}" for text, ranks in ranks_of.items()]
    return "\n".join([title, *lines[:MAX_TEXTS], *(["  ..."] if len(lines) > MAX_TEXTS else [])])


def _hash(value: object) -> int:
    """Returns 40 bits that are the same on every rank for equal values, unlike those of Python's hash."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=5).digest(), "little")


def description(tensor: Tensor) -> str:
    """Returns dtype and shape, for errors and for comparison between ranks."""
    return f"{tensor.dtype} {tuple(tensor.shape)}"

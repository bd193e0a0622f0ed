"""send, recv and sendrecv that autograd goes back through: the gradient of what was received travels home to the sender.

    rank 0                                  rank 1
    t = send(f(x), dst=1)                   y = recv(src=0)
    t.backward()                            g(y).backward()

``send`` returns a token, a zero: it stands for the sent tensor in the sender's graph, so that something leads back to it. Add it
to the loss, call ``backward`` on it where there is no loss, or give it to a ``recv`` (``recv(src, token=t)``), whose result then
leads back to it. Tokens add up. A rank's backward pass goes through its messages in reverse, as it goes through everything; a
gradient finds the message that it belongs to by a number, in whatever order the ranks call ``backward``.
"""

from __future__ import annotations

import weakref
import zlib
from collections import defaultdict, deque
from typing import Any

import torch
import torch.distributed as torchs
from torch import Tensor
from torch.distributed import ProcessGroup

from mpicoll._api import p2p
from mpicoll._tensors import checks
from mpicoll.nn.preflight import needs_grad

# Note [Two messages]
# A tensor travels behind a head of integers: dtype and shape, so that the receiver can allocate; ``reply``, the sender's number
# for this message if it wants a gradient; ``answers``, in a message that brings a gradient, the number that it belongs to. What
# arrives while something else is waited for is kept until it is asked for.
MOST_DIMS = 64  # torch's own limit
HEAD = 5 + MOST_DIMS
MARK = 0x6D7069636F6C6C  # the first integer: a message of another kind is noticed
_DTYPES = {zlib.crc32(str(value).encode()): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def send(tensor: Tensor, dst: int, group: ProcessGroup | None = None, tag: int = 0) -> Tensor:
    """Sends a copy of the tensor and returns at once, with the token of this message: a float zero of no dimension.

    Args:   tensor: any shape, strides and dtype. dst: global rank, this one too. It must take it by ``recv`` of this module; if
            the tensor requires grad, into a loss and a backward pass, since the token's backward waits for that gradient.
    """
    checks.movable("send", tensor)
    return _sent(_Way(group, dst, tag), 0, needs_grad([tensor]), tensor)


def recv(src: int, group: ProcessGroup | None = None, tag: int = 0, token: Tensor | None = None) -> Tensor:
    """The next tensor that ``src`` has sent by ``send``, with its dtype and shape, on the CPU.

    Args:   src: global rank, this one too. token: of a ``send``; the result leads back to it.
    It requires grad if what was sent does. Without a token it leads back to nothing on this rank: its gradient travels in
    ``loss.backward()``, but not in ``torch.autograd.grad(loss, x)``, and create_graph is an error.
    """
    return _received(_Way(group, src, tag), 0, [] if token is None else [token])


def sendrecv(tensor: Tensor, dst: int, src: int, group: ProcessGroup | None = None, tag: int = 0) -> Tensor:
    """Sends to ``dst`` and receives from ``src``, global ranks: in a ring, say. The result leads back to ``tensor``."""
    return recv(src, group, tag, send(tensor, dst, group, tag))


class _Way:
    """To and from one rank, by one tag, within a group."""

    def __init__(self, group: ProcessGroup | None, peer: int, tag: int) -> None:
        self.group, self.peer, self.tag = group, peer, tag

    @property
    def mail(self) -> Mail:
        group = torchs.group.WORLD if self.group is None else self.group
        if group is None or torchs.get_rank(group) < 0:
            raise ValueError("send, recv: this rank is not in the group, or there is no default group")
        if group not in _mail:
            _mail[group] = Mail(group)
        return _mail[group]


class Mail:
    """A group's messages from this rank's side: how many have a number, what has come and was not asked for yet."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = weakref.ref(group)
        self.numbered = 0
        self.leaving: list[Any] = []  # Works of sends; other backends than ours want them kept
        self.kept: dict[tuple[int, int, int], deque[tuple[Tensor, int]]] = defaultdict(deque)  # peer, tag, answers

    def post(self, tensor: Tensor, way: _Way, answers: int, wants_reply: bool) -> int:
        """Starts sending a copy; returns the number that its gradient will answer, 0 if none is wanted."""
        self.numbered += wants_reply
        reply = self.numbered if wants_reply else 0
        content = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).cpu()
        head = torch.zeros(HEAD, dtype=torch.int64, device="cpu")
        facts = [MARK, answers, reply, zlib.crc32(str(content.dtype).encode()), content.dim(), *content.shape]
        head[: len(facts)] = torch.tensor(facts, device="cpu")
        started = [p2p.isend(part, way.peer, self.group(), way.tag) for part in (head, content)]
        self.leaving = [work for work in [*self.leaving, *started] if work is not None and not work.is_completed()]
        return reply

    def take(self, way: _Way, answers: int) -> tuple[Tensor, int]:
        """The next message of this kind (answers 0: no gradient), and the number by which its gradient is awaited."""
        wanted = self.kept[way.peer, way.tag, answers]
        while not wanted:
            head = torch.zeros(HEAD, dtype=torch.int64, device="cpu")
            self._receive(head, way)
            mark, kind, reply, dtype, dims, *shape = head.tolist()
            if mark != MARK:
                raise ValueError(f"recv: what came from rank {way.peer} by tag {way.tag} was not sent by mpicoll.nn's send")
            content = torch.empty(shape[:dims], dtype=_DTYPES[dtype], device="cpu")
            self._receive(content, way)
            self.kept[way.peer, way.tag, kind].append((content, reply))
        found = wanted.popleft()
        if not wanted:
            del self.kept[way.peer, way.tag, answers]
        return found

    def _receive(self, tensor: Tensor, way: _Way) -> None:
        work = p2p.irecv(tensor, way.peer, self.group(), way.tag)
        assert work is not None
        work.wait()


_mail: weakref.WeakKeyDictionary[ProcessGroup, Mail] = weakref.WeakKeyDictionary()


def _sent(way: _Way, answers: int, wants_reply: bool, tensor: Tensor, thread: Tensor | None = None) -> Tensor:
    token: Tensor = _Send.apply(way, answers, wants_reply, tensor, thread)[0]  # type: ignore[no-untyped-call]
    return token


def _received(way: _Way, answers: int, tokens: list[Tensor], thread: Tensor | None = None) -> Tensor:
    content, reply = way.mail.take(way, answers)
    if reply and thread is not None:
        tokens = [*tokens, thread]
    is_tied = needs_grad(tokens)
    if reply and torch.is_grad_enabled() and not is_tied:
        tokens = [torch.zeros((), requires_grad=True, device="cpu")]
    result: Tensor = _Recv.apply(way, reply, is_tied, [content], *tokens)[0]  # type: ignore[no-untyped-call]
    return result


# Both have a second output, as in Note [Threads] of `linear`. With create_graph, who sends a gradient ties the message to the
# receive whose gradient it is and wants an answer, and who gets it ties it to its send: both go through these again.


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, way: _Way, answers: int, wants_reply: bool, tensor: Tensor, thread: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ctx.way, ctx.tied, ctx.device = way, thread is not None, tensor.device
        ctx.reply = way.mail.post(tensor, way, answers, wants_reply)
        own = torch.empty(0, device="cpu")
        ctx.save_for_backward(own)
        return torch.zeros((), device="cpu"), own

    @staticmethod
    def backward(ctx: Any, token: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (own,) = ctx.saved_tensors
        gradient = _received(ctx.way, ctx.reply, [token], own).to(ctx.device) if ctx.reply else None
        return None, None, None, gradient, torch.zeros(0, device="cpu") if ctx.tied else None


class _Recv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, way: _Way, reply: int, is_tied: bool, box: list[Tensor], *tokens: Tensor) -> tuple[Tensor, Tensor]:
        ctx.way, ctx.reply, ctx.is_tied, ctx.like = (
            way,
            reply,
            is_tied,
            [(token.shape, token.dtype, token.device) for token in tokens],
        )
        own = torch.empty(0, device="cpu")
        ctx.save_for_backward(own)
        return box[0], own

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (own,) = ctx.saved_tensors
        zeros = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like]
        if ctx.reply:
            again = torch.is_grad_enabled()
            if again and not ctx.is_tied:
                raise RuntimeError(
                    "recv: the gradient of a gradient was asked for (create_graph), but this received tensor leads back to "
                    "nothing on this rank; use sendrecv, or recv(..., token=...) with the token of a send"
                )
            token = _sent(ctx.way, ctx.reply, again, gradient, own if again else None)
            zeros = [(zero + token).to(zero.dtype) for zero in zeros]
        return None, None, None, None, *zeros

"""send, recv and sendrecv that take part in autograd: the gradient of a received tensor travels back to its sender.

    rank 0                                  rank 1
    t = send(f(x), dst=1)                   y = recv(src=0)
    t.backward()                            g(y).backward()

``send`` returns a token, a zero that stands for the sent tensor in the sender's graph. There are three ways to let a backward
pass reach it: add it to the loss, call ``backward`` on it where there is no loss, or give it to a ``recv`` (``recv(src,
token=t)``), whose result then depends on it. Tokens can be added up. The backward pass of a rank goes through its messages in
reverse order. A gradient finds its message by a number, in whatever order the ranks call ``backward``.
"""

from __future__ import annotations

import weakref
import zlib
from collections import defaultdict, deque
from typing import Any, NamedTuple

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mpicoll._api import p2p
from mpicoll._tensors import checks
from mpicoll.nn.preflight import any_requires_grad

# Note [Two messages]
# A tensor travels after a header of integers: dtype and shape, so that the receiver can allocate; ``reply``, the sender's number
# for this message if it wants a gradient; ``answers``, in a message that brings a gradient, the number that it belongs to.
# A message that arrives while the receiver waits for another one is kept until it is asked for.
MAX_DIMS = 64  # torch's own limit
HEADER = 5 + MAX_DIMS  # integers
MAGIC = 0x6D7069636F6C6C  # the first integer: a message of other code is noticed
_DTYPES = {zlib.crc32(str(value).encode()): value for value in vars(torch).values() if isinstance(value, torch.dtype)}


def send(tensor: Tensor, dst: int, group: ProcessGroup | None = None, tag: int = 0) -> Tensor:
    """Sends a copy of the tensor and returns at once, with the token of this message (not collective; ``dst`` must call `recv`).

    If the tensor requires grad, the receiver must use it in a loss and call ``backward``: the backward pass of the token waits
    for that gradient. torch.distributed.nn has no messages.

    Args:
        tensor: Any shape, strides and dtype.
        dst: Global rank, this one included. It must receive with `recv` of this module.
        group: None means the default group.
        tag: Only a `recv` with the same tag gets the message.

    Returns:
        The token: a float zero without dimensions, to be added to this rank's loss.

    Raises:
        ValueError: This rank is not in the group.

    Example:
        >>> x = torch.tensor([3.0], requires_grad=True)
        >>> if dist.get_rank() == 0:
        ...     (dist.nn.send(x * x, dst=1)).backward()  # waits for the gradient from rank 1
        ...     assert x.grad.item() == 6.0
        ... else:
        ...     dist.nn.recv(src=0).sum().backward()
    """
    checks.movable("send", tensor)
    return _send(_Peer(group, dst, tag), 0, any_requires_grad([tensor]), tensor)


def recv(src: int, group: ProcessGroup | None = None, tag: int = 0, token: Tensor | None = None) -> Tensor:
    """Returns the next tensor that ``src`` has sent with `send`, with its dtype and shape, on the CPU (not collective).

    It requires grad if the sent tensor does. Without a token it depends on nothing on this rank: its gradient travels in
    ``loss.backward()``, but not in ``torch.autograd.grad(loss, x)``, and create_graph is an error.

    Args:
        src: Global rank, this one included.
        group: None means the default group.
        tag: That of the message.
        token: Of a `send`. The result depends on it.

    Returns:
        A new tensor.

    Raises:
        ValueError: This rank is not in the group, or the message does not come from `send`.

    Example:
        >>> if dist.get_rank() == 0:
        ...     token = dist.nn.send(torch.arange(3), dst=1)
        ... else:
        ...     assert dist.nn.recv(src=0).tolist() == [0, 1, 2]
    """
    return _receive(_Peer(group, src, tag), 0, [] if token is None else [token])


def sendrecv(tensor: Tensor, dst: int, src: int, group: ProcessGroup | None = None, tag: int = 0) -> Tensor:
    """Sends to ``dst``, receives from ``src``, and returns the received tensor, which depends on ``tensor`` (not collective).

    Args:
        tensor: Any shape, strides and dtype.
        dst: Global rank. It must receive from this one.
        src: Global rank. It must send to this one.
        group: None means the default group.
        tag: That of both messages.

    Returns:
        A new tensor, on the CPU.

    Raises:
        ValueError: As for `send` and `recv`.

    Example:
        >>> rank, size = dist.get_rank(), dist.get_world_size()
        >>> y = dist.nn.sendrecv(torch.tensor([rank]), dst=(rank + 1) % size, src=(rank - 1) % size)  # a ring
        >>> y.item() == (rank - 1) % size
        True
    """
    return recv(src, group, tag, send(tensor, dst, group, tag))


class _Peer(NamedTuple):
    group: ProcessGroup | None
    rank: int  # global
    tag: int

    @property
    def messages(self) -> GroupMessages:
        group = torch_dist.group.WORLD if self.group is None else self.group
        if group is None or torch_dist.get_rank(group) < 0:
            raise ValueError("send, recv: this rank is not in the group, or there is no default group")
        if group not in _messages:
            _messages[group] = GroupMessages(group)
        return _messages[group]


class GroupMessages:
    """A group's messages from and to this rank."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = weakref.ref(group)
        self.numbered = 0  # messages so far that want a gradient
        self.sending: list[Any] = []  # works of sends that have not completed; backends other than ours need them kept
        # Messages that nobody has asked for yet, by peer, tag and ``answers``.
        self.kept: dict[tuple[int, int, int], deque[tuple[Tensor, int]]] = defaultdict(deque)

    def post(self, tensor: Tensor, peer: _Peer, answers: int, wants_reply: bool) -> int:
        """Starts sending a copy. Returns the number that its gradient will answer, or 0 if none is wanted."""
        self.numbered += wants_reply
        reply = self.numbered if wants_reply else 0
        content = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).cpu()
        header = torch.zeros(HEADER, dtype=torch.int64, device="cpu")
        fields = [MAGIC, answers, reply, zlib.crc32(str(content.dtype).encode()), content.dim(), *content.shape]
        header[: len(fields)] = torch.tensor(fields, device="cpu")
        started = [p2p.isend(part, peer.rank, self.group(), peer.tag) for part in (header, content)]
        self.sending = [work for work in [*self.sending, *started] if work is not None and not work.is_completed()]
        return reply

    def take(self, peer: _Peer, answers: int) -> tuple[Tensor, int]:
        """Returns the next message that answers this number (0: no gradient), and the number that its own gradient answers."""
        kept = self.kept[peer.rank, peer.tag, answers]
        while not kept:
            header = torch.zeros(HEADER, dtype=torch.int64, device="cpu")
            self._receive(header, peer)
            magic, answered, reply, dtype, dims, *shape = header.tolist()
            if magic != MAGIC:
                raise ValueError(f"recv: what came from rank {peer.rank} by tag {peer.tag} was not sent by mpicoll.nn's send")
            content = torch.empty(shape[:dims], dtype=_DTYPES[dtype], device="cpu")
            self._receive(content, peer)
            self.kept[peer.rank, peer.tag, answered].append((content, reply))
        message = kept.popleft()
        if not kept:
            del self.kept[peer.rank, peer.tag, answers]
        return message

    def _receive(self, tensor: Tensor, peer: _Peer) -> None:
        work = p2p.irecv(tensor, peer.rank, self.group(), peer.tag)
        assert work is not None
        work.wait()


_messages: weakref.WeakKeyDictionary[ProcessGroup, GroupMessages] = weakref.WeakKeyDictionary()


def _send(peer: _Peer, answers: int, wants_reply: bool, tensor: Tensor, tie: Tensor | None = None) -> Tensor:
    token: Tensor = _Send.apply(peer, answers, wants_reply, tensor, tie)[0]  # type: ignore[no-untyped-call]
    return token


def _receive(peer: _Peer, answers: int, tokens: list[Tensor], tie: Tensor | None = None) -> Tensor:
    content, reply = peer.messages.take(peer, answers)
    if reply and tie is not None:
        tokens = [*tokens, tie]
    is_tied = any_requires_grad(tokens)
    if reply and torch.is_grad_enabled() and not is_tied:
        tokens = [torch.zeros((), requires_grad=True, device="cpu")]
    result: Tensor = _Recv.apply(peer, reply, is_tied, [content], *tokens)[0]  # type: ignore[no-untyped-call]
    return result


# Both have a tie as a second output, as in Note [Ties] of linear.py. With create_graph, a message that brings a gradient depends
# on the receive whose gradient it is and wants an answer. The rank that gets it makes it depend on the send. So a second backward
# pass goes through both again.


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, peer: _Peer, answers: int, wants_reply: bool, tensor: Tensor, tie: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ctx.peer, ctx.is_tied, ctx.device = peer, tie is not None, tensor.device
        ctx.reply = peer.messages.post(tensor, peer, answers, wants_reply)
        own_tie = torch.empty(0, device="cpu")
        ctx.save_for_backward(own_tie)
        return torch.zeros((), device="cpu"), own_tie

    @staticmethod
    def backward(ctx: Any, token: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (own_tie,) = ctx.saved_tensors
        gradient = _receive(ctx.peer, ctx.reply, [token], own_tie).to(ctx.device) if ctx.reply else None
        return None, None, None, gradient, torch.zeros(0, device="cpu") if ctx.is_tied else None


class _Recv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, peer: _Peer, reply: int, is_tied: bool, box: list[Tensor], *tokens: Tensor) -> tuple[Tensor, Tensor]:
        ctx.peer, ctx.reply, ctx.is_tied = peer, reply, is_tied
        ctx.tokens = [(token.shape, token.dtype, token.device) for token in tokens]
        own_tie = torch.empty(0, device="cpu")
        ctx.save_for_backward(own_tie)
        return box[0], own_tie

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (own_tie,) = ctx.saved_tensors
        zeros = [torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.tokens]
        if ctx.reply:
            creates_graph = torch.is_grad_enabled()
            if creates_graph and not ctx.is_tied:
                raise RuntimeError(
                    "recv: the gradient of a gradient was asked for (create_graph), but this received tensor leads back to "
                    "nothing on this rank; use sendrecv, or recv(..., token=...) with the token of a send"
                )
            token = _send(ctx.peer, ctx.reply, creates_graph, gradient, own_tie if creates_graph else None)
            zeros = [(zero + token).to(zero.dtype) for zero in zeros]
        return None, None, None, None, *zeros

"""mpicoll.nn.functional's send, recv and sendrecv: the gradient goes home, whichever way the ranks go through their graphs."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import mpicoll
from mpicoll.nn.functional import all_reduce, recv, send, sendrecv
from tests.support import agree
from tests.support.gradients import check, of_ranks


def ring() -> tuple[int, int]:
    """The rank before this one, and the one after; on one rank itself."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return (rank - 1) % size, (rank + 1) % size


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_round_the_ring(dtype: torch.dtype) -> None:
    """Two steps round, something nonlinear before, between and after."""

    def twice_round(x: Tensor) -> Tensor:
        left, right = ring()
        once = sendrecv(x.sin().t(), right, left)
        return (sendrecv(once * once, right, left, tag=3) * once).cos()

    check(twice_round, of_ranks(1, 2, dtype=dtype), twice=dist.get_world_size() < 3)


def test_to_all_others_in_any_order() -> None:
    """Each rank sends to all, itself too, by one tag; takes them in another order; shapes differ by message."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def everywhere(x: Tensor) -> Tensor:
        token = sum(send(x[: 1 + (rank + to) % 2] * (to + 1), to) for to in range(size))
        parts = [recv(by, token=token).sin() for by in reversed(range(size))]
        assert [len(part) for part in parts] == [1 + (rank + by) % 2 for by in reversed(range(size))]
        return torch.cat(parts)

    check(everywhere, of_ranks(2), twice=size < 3)


@pytest.mark.min_ranks(2)
def test_pipeline(rank: int, size: int) -> None:
    """A layer on each rank, several micro-batches under way: the first ranks have no loss, only tokens."""
    layers = [torch.nn.Linear(3, 3, dtype=torch.float64) for _ in range(size)]
    batches = torch.randn(3, 2, 3, dtype=torch.float64)
    expected = batches.clone().requires_grad_()
    hidden = expected
    for layer in layers:
        hidden = layer(hidden).tanh()
    hidden.square().sum().backward()
    gradients = [parameter.grad for parameter in layers[rank].parameters()]
    layers[rank].zero_grad()

    first = batches.clone().requires_grad_()
    ends = []
    for batch in range(3):
        x = first[batch] if rank == 0 else recv(rank - 1)
        y = layers[rank](x).tanh()
        ends.append(send(y, rank + 1) if rank < size - 1 else y.square().sum())
    # Backward one by one, and on the first rank in another order than on the others: numbers, not places, find the gradients.
    for end in ends if rank > 0 else reversed(ends):
        end.backward(retain_graph=True)
    for parameter, gradient in zip(layers[rank].parameters(), gradients, strict=True):
        agree(torch.allclose(parameter.grad, gradient, rtol=1e-10), f"{parameter.grad} {gradient}")
    agree(rank > 0 or torch.allclose(first.grad, expected.grad, rtol=1e-10))


@pytest.mark.min_ranks(2)
def test_a_second_derivative_that_only_one_rank_has(rank: int, size: int) -> None:
    """Elsewhere the loss is linear, and the graph of the first gradient would end where it came in."""
    left, right = ring()
    x = torch.full((2,), rank + 1.0, dtype=torch.float64, requires_grad=True)
    y = sendrecv(x * x, right, left)
    loss = y.pow(3).sum() if rank == 0 else y.sum()
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    if right == 0:  # its x to the sixth is rank 0's loss
        agree(first.eq(6 * (rank + 1.0) ** 5).all() and second.eq(30 * (rank + 1.0) ** 4).all(), f"{first} {second}")
    else:
        agree(first.eq(2 * (rank + 1.0)).all() and second.eq(2).all(), f"{first} {second}")


@pytest.mark.min_ranks(2)
def test_a_second_derivative_through_nothing_is_refused(rank: int, size: int) -> None:
    """Rank 1's received tensor leads back to nothing of rank 1: the second derivative would miss what went through it."""
    x = torch.full((2,), 2.0, requires_grad=True)
    if rank == 0:
        token = send(x, 1)
    elif rank == 1:
        y = recv(0)
        with pytest.raises(RuntimeError, match="use sendrecv, or recv"):
            y.pow(3).sum().backward(create_graph=True)
        y.pow(3).sum().backward()
    if rank == 0:
        token.backward()
    agree(rank != 0 or (x.grad.tolist() == [12.0, 12.0]))


@pytest.mark.min_ranks(2)
def test_messages_and_gradients_meet(rank: int, size: int) -> None:
    """1F1B: rank 1's next message is on its way to rank 0 while that waits for the gradient of its last one, by the same tag."""
    x = torch.full((2,), rank + 1.0, requires_grad=True)
    if rank == 0:
        send(x * 3, 1).backward()  # the message comes first, then the gradient
        y = recv(1)
        y.sum().backward()
        agree(y.tolist() == [20.0, 20.0] and x.grad.tolist() == [15.0, 15.0], f"{y} {x.grad}")
    elif rank == 1:
        token = send(x * 10, 0)
        received = recv(0)
        (received * 5).sum().backward()
        token.backward()
        agree(received.tolist() == [3.0, 3.0] and x.grad.tolist() == [10.0, 10.0], f"{x.grad}")
    else:
        agree(True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e5m2])
def test_the_receiver_allocates(dtype: torch.dtype, rank: int, size: int) -> None:
    """Shape and dtype come with the message: scalars, empty, transposed and expanded tensors, twenty dimensions."""
    left, right = ring()
    for shape in ((), (0,), (2, 3), (1,) * 20):
        of = [
            (torch.ones(shape) * (r + 1)).to(dtype).t() if len(shape) == 2 else torch.ones(shape).to(dtype) for r in range(size)
        ]
        found = sendrecv(of[rank], right, left)
        agree(found.dtype == dtype and found.shape == of[left].shape and not found.requires_grad, found)
        agree(torch.equal(found.float().real, of[left].float().real) if not dtype.is_complex else torch.equal(found, of[left]))
    expanded = torch.tensor(rank).to(dtype).expand(2, 3)
    agree(sendrecv(expanded, right, left).shape == (2, 3))


def test_only_what_requires_grad_has_a_gradient(rank: int, size: int) -> None:
    """Rank 0's tensor requires none: nothing travels back to it, and nobody waits for it."""
    left, right = ring()
    x = torch.full((2,), 2.0, requires_grad=rank != 0)
    y = sendrecv(x * x, right, left)
    agree(y.requires_grad == (left != 0 or rank != 0))  # through the token, where it does not through the message
    if y.requires_grad:
        y.sum().backward()
    agree((x.grad is None) if rank == 0 else x.grad.tolist() == [4.0, 4.0], x.grad)


def test_large_messages_both_ways(rank: int, size: int) -> None:
    """All ranks send before they receive, forwards and backwards: more than MPI keeps in its own buffers."""
    left, right = ring()
    x = torch.full((300_000,), rank + 1.0, requires_grad=True)
    token = send(x, right)
    x.data.zero_()  # a copy is on its way
    y = recv(left, token=token)
    agree(y.eq(left + 1).all())
    (y * y).sum().backward()
    agree(x.grad.eq(2 * (rank + 1)).all(), x.grad)


def test_a_message_of_another_kind(rank: int, size: int) -> None:
    """Of a plain send: its first bytes are no shape."""
    left, right = ring()
    work = mpicoll.isend(torch.arange(3), right)
    with pytest.raises(ValueError, match="was not sent by"):
        recv(left)
    work.wait()
    agree(sendrecv(torch.tensor(rank), right, left).item() == left)


def test_in_a_group(rank: int, size: int) -> None:
    group = dist.new_group(list(range(size)))
    left, right = ring()

    def mixed(x: Tensor) -> Tensor:
        return all_reduce(sendrecv(x, right, left, group).sin(), group=group) * sendrecv(x, left, right)

    check(mixed, of_ranks(2))
    with pytest.raises(ValueError, match="not in the group"):
        send(torch.ones(1), size, group)
    dist.destroy_process_group(group)

# python -m mpicoll.run -n 2 examples/ping_pong.py
"""Ping-pong between the first and the last rank: latency and bandwidth, blocking and immediate.

    blocking     rank 0: send, recv        partner: recv, send        one message is on its way at a time
    immediate    both: irecv, isend, wait                             two messages cross, one each way

Two ranks or more; those in between wait for the end. On several nodes the first and the last rank usually sit on
different ones, so that the table shows the network. Every message that arrives is compared with what was sent.
"""

import time
from collections.abc import Callable

import torch

import mpicoll as dist

SIZES = (8, 1024, 64 * 1024, 1024 * 1024, 8 * 1024 * 1024)  # bytes
Round = Callable[[torch.Tensor, torch.Tensor, int, int], None]  # outgoing, incoming, me, partner
WARM_UP = 3  # rounds that are not timed: the first message of a size may set up memory and connections


def content(sender: int, nbytes: int) -> torch.Tensor:
    """Bytes that tell who sent them: uint8 of shape (nbytes,)."""
    return (torch.arange(nbytes) % 251 + sender).to(torch.uint8)


def blocking(outgoing: torch.Tensor, incoming: torch.Tensor, me: int, partner: int) -> None:
    """One round trip: rank 0 serves, its partner returns."""
    if me == 0:
        dist.send(outgoing, dst=partner)
        dist.recv(incoming, src=partner)
    else:
        dist.recv(incoming, src=partner)
        dist.send(outgoing, dst=partner)


def immediate(outgoing: torch.Tensor, incoming: torch.Tensor, me: int, partner: int) -> None:
    """One exchange: both start at once. The receive is posted first, so that what arrives has a place to go."""
    receiving = dist.irecv(incoming, src=partner)
    sending = dist.isend(outgoing, dst=partner)
    receiving.wait()
    sending.wait()


def seconds_per_round(play: Round, nbytes: int, me: int, partner: int) -> float:
    """Plays some rounds, checks what came in, and returns the mean time of a round in seconds."""
    rounds = 200 if nbytes <= 64 * 1024 else 20
    outgoing = content(me, nbytes)
    incoming = torch.zeros_like(outgoing)
    for _ in range(WARM_UP):
        play(outgoing, incoming, me, partner)
    incoming.zero_()
    start = time.perf_counter()
    for _ in range(rounds):
        play(outgoing, incoming, me, partner)
    elapsed = time.perf_counter() - start
    assert torch.equal(incoming, content(partner, nbytes)), f"rank {me}: {nbytes} bytes from {partner} arrived changed"
    return elapsed / rounds


def main() -> None:
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    if size < 2:
        raise SystemExit("ping_pong.py needs at least 2 ranks: python -m mpicoll.run -n 2 examples/ping_pong.py")

    if rank == 0:
        print(f"rank 0 <-> rank {size - 1}; us: time of one message; MB/s: both directions together")
        print(f"{'bytes':>10} | {'send/recv us':>12} {'MB/s':>8} | {'isend/irecv us':>14} {'MB/s':>8}")
    if rank in (0, size - 1):
        partner = size - 1 - rank
        for nbytes in SIZES:
            # In a blocking round two messages travel one after the other, in an immediate round at the same time.
            one_way = seconds_per_round(blocking, nbytes, rank, partner) / 2
            crossing = seconds_per_round(immediate, nbytes, rank, partner)
            if rank == 0:
                print(
                    f"{nbytes:>10} | {one_way * 1e6:>12.1f} {nbytes / one_way / 1e6:>8.0f} "
                    f"| {crossing * 1e6:>14.1f} {2 * nbytes / crossing / 1e6:>8.0f}"
                )
    dist.barrier()
    if rank == 0:
        print("ping_pong: every message arrived unchanged")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""python exits.py CASE on 2 ranks: what is left undone when the program ends; nobody destroys the group, unless the case says so.

Prints "end of rank R" as its last line; what comes after that is mpicoll's and MPI's business.
"""

import atexit
import sys
import threading
import time

import torch

import mpicoll as dist


def nothing(rank: int) -> None:
    pass


def destroyed(rank: int) -> None:
    dist.destroy_process_group()


def without_finalize(rank: int) -> None:
    pass  # mpi4py.rc.finalize = False, set below


def messages(rank: int) -> None:
    """Nobody sends what the rank receives, and nobody receives what it sends."""
    dist.irecv(torch.zeros(4), 1 - rank)
    dist.irecv(torch.zeros(4), tag=9)
    dist.isend(torch.ones(4), 1 - rank, tag=10)


def dropped_isend(rank: int) -> None:
    """Rank 0 leaves at once; rank 1 takes the messages later, small ones and one that MPI does not buffer."""
    if rank == 0:
        for tag in range(5):
            dist.isend(torch.full((3,), float(tag)), 1, tag=tag)
        dist.isend(torch.full((1 << 20,), 7.0), 1, tag=9)
    else:
        time.sleep(1)
        received = [torch.zeros(3) for _ in range(5)]
        for tag in reversed(range(5)):
            dist.recv(received[tag], 0, tag=tag)
        large = torch.zeros(1 << 20)
        dist.recv(large, 0, tag=9)
        assert torch.all(large == 7)
        assert [t[0].item() for t in received] == list(range(5))


def collective_that_ends(rank: int) -> None:
    """Rank 1 is late; rank 0 has left it to its thread."""
    if rank == 1:
        time.sleep(1)
    tensor = torch.ones(1 << 20)
    dist.all_reduce(tensor, async_op=True)
    if rank == 1:
        dist.all_reduce(tensor, async_op=True)
    else:
        dist.all_reduce(tensor, async_op=True).get_future().then(lambda _: print("the callback ran", flush=True))


def collective_that_never_ends(rank: int) -> None:
    if rank == 0:
        dist.all_reduce(torch.ones(1), async_op=True)


def timed_out_collective(rank: int) -> None:
    """Rank 0 gives up and goes on with another group; the all_reduce stays in MPI."""
    from datetime import timedelta

    other = dist.new_group()
    if rank == 0:
        try:
            dist.all_reduce(torch.ones(1), async_op=True).wait(timedelta(seconds=0.3))
        except dist.OperationTimeout as error:
            print(error, flush=True)
        try:
            dist.barrier()
        except dist.GroupFailed as error:
            print(error, flush=True)
    dist.barrier(group=other)


def daemon_thread(rank: int) -> None:
    """A thread of the user's own computes and polls while the program ends."""
    work = dist.irecv(torch.zeros(1), 1 - rank, tag=2)

    def poll() -> None:
        while not work.is_completed():
            time.sleep(0.001)

    threading.Thread(target=poll, daemon=True).start()
    time.sleep(0.05)


def handler(rank: int) -> None:
    """A function of atexit that was registered before MPI, see below, uses the group in all ways. Rank 0 comes to it later."""
    dist.all_reduce(torch.ones(1 << 20), async_op=True)  # starts a thread


def clean_up() -> None:
    rank = dist.get_rank()
    if rank == 0:
        time.sleep(1)
    dist.barrier()
    tensor, received = torch.ones(1 << 20), torch.zeros(1)
    work, sent = dist.all_reduce(tensor, async_op=True), dist.isend(torch.ones(1), 1 - rank)
    dist.recv(received, 1 - rank)
    assert work is not None
    work.wait()
    sent.wait()
    names = [None, None]
    dist.all_gather_object(names, rank)
    print(f"handler of rank {rank}: {tensor[-1].item()} {received.item()} {names}\n", end="", flush=True)
    dist.destroy_process_group()


def main(case: str) -> None:
    if case == "handler":
        atexit.register(clean_up)
    if case == "without_finalize":
        import mpi4py

        mpi4py.rc.finalize = False
    if case == "users_mpi":
        from mpi4py import MPI

        assert MPI.Is_initialized()
    dist.init_process_group()
    rank = dist.get_rank()
    dist.all_reduce(torch.ones(1))
    if case == "users_finalize":
        from mpi4py import MPI

        dist.destroy_process_group()
        MPI.Finalize()
    elif case == "users_finalize_first":
        from mpi4py import MPI

        dist.all_reduce(torch.ones(1), async_op=True).wait()
        dist.irecv(torch.zeros(1), 1 - rank)
        MPI.Finalize()
        try:
            dist.all_reduce(torch.ones(1))
        except dist.MpicollError as error:
            print(error, flush=True)
        dist.destroy_process_group()
    elif case != "users_mpi":
        globals()[case](rank)
    print(f"end of rank {rank}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

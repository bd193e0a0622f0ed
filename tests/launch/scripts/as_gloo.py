"""Programs of PyTorch's tutorials, with "mpi" for "gloo": `as_gloo.py PROGRAM START [SIZE]` under plain python or torchrun.

PROGRAM: p2p, collectives, beside, ddp, or a fault of rank 1. START: mp.spawn, spawn, fork; or run, under torchrun.
"""

import os
import signal
import sys
import tempfile
import time

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

PROGRAM, START = sys.argv[1:3]
SIZE = int(sys.argv[3]) if len(sys.argv) > 3 else 2

if os.environ.get("API") == "mpicoll":
    import mpicoll as dist
else:
    import torch.distributed as dist


def say(text: str) -> None:
    sys.stdout.write(f"rank {dist.get_rank()} of {dist.get_world_size()}: {text}\n")
    sys.stdout.flush()


def p2p() -> None:
    ball = torch.zeros(1)
    if dist.get_rank() == 0:
        ball += 1
        dist.send(ball, dst=1)
        dist.recv(ball, src=1)
    elif dist.get_rank() == 1:
        dist.recv(ball, src=0)
        ball += 2
        dist.isend(ball, dst=0).wait()
    say(f"has {ball.item():g}")


def collectives() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    one = torch.ones(1)
    dist.all_reduce(one)
    assert one.item() == size
    parts = [torch.zeros(1) for _ in range(size)]
    dist.all_gather(parts, torch.full((1,), float(rank)))
    assert [part.item() for part in parts] == list(range(size))
    dist.scatter(one, [torch.full((1,), other + 1.0) for other in range(size)] if rank == 0 else [], src=0)
    assert one.item() == rank + 1
    say("right")


def beside() -> None:
    """A group over MPI of the ranks of Gloo, and workers."""
    group = dist.new_group(backend="mpi")
    total = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(total, group=group)
    assert total.item() == 3, total
    from mpicoll import rpc

    rpc.init_rpc(f"worker{dist.get_rank()}")
    assert rpc.rpc_sync("worker1", dist.get_rank) == 1
    rpc.shutdown()
    say(f"{dist.get_backend()} and {dist.get_backend(group)}")


def ddp() -> None:
    torch.manual_seed(0)
    alone, model = nn.Linear(10, 5), nn.Linear(10, 5)
    model.load_state_dict(alone.state_dict())
    for trained, share in ((DistributedDataParallel(model), slice(dist.get_rank(), None, SIZE)), (alone, slice(None))):
        inputs = torch.randn(16, 10, generator=torch.Generator().manual_seed(1))[share]
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.05)
        for _ in range(3):
            optimizer.zero_grad()
            trained(inputs).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(list(model.parameters()), list(alone.parameters()))
    say("as one process")


def shared_files() -> list[str]:
    """The files of /dev/shm that this process has mapped, also those whose names are gone."""
    with open("/proc/self/maps") as maps:
        return [line.split()[5] for line in maps if "/dev/shm/" in line]


def fault() -> None:
    sys.stderr.write(f"maps {' '.join(shared_files())}\n")  # in one piece
    if dist.get_rank() == 1:
        if PROGRAM == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if PROGRAM == "raise":
            raise ValueError("rank 1 has had enough")
        if PROGRAM == "exit":
            sys.exit(3)
        if PROGRAM == "abort":
            from mpi4py import MPI

            MPI.COMM_WORLD.Abort(7)
    if PROGRAM == "restart" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise ValueError("once more")
    if PROGRAM in ("restart", "none"):
        say("right")
        return
    if PROGRAM == "sleep":
        say("sleeps")
        time.sleep(100)
    dist.barrier()
    time.sleep(100)  # longer than the test may run


def start(rank: int, method: str, folder: str, port: int) -> None:
    """``method``: how the ranks meet."""
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    named: dict[str, object] = {"rank": rank, "world_size": SIZE}
    if method == "environment":
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(SIZE))
        named = {}
    if method == "tcp":
        named = {"init_method": f"tcp://localhost:{port}?rank={rank}&world_size={SIZE}"}
    if method == "file":
        named["init_method"] = f"file://{folder}/meeting"
    if method == "store":
        named["store"] = torch.distributed.TCPStore("localhost", port, SIZE, rank == 0)
    dist.init_process_group("gloo" if PROGRAM == "beside" else "mpi", **named)
    {"p2p": p2p, "collectives": collectives, "beside": beside, "ddp": ddp}.get(PROGRAM.partition("-")[0], fault)()
    dist.destroy_process_group()


def main() -> None:
    if START == "run":
        dist.init_process_group("mpi")
        {"collectives": collectives, "ddp": ddp}.get(PROGRAM, fault)()
        dist.destroy_process_group()
        return
    with tempfile.TemporaryDirectory() as folder:
        for method in ("environment", "tcp", "file", "store") if PROGRAM == "collectives" else ("arguments",):
            port = torch.distributed.TCPStore("localhost", 0, is_master=True).port
            if START == "mp.spawn":
                mp.spawn(start, (method, folder, port), SIZE)
                continue
            context = mp.get_context(START)
            processes = [context.Process(target=start, args=(rank, method, folder, port)) for rank in range(SIZE)]
            for process in processes:
                process.start()
            for process in processes:
                process.join()
            if any(process.exitcode for process in processes):
                print("ended", *(process.exitcode for process in processes))
                sys.exit(1)
            assert not os.listdir(folder)


if __name__ == "__main__":
    main()

"""python children.py CASE... on 2 ranks: processes that a rank starts. The ranks communicate before, meanwhile and after."""

import multiprocessing
import os
import subprocess
import sys
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

import mpicoll as dist


def summed() -> float:
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    return tensor.item()


def in_child(body: object) -> int:
    """Runs ``body()`` in a forked child that ends by sys.exit, as Python programs do; returns its exit status."""
    pid = os.fork()
    if pid == 0:
        body()  # type: ignore[operator]
        sys.exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def refused(call: object) -> None:
    try:
        call()  # type: ignore[operator]
    except dist.ForkedProcess as error:
        words = str(error)
    else:
        words = "not refused"
    assert "was forked from a rank" in words, words


def data_loader(rank: int) -> None:
    """Trains a little with batches from forked workers, gradients averaged by hand."""
    torch.manual_seed(0)
    inputs = torch.randn(64, 4)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    pending = dist.irecv(received := torch.zeros(1), 1 - rank)
    losses = []
    for _ in range(3):
        for x, y in DataLoader(data, batch_size=16, num_workers=2, multiprocessing_context="fork"):
            loss = torch.nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            works = [dist.all_reduce(p.grad, dist.ReduceOp.AVG, async_op=True) for p in model.parameters()]
            for work in works:
                work.wait()
            optimizer.step()
            losses.append(loss.item())
    dist.isend(torch.ones(1), 1 - rank).wait()
    pending.wait()
    assert received.item() == 1
    assert losses[-1] < losses[0]


def forked(rank: int) -> None:
    group = dist.new_group()
    dist.all_reduce(torch.ones(1), async_op=True).wait()
    receive = dist.irecv(torch.zeros(1), 1 - rank)
    for call in (
        lambda: dist.all_reduce(torch.ones(1)),
        lambda: dist.all_reduce(torch.ones(1), group=group),
        lambda: dist.all_reduce(torch.ones(1), async_op=True),
        lambda: dist.isend(torch.ones(1), 1 - rank),
        lambda: dist.recv(torch.ones(1), 1 - rank),
        dist.barrier,
        receive.wait,
        receive.is_completed,
    ):
        assert in_child(lambda call=call: refused(call)) == 7
    assert in_child(lambda: dist.destroy_process_group()) == 7
    assert in_child(lambda: 1 / 0) == 1  # a child's exception is its own: the job goes on
    assert in_child(lambda: None) == 7
    assert in_child(lambda: os._exit(5)) == 5
    dist.barrier()  # the message must not come while a child of the other rank still has to be refused its Work
    dist.isend(torch.ones(1), 1 - rank).wait()
    receive.wait()


def joins() -> None:
    try:
        dist.init_process_group()
    except dist.LaunchError as error:
        sys.exit(11 if "was started by a rank" in str(error) else 12)


def computes() -> None:
    from mpicoll import all_reduce, isend  # noqa: F401  what a training module imports

    assert torch.ones(3).sum() == 3
    sys.exit(13)


def spawned(rank: int) -> None:
    context = multiprocessing.get_context("spawn")
    for target, status in ((joins, 11), (computes, 13)):
        process = context.Process(target=target)
        process.start()
        process.join()
        assert process.exitcode == status, (target, process.exitcode)


def programs(rank: int) -> None:
    done = subprocess.run([sys.executable, "-c", "import torch, mpicoll; print('fine')"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "fine", ""), done
    assert subprocess.run(["true"]).returncode == 0
    assert os.system("true") == 0


def main(cases: list[str]) -> None:
    dist.init_process_group()
    for case in cases:
        assert summed() == 2
        globals()[case](dist.get_rank())
        assert summed() == 2
        time.sleep(0.1)
        print(f"rank {dist.get_rank()}: {case} is well\n", end="", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

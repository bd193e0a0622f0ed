# python -m mpicoll.run -n 2 examples/profile_step.py
"""Where does the time of a training step go? torch.profiler shows DDP's all_reduces beside forward, backward and optimizer.

    python -m mpicoll.run -n 2 examples/profile_step.py --traces FOLDER     rank-0.json, ... for Perfetto or chrome://tracing
    python -m mpicoll.run -n 2 examples/profile_step.py --plot step.png     a picture of one step; needs matplotlib

    [1] each operation of mpicoll is an event: `mpi:all_reduce`, from its call to its end
    [2] record_function names parts of the program
    [3] DDP reduces a bucket of gradients as soon as backward has computed it: an all_reduce that ends before backward costs
        nothing but the cores that it uses

Any number of ranks.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.autograd.profiler_util import FunctionEvent
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

import mpicoll as dist

WIDTH, LAYERS, BATCH, STEPS = 512, 6, 256, 5
PARTS = ("forward", "backward", "optimizer")
ALL_REDUCE = "mpi:all_reduce"
Span = tuple[float, float]  # begin and end, microseconds


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    with record_function("step"):  # [2]
        optimizer.zero_grad()
        with record_function("forward"):
            loss = model(x).square().mean()
        with record_function("backward"):
            loss.backward()
        with record_function("optimizer"):
            optimizer.step()


def spans(events: list[FunctionEvent], name: str) -> list[Span]:
    return sorted((event.time_range.start, event.time_range.end) for event in events if event.name == name)


def length(found: list[Span]) -> float:
    return sum(end - begin for begin, end in found)


def overlap(some: list[Span], others: list[Span]) -> float:
    """How long both are under way, in microseconds. The spans of ``others`` follow each other."""
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in some for b in others)


def report(events: list[FunctionEvent], nbytes: int) -> None:
    mean = {name: length(spans(events, name)) / STEPS / 1000 for name in ("step", *PARTS, ALL_REDUCE)}
    parts = ", ".join(f"{name} {mean[name]:.1f} ms" for name in PARTS)
    print(f"rank 0, mean of {STEPS} steps: {mean['step']:.1f} ms, of these {parts}")
    calls = spans(events, ALL_REDUCE)
    hidden = overlap(calls, spans(events, "backward")) / length(calls)
    size = f"{nbytes / 2**20:.1f} MiB"
    print(
        f"{len(calls) // STEPS} all_reduces in a step, {size}: {mean[ALL_REDUCE]:.1f} ms, of these {hidden:.0%} during backward"
    )


def plot(path: str, events: list[FunctionEvent]) -> None:
    """Draws the last step: a row for the parts of the program, below it a row for each all_reduce."""
    from matplotlib.figure import Figure

    begin, end = spans(events, "step")[-1]
    axes = (figure := Figure(figsize=(8, 5), layout="constrained")).subplots()
    for colour, name in zip(("tab:blue", "tab:orange", "tab:green"), PARTS, strict=True):
        first, last = spans(events, name)[-1]
        axes.broken_barh([((first - begin) / 1000, (last - first) / 1000)], (0.1, 0.8), color=colour, label=name)
    calls = [span for span in spans(events, ALL_REDUCE) if begin <= span[0] < end]
    for row, (first, last) in enumerate(calls, 1):
        label = "all_reduce" if row == 1 else None
        axes.broken_barh([((first - begin) / 1000, (last - first) / 1000)], (row + 0.1, 0.8), color="tab:red", label=label)
    axes.set(title="One step of DistributedDataParallel, rank 0", xlabel="ms")
    axes.set_yticks(
        [0.5 + row for row in range(len(calls) + 1)], ["program", *(f"bucket {row + 1}" for row in range(len(calls)))]
    )
    axes.invert_yaxis()
    axes.legend()
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--traces", type=Path, help="a folder that all ranks see; default: a temporary one")
    parser.add_argument("--plot", metavar="PNG", help="draw one step of rank 0 here")
    options = parser.parse_args()
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    folder = [options.traces or Path(tempfile.mkdtemp())]
    dist.broadcast_object_list(folder)  # that of rank 0

    torch.manual_seed(rank)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.randn(BATCH, WIDTH)
    for _ in range(3):
        step(model, optimizer, x)  # DDP arranges its buckets in the first steps
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as recorded:  # [1]
        for _ in range(STEPS):
            step(model, optimizer, x)
    folder[0].mkdir(parents=True, exist_ok=True)
    recorded.export_chrome_trace(str(folder[0] / f"rank-{rank}.json"))

    if rank == 0:
        events = list(recorded.events() or [])
        report(events, nbytes=4 * sum(parameter.numel() for parameter in model.parameters()))
        if options.plot:
            plot(options.plot, events)
        print(f"profile_step: {STEPS} steps of {size} ranks, {len(spans(events, ALL_REDUCE))} all_reduces")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

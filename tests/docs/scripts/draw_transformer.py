"""The losses of examples/transformer_fsdp2.py, with its own functions: in float32 and bfloat16, and resumed from a checkpoint."""

import argparse
import runpy
import tempfile
from pathlib import Path

import torch
from matplotlib.figure import Figure

import mpicoll as dist

example = runpy.run_path(str(Path(__file__).resolve().parents[3] / "examples" / "transformer_fsdp2.py"))
sharded, train, save, load, STEPS = (example[name] for name in ("sharded", "train", "save", "load", "STEPS"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--plot")
    options = parser.parse_args()
    dist.init_process_group()
    folder = [Path(tempfile.mkdtemp())]
    dist.broadcast_object_list(folder)  # that of rank 0
    model, optimizer = sharded(seed=0, dtype=torch.float32)
    losses = train(model, optimizer, 0, STEPS // 2)
    save(folder[0], model, optimizer)
    losses += train(model, optimizer, STEPS // 2, STEPS)
    again, optimizer = sharded(seed=1, dtype=torch.float32)
    load(folder[0], again, optimizer)
    resumed = train(again, optimizer, STEPS // 2, STEPS)
    assert resumed == losses[STEPS // 2 :]
    half = train(*sharded(seed=0, dtype=torch.bfloat16), 0, STEPS)
    if dist.get_rank() == 0:
        axes = (figure := Figure(figsize=(8, 4), layout="constrained")).subplots()
        axes.semilogy(losses, label="float32")
        axes.semilogy(half, label="bfloat16", linewidth=1)
        axes.semilogy(range(STEPS // 2, STEPS, 4), resumed[::4], "ko", markersize=3, label="resumed from the checkpoint")
        axes.set(title="A small GPT with FSDP2 learns to add", xlabel="step", ylabel="loss of the whole batch")
        axes.legend()
        figure.savefig(options.plot)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

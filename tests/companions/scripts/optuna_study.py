"""Optuna: one study on rank 0, whose trials train on all ranks (TorchDistributedTrial). One argument: the backend."""

import sys

import optuna
import torch
import torch.distributed as dist
from optuna_integration import TorchDistributedTrial
from report import STEPS, problem, report, share
from torch import nn
from torch.nn.parallel import DistributedDataParallel

TRIALS = 3
models: list[nn.Module] = []


def objective(single: optuna.Trial | None) -> float:
    trial = TorchDistributedTrial(single)  # rank 0's suggestions on all ranks
    rate = trial.suggest_float("rate", 0.01, 0.2)
    model, x, y = problem()
    models.append(model)
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=rate)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(parallel(share(x)), share(y))
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        trial.report(mean.item() / dist.get_world_size(), step)
        if trial.should_prune():
            raise optuna.TrialPruned
    return mean.item() / dist.get_world_size()


def main(backend: str) -> None:
    dist.init_process_group(backend)
    values = []
    if dist.get_rank() == 0:
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0), pruner=optuna.pruners.NopPruner())
        study.optimize(objective, n_trials=TRIALS)
        values = [trial.value for trial in study.trials]
    else:
        for _ in range(TRIALS):
            objective(None)
    report(values, models[-1])
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])

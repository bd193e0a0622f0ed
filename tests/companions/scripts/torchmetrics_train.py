"""torchmetrics beside DistributedDataParallel. One argument: the backend."""

import sys

import torch
import torch.distributed as dist
from report import RATE, STEPS, problem, report, share
from torch.nn.parallel import DistributedDataParallel
from torchmetrics import CatMetric, MeanSquaredError, MetricCollection, PearsonCorrCoef


def main(backend: str) -> None:
    dist.init_process_group(backend)
    model, x, y = problem()
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=RATE)
    metrics = MetricCollection([MeanSquaredError(), PearsonCorrCoef()])  # sums over ranks; moments gathered from ranks
    seen = CatMetric()
    losses, correlations = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        output = parallel(share(x))
        torch.nn.functional.mse_loss(output, share(y)).backward()
        optimizer.step()
        metrics.update(output.detach().flatten(), share(y).flatten())
        computed = metrics.compute()
        losses.append(computed["MeanSquaredError"].item())
        correlations.append(computed["PearsonCorrCoef"].item())
        metrics.reset()
    seen.update(torch.arange(dist.get_rank() + 1.0))  # another length on each rank
    report(losses, model, correlations=correlations, seen=seen.compute().tolist())
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])

"""pytorch-ignite: ignite.distributed.Parallel, auto_model and a metric. One argument: the backend."""

import sys

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events
from ignite.metrics import MeanSquaredError
from report import RATE, SAMPLES, STEPS, problem, report
from torch.utils.data import DataLoader, TensorDataset


def train(local_rank: int) -> None:
    model, x, y = problem()
    parallel = idist.auto_model(model)
    optimizer = idist.auto_optim(torch.optim.SGD(parallel.parameters(), lr=RATE))
    batches = idist.auto_dataloader(TensorDataset(x, y), batch_size=SAMPLES, shuffle=False)
    assert isinstance(batches, DataLoader)
    metric = MeanSquaredError()
    losses = []

    def step(engine: Engine, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        optimizer.zero_grad()
        output = parallel(batch[0])
        torch.nn.functional.mse_loss(output, batch[1]).backward()
        optimizer.step()
        return output.detach(), batch[1]

    trainer = Engine(step)
    metric.attach(trainer, "error")  # over all ranks, each epoch
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda engine: losses.append(engine.state.metrics["error"]))
    trainer.run(batches, max_epochs=STEPS)
    report(losses, model, gathered=idist.all_gather(idist.get_rank()), local_rank=local_rank)


if __name__ == "__main__":
    with idist.Parallel(backend=sys.argv[1]) as parallel:
        parallel.run(train)

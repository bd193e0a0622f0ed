"""Lightning. Arguments: the backend of DDPStrategy, or the name of a strategy."""

import sys

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.plugins.environments import MPIEnvironment
from lightning.pytorch.strategies import DDPStrategy
from report import RATE, SAMPLES, STEPS, problem, report
from torch.utils.data import DataLoader, TensorDataset


class Regression(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.x, self.y = problem()
        self.losses: list[float] = []

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(self.layers(batch[0]), batch[1])
        self.log("loss", loss, sync_dist=True, on_step=True)
        self.losses.append(self.all_gather(loss.detach()).mean().item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=RATE)


def main(asked: str) -> None:
    seed_everything(0)
    strategy = DDPStrategy(process_group_backend="mpi") if asked == "mpi" else asked
    plugins = [MPIEnvironment()] if MPIEnvironment.detect() else []  # under torchrun: what Lightning finds itself
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=strategy, plugins=plugins, max_epochs=STEPS, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    model = Regression()
    trainer.fit(model, DataLoader(TensorDataset(model.x, model.y), batch_size=SAMPLES // 2))
    report(model.losses, model.layers, logged=trainer.logged_metrics["loss"].item())
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])

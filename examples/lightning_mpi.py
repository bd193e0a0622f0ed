# python -m mpicoll.run -n 2 examples/lightning_mpi.py
"""Lightning over MPI: DistributedDataParallel with `process_group_backend="mpi"`, ranks and nodes from MPIEnvironment.

    [1] Lightning's own choice for CPUs is Gloo, under mpirun too
    [2] ranks and nodes as mpirun has started them; Lightning starts no processes of its own
    [3] `sync_dist=True`: the mean over all ranks

The network learns to tell whether a point is inside a circle. Any number of ranks on one node. Needs `pip install lightning`.
"""

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.plugins.environments import MPIEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Circle(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
        self.losses: list[float] = []  # one for each epoch, over all ranks

    def training_step(self, batch: list[Tensor]) -> Tensor:
        points, inside = batch
        loss = nn.functional.binary_cross_entropy_with_logits(self.layers(points), inside)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)  # [3]
        return loss

    def on_train_epoch_end(self) -> None:
        self.losses.append(self.trainer.callback_metrics["loss"].item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def main() -> None:
    seed_everything(0, verbose=False)
    points = torch.rand(960, 2) * 2 - 1
    data = TensorDataset(points, (points.norm(dim=1, keepdim=True) < 0.8).float())
    ranks = MPIEnvironment()
    trainer = Trainer(
        accelerator="cpu", devices=ranks.world_size(), max_epochs=15,
        strategy=DDPStrategy(process_group_backend="mpi"), plugins=[ranks],  # [1] [2]
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    model = Circle()
    trainer.fit(model, DataLoader(data, batch_size=60 // ranks.world_size(), shuffle=True))

    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    first = weights.clone()
    dist.broadcast(first, src=0)
    assert torch.equal(weights, first), f"rank {dist.get_rank()} has other weights than rank 0"
    assert model.losses[-1] < model.losses[0] / 2, model.losses
    if trainer.is_global_zero:
        print(f"backend {dist.get_backend()}: loss {model.losses[0]:.1f} in the first epoch, {model.losses[-1]:.1f} in the last")
        print(f"lightning_mpi: {dist.get_world_size()} ranks hold the same {len(weights):,} weights")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

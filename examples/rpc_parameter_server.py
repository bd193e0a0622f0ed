# python -m mpicoll.run -n 3 examples/rpc_parameter_server.py
"""A parameter server: the weights live on rank 0, trainers on the other ranks fetch them, and send gradients back.

    rank 0: the server                               ranks 1, 2 ...: trainers, each with its share of the images
    the weights              ----- weights() ---->   [1] fetch the weights as they are now
                                                     [2] forward: the loss of a batch
    their gradients          <---- backward() ----   [3] backward: through the fetch, to where the weights live
    an optimizer             <------ step() ------   [4] step, over there

Nobody waits for anybody: a trainer's gradient may be that of weights which another has changed meanwhile (asynchronous SGD),
so that no two runs are the same to the last bit. Any number of ranks; a single one is its own trainer.
Needs `pip install scikit-learn` (its 1797 images of handwritten digits come with it).
"""

import statistics

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

import mpicoll as dist
import mpicoll.autograd as dist_autograd
from mpicoll import rpc
from mpicoll.optim import DistributedOptimizer
from mpicoll.rpc import RRef

EPOCHS, BATCH, TRAINING_IMAGES = 8, 48, 1440  # the other 357 images are the test


def load() -> tuple[Tensor, Tensor]:
    """Images (1797, 64) float32 in 0..1 and labels (1797,) int64, shuffled alike on every rank."""
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return torch.from_numpy(pixels).float()[order] / 16, torch.from_numpy(labels)[order]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


class ParameterServer:
    """Lives on rank 0; the others hold references to it and to its weights."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.network = network()

    def references(self) -> list[RRef[Tensor]]:
        """To the weights, where they are: what optimizers need."""
        return [RRef(parameter) for parameter in self.network.parameters()]

    def weights(self) -> dict[str, Tensor]:
        """As they are now: copies at who has called."""
        return dict(self.network.named_parameters())

    def test(self) -> tuple[float, float]:
        """Loss and accuracy with the images that nobody trains on."""
        images, labels = (data[TRAINING_IMAGES:] for data in load())
        with torch.no_grad():
            logits = self.network(images)
        return cross_entropy(logits, labels).item(), (logits.argmax(dim=1) == labels).float().mean().item()


def train(server: RRef[ParameterServer], trainer: int, trainers: int) -> list[float]:
    """Runs on a trainer, with every ``trainers``-th training image: the loss of each of its batches."""
    images, labels = (data[:TRAINING_IMAGES][trainer::trainers] for data in load())
    # What it remembers (Adam's averages) is on the server, too, one set for each trainer.
    optimizer = DistributedOptimizer(torch.optim.Adam, server.rpc_sync().references(), lr=0.01)
    with torch.device("meta"):
        layers = network()  # without weights of its own: these come from the server, anew for every batch
    random = torch.Generator().manual_seed(trainer)
    losses = []
    for batch in (batch for _ in range(EPOCHS) for batch in torch.randperm(len(images), generator=random).split(BATCH)):
        # Messages within a context are part of the graph that its backward pass goes through.
        with dist_autograd.context() as context_id:
            weights = server.rpc_sync().weights()  # [1]
            loss = cross_entropy(functional_call(layers, weights, images[batch]), labels[batch])  # [2]
            dist_autograd.backward(context_id, [loss])  # [3] gradients stay with the context, apart from other trainers'
            optimizer.step(context_id)  # [4]
        losses.append(loss.item())
    return losses


def serve(trainers: list[str]) -> None:
    """Has them train the server's weights, all at once."""
    server = ParameterServer()
    untrained, _ = server.test()
    reference = RRef(server)
    count = len(trainers)
    training = [rpc.rpc_async(name, train, (reference, number, count), timeout=0) for number, name in enumerate(trainers)]
    curves = [future.wait() for future in training]

    for name, curve in zip(trainers, curves, strict=True):
        # A trainer that comes late begins with what the others have learnt.
        print(f"{name}: loss {curve[0]:.3f} -> {statistics.mean(curve[-5:]):.3f} in {len(curve)} steps")
    loss, accuracy = server.test()
    print(f"test images: loss {untrained:.3f} -> {loss:.3f}")
    print(f"rpc_parameter_server: test accuracy {accuracy:.1%} with {count} trainer(s)")


def main() -> None:
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    rpc.init_rpc(f"worker{rank}")
    if rank == 0:
        serve([f"worker{other}" for other in range(1, size)] or ["worker0"])
    rpc.shutdown()  # trainers answer calls until the server comes here, too
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

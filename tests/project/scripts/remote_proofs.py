"""Proves what the examples of remote calls show, with their own classes, in one job of 2 ranks or more."""

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import mpicoll as dist
import mpicoll.autograd as dist_autograd
from mpicoll import rpc
from mpicoll.optim import DistributedOptimizer
from mpicoll.rpc import RRef
from tests.project.scripts.example import imported

parameter_server = imported("rpc_parameter_server")
master, layers = imported("master", "rpc_pipeline"), imported("resnet", "rpc_pipeline").layers
SMALL = argparse.Namespace(width=32, pixels=32, batch=32, batches=1)
TOLERANCE = 1e-4  # of a gradient's largest element; float32, summed over micro-batches in whatever order they end in


def weights(shard: RRef[nn.Module]) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in shard.local_value().parameters()]


def gradients(shard: RRef[nn.Module], context_id: int) -> list[Tensor]:
    """Of all parameters, in their order. They are in the context: `.grad` stays None."""
    found = dist_autograd.get_gradients(context_id)
    return [found[parameter] for parameter in shard.local_value().parameters()]


def all_shards(pipeline: object, function: object, *arguments: object) -> list[Tensor]:
    """What ``function`` returns where each shard is, one list after the other."""
    return [tensor for shard in pipeline.shards for tensor in rpc.rpc_sync(shard.owner(), function, (shard, *arguments))]


def of_one_process(before: list[Tensor], images: Tensor, labels: Tensor, micro_batches: int) -> list[Tensor]:
    """The gradients of the same network with the same weights, here alone, without RPC."""
    model = nn.Sequential(layers(0, SMALL.width), layers(1, SMALL.width))
    for parameter, weight in zip(model.parameters(), before, strict=True):
        parameter.data.copy_(weight)
    scores = torch.cat([model(piece) for piece in images.chunk(micro_batches)])
    return list(torch.autograd.grad(cross_entropy(scores, labels), list(model.parameters())))


def step_of_the_pipeline(micro_batches: int) -> None:
    pipeline, [(images, labels)] = master.Pipeline(SMALL.width, micro_batches), master.batches(SMALL)
    before = all_shards(pipeline, weights)
    optimizer = DistributedOptimizer(torch.optim.Adam, pipeline.parameter_rrefs(), lr=1e-3)
    with dist_autograd.context() as context_id:
        dist_autograd.backward(context_id, [cross_entropy(pipeline(images), labels)])
        found = all_shards(pipeline, gradients, context_id)
        optimizer.step(context_id)
    expected = of_one_process(before, images, labels, micro_batches)
    differences = [((a - b).abs().max() / b.abs().max()).item() for a, b in zip(found, expected, strict=True)]
    assert max(differences) <= TOLERANCE, f"gradients differ by {max(differences):.1e} from one process"
    stay = [number for number, pair in enumerate(zip(before, all_shards(pipeline, weights), strict=True)) if torch.equal(*pair)]
    assert not stay, f"the step does not change the parameters {stay} of {len(before)}"
    print(f"rpc_pipeline: gradients as in one process, {micro_batches} micro-batch(es)", flush=True)


def training_by_the_parameter_server(trainers: list[str]) -> None:
    server = parameter_server.ParameterServer()
    before = [parameter.detach().clone() for parameter in server.network.parameters()]
    parameter_server.ParameterServer = lambda: server
    parameter_server.serve(trainers)
    for (name, parameter), old in zip(server.network.named_parameters(), before, strict=True):
        assert not torch.equal(parameter, old), f"{name} on the server is what it was before the training"
    print(f"rpc_parameter_server: {len(before)} parameters are trained", flush=True)


def main() -> None:
    dist.init_process_group()
    names = [*master.HOMES, *(f"trainer{rank}" for rank in range(2, dist.get_world_size()))]
    rpc.init_rpc(names[dist.get_rank()], rpc_backend_options=rpc.MPIRpcBackendOptions(rpc_timeout=300))
    if dist.get_rank() == 0:
        for micro_batches in (1, 2):
            step_of_the_pipeline(micro_batches)
        training_by_the_parameter_server(names[1:])
    rpc.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""What the tests of distributed autograd differentiate: a layer wherever it is, and the same in one process."""

import torch
from torch import Tensor, nn

import mpicoll.autograd as dist_autograd
from mpicoll import rpc
from mpicoll.rpc.rref import RRef


class Layer(nn.Module):
    """Equal on all workers."""

    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(4, 4, generator=generator, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)

    def parameter_rrefs(self) -> list[RRef[Tensor]]:
        return [RRef(parameter) for parameter in self.parameters()]

    def gradient(self, context_id: int) -> Tensor | None:
        return dist_autograd.get_gradients(context_id).get(self.weight)

    def own_gradient(self) -> Tensor | None:
        return self.weight.grad


def x_of(rank: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).requires_grad_()


def near(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and torch.allclose(a, b, rtol=0, atol=1e-12)


def apply(rref: RRef[Layer], x: Tensor) -> Tensor:
    return rref.local_value()(x)  # type: ignore[no-any-return]


def through(rrefs: list[RRef[Layer]], x: Tensor) -> Tensor:
    """Each layer where it is, called from the one before (nested calls)."""
    y = rrefs[0].local_value()(x)
    return rpc.rpc_sync(rrefs[1].owner(), through, (rrefs[1:], y)) if len(rrefs) > 1 else y  # type: ignore[no-any-return]


def one_process(x: Tensor, layers: int) -> tuple[Tensor, list[Tensor]]:
    """The gradient of x, and of the weight of each layer."""
    x = x.detach().requires_grad_()
    modules = [Layer() for _ in range(layers)]
    y = x
    for module in modules:
        y = module(y)
    y.square().sum().backward()
    assert x.grad is not None
    return x.grad, [module.weight.grad for module in modules]  # type: ignore[misc]

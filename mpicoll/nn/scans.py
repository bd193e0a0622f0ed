"""scan and exscan that take part in autograd: sums over the ranks up to this one. torch.distributed.nn does not have them."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from mpicoll._base.errors import UnsupportedReduction
from mpicoll._tensors.reductions import Op
from mpicoll.nn import linear_collectives
from mpicoll.nn.linear import apply
from mpicoll.nn.nonlinear import checked_name
from mpicoll.nn.preflight import Preflight, description

SUM = ReduceOp.SUM


def scan(tensor: Tensor, op: Op = SUM, group: ProcessGroup | None = None) -> Tensor:
    """Returns the sum of the tensors of ranks 0 to this one (an inclusive prefix sum; collective).

    The gradient is the sum of the gradients of this rank and the ranks after it. torch.distributed.nn has no such function.

    Args:
        tensor: Of one shape and dtype on all ranks.
        op: SUM. `mpicoll.scan` has other reductions, without gradients.
        group: None means the default group. Its order of the ranks counts.

    Returns:
        A new tensor.

    Raises:
        ValueError: On every rank: shape, dtype or op differ, or the group has another backend.
        UnsupportedReduction: On every rank: the op is not SUM.

    Example:
        >>> x = torch.ones(1, requires_grad=True)
        >>> y = dist.nn.scan(x)  # 1 on rank 0, 2 on rank 1
        >>> y.sum().backward()
        >>> x.grad.item() == dist.get_world_size() - dist.get_rank()  # the sums of that many ranks contain it
        True
    """
    return _scanned("scan", tensor, op, group, is_inclusive=True)


def exscan(tensor: Tensor, op: Op = SUM, group: ProcessGroup | None = None) -> Tensor:
    """Returns the sum of the tensors of the ranks before this one (an exclusive prefix sum; collective).

    The gradient is the sum of the gradients of the ranks after this one. torch.distributed.nn has no such function.

    Args:
        tensor: Of one shape and dtype on all ranks.
        op: SUM. `mpicoll.exscan` has other reductions, without gradients.
        group: None means the default group. Its order of the ranks counts.

    Returns:
        A new tensor: zeros on rank 0 of the group, which must contribute to the loss, too.

    Raises:
        ValueError: On every rank: shape, dtype or op differ, or the group has another backend.
        UnsupportedReduction: On every rank: the op is not SUM.

    Example:
        >>> x = torch.ones(1, requires_grad=True)
        >>> y = dist.nn.exscan(x)  # 0 on rank 0, 1 on rank 1
        >>> y.sum().backward()
        >>> x.grad.item() == dist.get_world_size() - 1 - dist.get_rank()
        True
    """
    return _scanned("exscan", tensor, op, group, is_inclusive=False)


def _scanned(operation: str, tensor: Tensor, op: Op, group: ProcessGroup | None, is_inclusive: bool) -> Tensor:
    with Preflight(operation, group, [tensor]) as ranks:
        name = checked_name(operation, tensor, op)
        if name != "SUM":
            raise UnsupportedReduction(
                f"{operation}: {name} has no gradient here; use SUM, or mpicoll.{operation} without gradients"
            )
        ranks.equal = description(tensor)
    linear = linear_collectives.scan(group, ranks.rank, ranks.size, is_inclusive)
    return apply(linear, [tensor], ranks.requires_grad)[0]

"""torch.distributed.nn.functional over MPI: collectives that take part in autograd, scan, exscan, send, recv, sendrecv.

Signatures and return values are torch's. The gradient is that of the SUM of all ranks' losses, as in torch: the gradient on rank
r adds up what its tensor contributed to the loss of every rank. Nothing is divided by the number of ranks: if every rank computes
the same loss, it counts once for each rank. Any strides, complex dtypes and gradients of gradients work. Shapes may be uneven.
Some gradients that torch silently gets wrong are right here: AVG (reduce, reduce_scatter), PRODUCT, MIN and MAX, and broadcast in
a group other than the default one. What has no gradient is an error before data moves.

The ranks first check op, dtype and shapes together, by one all_reduce of 32 bytes: what does not fit together is a ValueError on
every rank. If the tensor of one rank requires grad, the results do on all ranks, because the backward pass of a collective is a
collective: every rank must go through it, in the same order. A result that a rank does not need (the zeros of gather, say) must
contribute to its loss, too.

Names that are not defined here (``group``, ``ReduceOp``, torch's private names) are torch's own objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch.distributed import ProcessGroup

from mpicoll._tensors import checks
from mpicoll.nn import linear_collectives
from mpicoll.nn.linear import apply
from mpicoll.nn.linear_collectives import Shape, Shapes
from mpicoll.nn.messages import recv, send, sendrecv
from mpicoll.nn.preflight import Preflight, description
from mpicoll.nn.reductions import all_reduce, exscan, reduce, reduce_scatter, scan

__all__ = [
    "_all_gather_base", "all_gather", "all_reduce", "all_to_all", "all_to_all_single", "broadcast", "exscan", "gather",
    "recv", "reduce", "reduce_scatter", "scan", "scatter", "send", "sendrecv",
]  # fmt: skip


def broadcast(tensor: Tensor, src: int, group: ProcessGroup | None = None) -> Tensor:
    """Returns ``src``'s tensor on every rank (collective).

    Unlike torch's, it has the right gradient in every group, not only in the default one.

    Args:
        tensor: Of one shape and dtype on all ranks. On ranks other than ``src`` the values are not used and the gradient is 0.
        src: Global rank.
        group: None means the default group.

    Returns:
        A new tensor. Its backward pass reduces the gradients to ``src``.

    Raises:
        ValueError: On every rank: shape, dtype or src differ, or src is not in the group.

    Example:
        >>> x = torch.tensor([2.0], requires_grad=True)
        >>> dist.nn.broadcast(x, src=0).sum().backward()  # on 2 ranks
        >>> x.grad.item() == (2.0, 0.0)[dist.get_rank()]  # rank 0 gets the sum of all ranks' gradients
        True
    """
    with Preflight("broadcast", group, [tensor]) as ranks:
        checks.movable("broadcast", tensor)
        root = ranks.group_rank("src", src)
        ranks.equal = f"{description(tensor)} from rank {src}"
    return apply(linear_collectives.broadcast(group, ranks.rank, root), [tensor], ranks.requires_grad)[0]


def gather(tensor: Tensor, dst: int = 0, group: ProcessGroup | None = None) -> tuple[Tensor, ...]:
    """Returns every rank's tensor on ``dst``, and zeros of the same shapes on the other ranks (collective).

    Unlike torch's, it takes shapes that differ between ranks.

    Args:
        tensor: Of one dtype on all ranks; shapes may differ.
        dst: Global rank.
        group: None means the default group.

    Returns:
        One new tensor for each rank. On ranks other than ``dst`` the zeros must contribute to the loss, too: they lead back to
        ``tensor``.

    Raises:
        ValueError: On every rank: dtype or dst differ, or dst is not in the group.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> torch.cat(dist.nn.gather(x, dst=0)).sum().backward()
        >>> x.grad
        tensor([1., 1.])
    """
    with Preflight("gather", group, [tensor]) as ranks:
        checks.movable("gather", tensor)
        root = ranks.group_rank("dst", dst)
        ranks.equal, ranks.even = f"{tensor.dtype} to rank {dst}", tuple(tensor.shape)
    linear = linear_collectives.gather(group, ranks.rank, root, _all_shapes(tensor, ranks))
    return apply(linear, [tensor], ranks.requires_grad)


def scatter(tensors: Sequence[Tensor] | None, src: int = 0, group: ProcessGroup | None = None) -> Tensor:
    """Returns on rank i the i-th tensor of ``src`` (collective; two small broadcasts tell the shapes first).

    Unlike torch's, it takes shapes that differ, and needs tensors on ``src`` only.

    Args:
        tensors: On ``src`` one tensor for each rank, of one dtype; shapes may differ. On other ranks None, or tensors of the
            same shapes and dtype, which get gradients of 0.
        src: Global rank.
        group: None means the default group.

    Returns:
        A new tensor.

    Raises:
        ValueError: On every rank: the list is too short or too long, dtypes or src differ, or a list does not fit that of src.

    Example:
        >>> rank = dist.get_rank()  # 0 or 1
        >>> x = dist.nn.scatter([torch.zeros(1), torch.ones(1)] if rank == 0 else None, src=0)
        >>> x.item() == rank
        True
    """
    given = [] if tensors is None else tensors
    with Preflight("scatter", group, given) as ranks:
        root = ranks.group_rank("src", src)
        if ranks.rank == root or tensors is not None:
            checks.tensors("scatter", "tensors", tensors, ranks.size)
        if ranks.rank == root:
            checks.same_dtype("scatter", *((f"tensors[{i}]", t) for i, t in enumerate(given)))
        ranks.equal = f"from rank {src}"
    shapes, dtype = _offered(given, ranks, src)
    outputs = None if given else [torch.empty(shapes[ranks.rank], dtype=dtype)]
    return apply(linear_collectives.scatter(group, ranks.rank, root, shapes, outputs), given, ranks.requires_grad)[0]


def all_gather(tensor: Tensor, group: ProcessGroup | None = None) -> tuple[Tensor, ...]:
    """Returns every rank's tensor on every rank (collective).

    Unlike torch's, it takes shapes that differ between ranks.

    Args:
        tensor: Of one dtype on all ranks. Shapes may differ; only then they are exchanged first, as objects.
        group: None means the default group.

    Returns:
        One new tensor for each rank. The backward pass adds up what all ranks' losses have for ``tensor``.

    Raises:
        ValueError: On every rank: dtypes differ.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> whole = torch.cat(dist.nn.all_gather(x))  # 4 elements on 2 ranks
        >>> whole.sum().backward()
        >>> x.grad  # both ranks have a loss
        tensor([2., 2.])
    """
    with Preflight("all_gather", group, [tensor]) as ranks:
        checks.movable("all_gather", tensor)
        ranks.equal, ranks.even = str(tensor.dtype), tuple(tensor.shape)
    linear = linear_collectives.all_gather(group, ranks.rank, _all_shapes(tensor, ranks))
    return apply(linear, [tensor], ranks.requires_grad)


def _all_gather_base(output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Returns ``output_tensor``, whose i-th block is rank i's input (collective).

    Unlike torch's, it has a gradient on the CPU.

    Args:
        output_tensor: Overwritten. Group size times the input's numel, concatenated (n*k, ...) or stacked (n, k, ...).
        input_tensor: Of one shape and dtype on all ranks.
        group: None means the default group.

    Returns:
        ``output_tensor``, which now depends on ``input_tensor``.

    Raises:
        ValueError: On every rank: sizes or dtypes do not fit together.

    Example:
        >>> x = torch.ones(1, requires_grad=True)
        >>> dist.nn._all_gather_base(torch.empty(2), x).tolist()  # on 2 ranks
        [1.0, 1.0]
    """
    name = "_all_gather_base"
    with Preflight(name, group, [input_tensor]) as ranks:
        checks.movable(name, input_tensor, "input_tensor")
        checks.movable(name, output_tensor, "output_tensor")
        checks.same_dtype(name, ("output_tensor", output_tensor), ("input_tensor", input_tensor))
        needed = input_tensor.numel() * ranks.size
        checks.same_numel(name, "output_tensor", output_tensor.numel(), f"input_tensor x {ranks.size} ranks", needed)
        checks.writable(name, output_tensor, "output_tensor")
        ranks.equal = description(input_tensor)
    shapes = tuple(input_tensor.shape), tuple(output_tensor.shape)
    linear = linear_collectives.all_gather_single(group, *shapes, [output_tensor])
    return apply(linear, [input_tensor], ranks.requires_grad)[0]


def all_to_all(
    output_tensor_list: Sequence[Tensor], input_tensor_list: Sequence[Tensor], group: ProcessGroup | None = None
) -> tuple[Tensor, ...]:
    """Returns the outputs: ``output_tensor_list[i]`` on rank j is ``input_tensor_list[j]`` of rank i (collective).

    Unlike torch's, it raises on every rank if the sizes do not fit together.

    Args:
        output_tensor_list: Overwritten. One tensor for each rank, of the shape that this rank sends.
        input_tensor_list: One tensor for each rank. All tensors of all ranks have one dtype.
        group: None means the default group.

    Returns:
        The tensors of ``output_tensor_list``, which now depend on the inputs.

    Raises:
        ValueError: On every rank: dtypes differ, or a rank sends more or less than the receiver expects.

    Example:
        >>> rows = torch.arange(4.0).view(2, 2)  # on 2 ranks
        >>> columns = dist.nn.all_to_all([torch.empty(2), torch.empty(2)], list(rows))
        >>> torch.equal(columns[1], rows[dist.get_rank()])
        True
    """
    name = "all_to_all"
    with Preflight(name, group, input_tensor_list if isinstance(input_tensor_list, (list, tuple)) else ()) as ranks:
        inputs = checks.tensors(name, "input_tensor_list", input_tensor_list, ranks.size)
        outputs = checks.tensors(name, "output_tensor_list", output_tensor_list, ranks.size)
        checks.same_dtype(name, ("input_tensor_list[0]", inputs[0]), *(("a tensor", t) for t in [*inputs, *outputs]))
        for index, tensor in enumerate(outputs):
            checks.writable(name, tensor, f"output_tensor_list[{index}]")
        ranks.pairs([tensor.numel() for tensor in inputs], [tensor.numel() for tensor in outputs])
        ranks.equal = str(inputs[0].dtype)
        sends, receives = (tuple(tuple(tensor.shape) for tensor in tensors) for tensors in (inputs, outputs))
        ranks.about = f"{inputs[0].dtype}, sends {_joined(sends)}, receives {_joined(receives)}"
    return apply(linear_collectives.all_to_all(group, sends, receives, outputs), inputs, ranks.requires_grad)


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Sends rows of dim 0 of ``input`` to each rank and returns ``output``, the rows from each rank (collective).

    Unlike torch's, it raises on every rank if the splits do not fit together.

    Args:
        output: Overwritten. Rows have as many elements as those of ``input``, and the same dtype.
        input: Rows for rank 0, then those for rank 1, and so on.
        output_split_sizes: Numbers of rows from each rank, 0 allowed; None: equal shares.
        input_split_sizes: Numbers of rows to each rank, 0 allowed; None: equal shares.
        group: None means the default group.

    Returns:
        ``output``, which now depends on ``input``.

    Raises:
        ValueError: On every rank: splits do not add up, dtypes or rows differ, or a rank sends more or fewer rows than the
            receiver expects.

    Example:
        >>> x = torch.tensor([1.0, 2.0])
        >>> y = dist.nn.all_to_all_single(torch.empty(2), x)  # on 2 ranks
        >>> y.tolist() == [1.0 + dist.get_rank()] * 2
        True
    """
    name = "all_to_all_single"
    with Preflight(name, group, [input]) as ranks:
        for argument, tensor in (("output", output), ("input", input)):
            checks.movable(name, tensor, argument)
            if tensor.dim() == 0:
                raise ValueError(f"{name}: {argument} needs a dim 0 to split")
        checks.same_dtype(name, ("output", output), ("input", input))
        checks.writable(name, output, "output")
        sends = checks.splits(name, "input_split_sizes", input_split_sizes, input.size(0), ranks.size)
        receives = checks.splits(name, "output_split_sizes", output_split_sizes, output.size(0), ranks.size)
        row = input.shape[1:].numel()
        checks.same_numel(name, "a row of input", row, "a row of output", output.shape[1:].numel())
        ranks.pairs(sends, receives)
        ranks.equal = f"{input.dtype}, rows of {row} elements"
        ranks.about = f"{ranks.equal}, sends {sends}, receives {receives} rows"
    shapes = tuple(input.shape), tuple(output.shape)
    linear = linear_collectives.all_to_all_single(group, shapes, sends, receives, [output])
    return apply(linear, [input], ranks.requires_grad)[0]


def _joined(shapes: Sequence[Shape]) -> str:
    return ", ".join(map(str, shapes))


def _all_shapes(tensor: Tensor, ranks: Preflight) -> Shapes:
    """Returns every rank's shape (collective if they differ)."""
    own = tuple(tensor.shape)
    if ranks.is_even:
        return (own,) * ranks.size
    shapes: list[Any] = [None] * ranks.size
    torch_dist.all_gather_object(shapes, own, group=ranks.group)
    return tuple(shapes)


def _offered(given: Sequence[Tensor], ranks: Preflight, src: int) -> tuple[Shapes, torch.dtype]:
    """Returns the shapes and the dtype of what src scatters (collective).

    Raises:
        ValueError: On every rank: the list of some rank differs from that of src.
    """
    own = (tuple(tuple(tensor.shape) for tensor in given), given[0].dtype) if given else None
    box: list[Any] = [own]
    torch_dist.broadcast_object_list(box, src, group=ranks.group)
    shapes, dtype = box[0]
    with Preflight("scatter", ranks.group):
        if own not in (None, box[0]):
            described = [description(tensor) for tensor in given]
            raise ValueError(f"scatter: src has {_joined(shapes)} of {dtype}, this rank's own list has {described}")
    return shapes, dtype


if not TYPE_CHECKING:  # with this function, a name that is not there would be of type Any to a type checker

    def __getattr__(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module 'mpicoll.nn.functional' has no attribute {name!r}")
        import torch.distributed.nn.functional as torch_functional

        return getattr(torch_functional, name)


def __dir__() -> list[str]:
    import torch.distributed.nn.functional as torch_functional

    return sorted({*globals(), *dir(torch_functional)})

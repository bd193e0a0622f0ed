"""torch.distributed.nn.functional over MPI: collectives that take part in autograd, and send, recv, sendrecv.

Signatures and return values are torch's. The gradient is that of the SUM of all ranks' losses, as in torch: what rank r's tensor
did to the loss of every rank is added up in rank r's gradient. Nothing is divided by the number of ranks; a loss that every rank
computes alike counts as often as there are ranks. Any strides, complex dtypes, gradients of gradients. What torch gets wrong
without a word is right here: the gradients of AVG (reduce, reduce_scatter), of PRODUCT, MIN and MAX, and of broadcast in a group
whose ranks are not the world's; and shapes may be uneven. What has no gradient is an error before anything moves.

The ranks first agree, by one all_reduce of 32 bytes, on op, dtype and shapes: what does not fit together is a ValueError on
every rank. If the tensor of one rank requires grad the results do so on all, because a collective's backward is a collective:
every rank must go through it, in the same order. What a rank has no use for (zeros from gather, say) must reach its loss too.

What is here and not below (``group``, ``ReduceOp``, torch's private names) is torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as torchs
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from mpicoll._tensors import buffers, checks, reductions
from mpicoll._tensors.reductions import Op
from mpicoll.errors import UnsupportedReduction
from mpicoll.nn import moves
from mpicoll.nn.linear import apply
from mpicoll.nn.messages import recv, send, sendrecv
from mpicoll.nn.moves import Shape
from mpicoll.nn.preflight import Agreement

__all__ = [
    "_all_gather_base",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
    "sendrecv",
]

SUM = ReduceOp.SUM

# Sums of halves are added up in float32 and rounded once, as in all_reduce itself.
WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}


def broadcast(tensor: Tensor, src: int, group: ProcessGroup | None = None) -> Tensor:
    """``src``'s tensor, on every rank (collective).

    Args:   tensor: on src what is sent; elsewhere it says shape and dtype only, and its gradient is zero. src: global rank.
    """
    with Agreement("broadcast", group, [tensor]) as ranks:
        checks.movable("broadcast", tensor)
        root = ranks.group_rank("src", src)
        ranks.equal = f"{_words(tensor)} from rank {src}"
    return apply(moves.Broadcast(group, ranks.rank, root), [tensor], ranks.wanted)[0]


def gather(tensor: Tensor, dst: int = 0, group: ProcessGroup | None = None) -> tuple[Tensor, ...]:
    """Every rank's tensor, on ``dst``; zeros of the same shapes elsewhere (collective).

    Args:   tensor: shapes may differ between ranks. dst: global rank.
    """
    with Agreement("gather", group, [tensor]) as ranks:
        checks.movable("gather", tensor)
        root = ranks.group_rank("dst", dst)
        ranks.equal, ranks.even = f"{tensor.dtype} to rank {dst}", tuple(tensor.shape)
    return apply(moves.Gather(group, ranks.rank, root, _shapes(tensor, ranks)), [tensor], ranks.wanted)


def scatter(tensors: Sequence[Tensor] | None, src: int = 0, group: ProcessGroup | None = None) -> Tensor:
    """This rank's one of the tensors that ``src`` has (collective; two small broadcasts tell the shapes first).

    Args:   tensors: on src one for each rank, shapes may differ; elsewhere None, or as many of the same shapes, which get
            gradients of zero (torch takes only that). src: global rank.
    """
    given = [] if tensors is None else tensors
    with Agreement("scatter", group, given) as ranks:
        root = ranks.group_rank("src", src)
        if ranks.rank == root:
            checks.tensors("scatter", "tensors", tensors, ranks.size)
            checks.same_dtype("scatter", *((f"tensors[{i}]", t) for i, t in enumerate(given)))
        elif tensors is not None:
            checks.tensors("scatter", "tensors", tensors, ranks.size)
        ranks.equal = f"from rank {src}"
    shapes, dtype = _offered(given, ranks, src)
    return apply(moves.Scatter(group, ranks.rank, root, shapes, dtype), given, ranks.wanted)[0]


def reduce(tensor: Tensor, dst: int, op: Op = SUM, group: ProcessGroup | None = None) -> Tensor:
    """The reduction of all ranks' tensors, on ``dst``; zeros elsewhere (collective).

    Args:   dst: global rank. op: SUM, AVG, PRODUCT, MIN, MAX; for integers and bool also the bitwise ones.
    """
    with Agreement("reduce", group, [tensor]) as ranks:
        name = _reduction("reduce", tensor, op)
        root = ranks.group_rank("dst", dst)
        ranks.equal = f"{name} of {_words(tensor)} to rank {dst}"

    def summed(tensor: Tensor) -> Tensor:
        return apply(moves.Reduce(group, ranks.rank, root, op if _is_discrete(tensor) else SUM), [tensor], ranks.wanted)[0]

    if name == "SUM" or _is_discrete(tensor):
        return summed(tensor)
    if name == "AVG":
        return _averaged(summed, tensor, ranks.size)
    part, shapes = _own_share(name, tensor, ranks)
    return torch.cat(apply(moves.Gather(group, ranks.rank, root, shapes), [part], ranks.wanted)).view(tensor.shape)


def reduce_scatter(output: Tensor, input_list: Sequence[Tensor], op: Op = SUM, group: ProcessGroup | None = None) -> Tensor:
    """The reduction of everybody's ``input_list[i]``, on rank i; returns ``output`` (collective).

    Args:   output: overwritten; has the shape of input_list[rank]. input_list: one tensor for each rank, shapes may differ
            between places of the list. op: as in ``reduce``.
    """
    with Agreement("reduce_scatter", group, input_list if isinstance(input_list, (list, tuple)) else ()) as ranks:
        given = checks.tensors("reduce_scatter", "input_list", input_list, ranks.size)
        name = _reduction("reduce_scatter", given[0], op)
        shapes = tuple(tuple(tensor.shape) for tensor in given)
        checks.same_dtype("reduce_scatter", *((f"input_list[{i}]", t) for i, t in enumerate(given)))
        _output("reduce_scatter", "output", output, given[0], shapes[ranks.rank])
        ranks.equal = f"{name} of {given[0].dtype} {shapes}"
    if name == "SUM" or _is_discrete(output):
        return apply(moves.ReduceScatter(group, ranks.rank, shapes, op, output), given, ranks.wanted)[0]
    if name == "AVG":
        wide = [_wide(tensor) for tensor in given]
        result = apply(moves.ReduceScatter(group, ranks.rank, shapes), wide, ranks.wanted)[0] / ranks.size
    else:
        mine = (shapes[ranks.rank],) * ranks.size
        result = _REDUCE[name](torch.stack(apply(moves.AllToAll(group, shapes, mine), given, ranks.wanted)))
    delivered: Tensor = _Deliver.apply(result.to(output.dtype), [output])  # type: ignore[no-untyped-call]
    return delivered


def all_gather(tensor: Tensor, group: ProcessGroup | None = None) -> tuple[Tensor, ...]:
    """Every rank's tensor, on every rank (collective).

    Args:   tensor: shapes may differ between ranks; only then they are exchanged first, as objects.
    """
    with Agreement("all_gather", group, [tensor]) as ranks:
        checks.movable("all_gather", tensor)
        ranks.equal, ranks.even = str(tensor.dtype), tuple(tensor.shape)
    return apply(moves.AllGather(group, ranks.rank, _shapes(tensor, ranks)), [tensor], ranks.wanted)


def _all_gather_base(output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Rank i's input as the i-th block of ``output_tensor``, which is overwritten and returned (collective).

    Args:   output_tensor: world size times the input's numel, concatenated (n*k, ...) or stacked (n, k, ...).
    """
    name = "_all_gather_base"
    with Agreement(name, group, [input_tensor]) as ranks:
        checks.movable(name, input_tensor, "input_tensor")
        checks.movable(name, output_tensor, "output_tensor")
        checks.same_dtype(name, ("output_tensor", output_tensor), ("input_tensor", input_tensor))
        needs = input_tensor.numel() * ranks.size
        checks.same_numel(name, "output_tensor", output_tensor.numel(), f"input_tensor x {ranks.size} ranks", needs)
        checks.writable(name, output_tensor, "output_tensor")
        ranks.equal = _words(input_tensor)
    operation = moves.AllGatherSingle(group, tuple(input_tensor.shape), tuple(output_tensor.shape), output_tensor)
    return apply(operation, [input_tensor], ranks.wanted)[0]


def all_to_all(
    output_tensor_list: Sequence[Tensor], input_tensor_list: Sequence[Tensor], group: ProcessGroup | None = None
) -> tuple[Tensor, ...]:
    """``input_tensor_list[j]`` of rank i becomes ``output_tensor_list[i]`` of rank j; returns the outputs (collective).

    Args:   output_tensor_list: overwritten; one for each rank, with the shapes that the others send.
    """
    name = "all_to_all"
    with Agreement(name, group, input_tensor_list if isinstance(input_tensor_list, (list, tuple)) else ()) as ranks:
        given = checks.tensors(name, "input_tensor_list", input_tensor_list, ranks.size)
        outputs = checks.tensors(name, "output_tensor_list", output_tensor_list, ranks.size)
        checks.same_dtype(name, ("input_tensor_list[0]", given[0]), *(("a tensor", t) for t in [*given, *outputs]))
        for index, tensor in enumerate(outputs):
            checks.writable(name, tensor, f"output_tensor_list[{index}]")
        ranks.pairs([tensor.numel() for tensor in given], [tensor.numel() for tensor in outputs])
        ranks.equal = str(given[0].dtype)
        sends, receives = (tuple(tuple(tensor.shape) for tensor in tensors) for tensors in (given, outputs))
        ranks.about = f"{given[0].dtype}, sends {_listed(sends)}, receives {_listed(receives)}"
    return apply(moves.AllToAll(group, sends, receives, outputs), given, ranks.wanted)


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Rows of dim 0 travel, as many to and from each rank as the splits say; returns ``output`` (collective).

    Args:   output: overwritten. output_split_sizes, input_split_sizes: rows from, to each rank, 0 allowed; None: equal shares.
    """
    name = "all_to_all_single"
    with Agreement(name, group, [input]) as ranks:
        for what, tensor in (("output", output), ("input", input)):
            checks.movable(name, tensor, what)
            if tensor.dim() == 0:
                raise ValueError(f"{name}: {what} needs a dim 0 to split")
        checks.same_dtype(name, ("output", output), ("input", input))
        checks.writable(name, output, "output")
        sends = checks.splits(name, "input_split_sizes", input_split_sizes, input.size(0), ranks.size)
        receives = checks.splits(name, "output_split_sizes", output_split_sizes, output.size(0), ranks.size)
        row = input.shape[1:].numel()
        checks.same_numel(name, "a row of input", row, "a row of output", output.shape[1:].numel())
        ranks.pairs(sends, receives)
        ranks.equal = f"{input.dtype}, rows of {row} elements"
        ranks.about = f"{ranks.equal}, sends {sends}, receives {receives} rows"
    operation = moves.AllToAllSingle(group, tuple(input.shape), tuple(output.shape), tuple(sends), tuple(receives), output)
    return apply(operation, [input], ranks.wanted)[0]


def all_reduce(tensor: Tensor, op: Op = SUM, group: ProcessGroup | None = None) -> Tensor:
    """The reduction of all ranks' tensors, on every rank, in a new tensor (collective).

    Args:   op: SUM, AVG, PRODUCT, MIN, MAX; for integers and bool also the bitwise ones. Ranks that share the minimum or maximum
            share its gradient equally, as in torch.amax. PRODUCT, MIN and MAX: each rank reduces its share of the elements.
    Raises: UnsupportedReduction (a TypeError): PREMUL_SUM; or dtype and op have no right answer together.
    """
    with Agreement("all_reduce", group, [tensor]) as ranks:
        name = _reduction("all_reduce", tensor, op)
        ranks.equal = f"{name} of {_words(tensor)}"

    def summed(tensor: Tensor) -> Tensor:
        return apply(moves.AllReduce(group, op if _is_discrete(tensor) else SUM), [tensor], ranks.wanted)[0]

    if name == "SUM" or _is_discrete(tensor):
        return summed(tensor)
    if name == "AVG":
        return _averaged(summed, tensor, ranks.size)
    part, shapes = _own_share(name, tensor, ranks)
    return torch.cat(apply(moves.AllGather(group, ranks.rank, shapes), [part], ranks.wanted)).view(tensor.shape)


# -- reductions --------------------------------------------------------------------------------------------------------


def _product(stacked: Tensor) -> Tensor:
    return _wide(stacked).prod(0).to(stacked.dtype)


_REDUCE: dict[str, Callable[[Tensor], Tensor]] = {
    "PRODUCT": _product,
    "MIN": lambda stacked: stacked.amin(0),
    "MAX": lambda stacked: stacked.amax(0),
}


def _reduction(operation: str, tensor: Tensor, op: Op) -> str:
    """The op's name, after the checks."""
    checks.movable(operation, tensor)
    reductions.lookup(operation, tensor.dtype, op)
    name = next(name for name, value in reductions.OPS.items() if op == value)
    if name == "PREMUL_SUM":
        raise UnsupportedReduction(f"{operation}: PREMUL_SUM has no gradient here; multiply the tensor by the factor and use SUM")
    return name


def _is_discrete(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(WIDER.get(tensor.dtype, tensor.dtype))


def _averaged(summed: Callable[[Tensor], Tensor], tensor: Tensor, size: int) -> Tensor:
    return (summed(_wide(tensor)) / size).to(tensor.dtype)


def _own_share(name: str, tensor: Tensor, ranks: Agreement) -> tuple[Tensor, tuple[Shape, ...]]:
    """The reduction of this rank's share of the elements, and the shapes of all shares.

    Each rank sends the others their shares, and torch's own kernel reduces what has come: right, ties, zeros and NaN, in the
    value and in gradients of any order, with memory for two tensors and not for one of each rank.
    """
    shapes = tuple(tuple(part.shape) for part in tensor.detach().reshape(-1).tensor_split(ranks.size))
    counts = tuple(count for (count,) in shapes)
    mine = counts[ranks.rank]
    received = (mine * ranks.size,)
    exchange = moves.AllToAllSingle(ranks.group, (tensor.numel(),), received, counts, (mine,) * ranks.size)
    (stacked,) = apply(exchange, [tensor.reshape(-1)], ranks.wanted)
    return _REDUCE[name](stacked.view(ranks.size, mine)), shapes


class _Deliver(torch.autograd.Function):
    """The result in the memory that the caller gave for it. ``box``: a list of that tensor, so that it is no input."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, box: list[Tensor]) -> Tensor:
        buffers.copy_into(box[0], result)
        return box[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


# -- shapes ------------------------------------------------------------------------------------------------------------


def _words(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)}"


def _listed(shapes: Sequence[Shape]) -> str:
    return ", ".join(map(str, shapes))


def _shapes(tensor: Tensor, ranks: Agreement) -> tuple[Shape, ...]:
    """Every rank's shape; collective only if they differ."""
    mine = tuple(tensor.shape)
    if ranks.is_even:
        return (mine,) * ranks.size
    shapes: list[Any] = [None] * ranks.size
    torchs.all_gather_object(shapes, mine, group=ranks.group)
    return tuple(shapes)


def _output(operation: str, what: str, output: Tensor, tensor: Tensor, shape: Shape) -> None:
    checks.movable(operation, output, what)
    checks.writable(operation, output, what)
    checks.same_dtype(operation, (what, output), ("the input", tensor))
    if tuple(output.shape) != shape:
        raise ValueError(f"{operation}: {what} has shape {tuple(output.shape)}, this rank's part of the input {shape}")


def _offered(given: Sequence[Tensor], ranks: Agreement, src: int) -> tuple[tuple[Shape, ...], torch.dtype]:
    """The shapes and the dtype of what src scatters (collective). ValueError on every rank if some rank's own list differs."""
    mine = (tuple(tuple(tensor.shape) for tensor in given), given[0].dtype) if given else None
    box: list[Any] = [mine]
    torchs.broadcast_object_list(box, src, group=ranks.group)
    shapes, dtype = box[0]
    with Agreement("scatter", ranks.group):
        if mine not in (None, box[0]):
            own = [_words(tensor) for tensor in given]
            raise ValueError(f"scatter: src has {_listed(shapes)} of {dtype}, this rank's own list has {own}")
    return shapes, dtype


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(f"module 'mpicoll.nn.functional' has no attribute {name!r}")
    import torch.distributed.nn.functional as theirs

    return getattr(theirs, name)


def __dir__() -> list[str]:
    import torch.distributed.nn.functional as theirs

    return sorted({*globals(), *dir(theirs)})

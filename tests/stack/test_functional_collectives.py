"""torch.distributed._functional_collectives and torch.distributed.nn.functional on MPI: values and gradients of every function.

A function's values are compared with those that one process makes of all ranks' tensors; its gradients with numeric ones
(tests/support/gradients.py), which see the function of all ranks. What comes back is waited for when it is used, if ever.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as dnf
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.stack.refused import refused_alike
from tests.stack.sharded import TORCH
from tests.support import agree, launch
from tests.support.gradients import check, of_ranks
from tests.support.tensors import reduced
from tests.support.torch_backend import DTYPES, of_rank, same
from tests.tensors.test_reductions import LEGAL

since_2_15 = pytest.mark.skipif(TORCH < (2, 15), reason="needs torch >= 2.15")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*(is|will be) deprecated.*:FutureWarning"),  # torch's older names are shown as well
    pytest.mark.filterwarnings("ignore:.*combination of ranks:FutureWarning"),
]


class Case(NamedTuple):
    """A function of this rank's tensor in a group of these ranks; what member r gets of it, from the tensors of all members."""

    call: Callable[[Tensor, Any, list[int]], Any]
    expected: Callable[[list[Tensor], int], Any]


def splits(size: int) -> list[list[int]]:
    """Member i sends (i + j) % 3 rows to member j, which may be none."""
    return [[(i + j) % 3 for j in range(size)] for i in range(size)]


def uneven(x: Tensor, group: Any, ranks: list[int], exchange: Callable[..., Tensor]) -> Tensor:
    here, rows = ranks.index(dist.get_rank()), splits(len(ranks))
    return exchange(x[: sum(rows[here])], [row[here] for row in rows], rows[here], group)


def uneven_expected(parts: list[Tensor], r: int) -> Tensor:
    rows = splits(len(parts))
    return torch.cat([part[: sum(row)].split(row)[r] for part, row in zip(parts, rows, strict=True)])


def permuted(x: Tensor, group: Any, ranks: list[int]) -> Tensor:
    return funcol.permute_tensor(x.flatten(), [(i + 1) % len(ranks) for i in range(len(ranks))], group)


def from_each(x: Tensor, group: Any, ranks: list[int]) -> Tensor:
    return torch.stack([funcol.broadcast(x, src, group) for src in range(len(ranks))])


def swapped(parts: list[Tensor], r: int) -> Tensor:
    return torch.cat([part.chunk(len(parts))[r] for part in parts])


def total(parts: list[Tensor], r: int) -> Tensor:
    return functools.reduce(torch.add, parts)


def scattered(parts: list[Tensor], r: int, dim: int = 0) -> Tensor:
    return total(parts, r).chunk(len(parts), dim)[r]


def functions(*names: str) -> list[Any]:
    """Those that this torch has: 2.13 renamed *_tensor to *_single; both names are shown where there are two."""
    return [getattr(funcol, name) for name in names if hasattr(funcol, name)]


def of_dims(function: Any, expected: Callable[..., Tensor], *op: str) -> dict[str, Case]:
    """Along either dimension; the second one's name ends in 1."""
    return {
        f"{function.__name__} along dim {dim}": Case(
            lambda x, group, ranks, dim=dim: function(x, *op, dim, group), functools.partial(expected, dim=dim)
        )
        for dim in (0, 1)
    }


GATHERS, SCATTERS = (
    functions("all_gather_tensor", "all_gather_single"),
    functions("reduce_scatter_tensor", "reduce_scatter_single"),
)
GATHERS_OF_MANY = functions("all_gather_into_tensor_coalesced", "all_gather_single_coalesced")
SCATTERS_OF_MANY = functions("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced")
COALESCED: dict[str, Case] = {
    "all_reduce_coalesced": Case(
        lambda x, group, ranks: funcol.all_reduce_coalesced([x, x[0]], "sum", group), lambda p, r: [total(p, r), total(p, r)[0]]
    ),
}
for gather in GATHERS_OF_MANY:
    COALESCED[gather.__name__] = Case(
        lambda x, group, ranks, f=gather: f([x, x[0]], group), lambda p, r: [torch.cat(p), torch.cat([part[0] for part in p])]
    )
for scatter in SCATTERS_OF_MANY:
    COALESCED[scatter.__name__] = Case(
        lambda x, group, ranks, f=scatter: f([x, x.t()], "sum", [0, 1], group),
        lambda p, r: [scattered(p, r), scattered([part.t() for part in p], r, 1)],
    )
EVERY: dict[str, Case] = {
    "all_reduce": Case(lambda x, group, ranks: funcol.all_reduce(x, "sum", group), total),
    **{name: case for f in GATHERS for name, case in of_dims(f, lambda p, r, dim: torch.cat(p, dim)).items()},
    **{name: case for f in SCATTERS for name, case in of_dims(f, scattered, "sum").items()},
    "all_to_all_single": Case(lambda x, group, ranks: funcol.all_to_all_single(x, None, None, group), swapped),
    "all_to_all_single, uneven": Case(functools.partial(uneven, exchange=funcol.all_to_all_single), uneven_expected),
    "permute_tensor": Case(permuted, lambda p, r: p[r - 1].flatten()),
    "broadcast": Case(from_each, lambda p, r: torch.stack(p)),
    **COALESCED,
}
DIFFERENTIABLE = {name: case for name, case in EVERY.items() if name not in COALESCED and name != "broadcast"}


def listed(answer: Any) -> list[Tensor]:
    return [funcol.wait_tensor(tensor) for tensor in ([answer] if isinstance(answer, Tensor) else answer)]


def wrong(case: Case, given: list[Tensor], group: Any, ranks: list[int] | None = None) -> object:
    """What is wrong with the answer to this rank, if ``given`` are the members' tensors; None if nothing. The input must stay."""
    ranks = list(range(len(given))) if ranks is None else ranks
    here = ranks.index(dist.get_rank())
    mine = given[here]
    kept = mine.clone()
    got, expected = listed(case.call(mine, group, ranks)), listed(case.expected([tensor.clone() for tensor in given], here))
    right = len(got) == len(expected) and all(same(g, e) for g, e in zip(got, expected, strict=True)) and torch.equal(mine, kept)
    return None if right else (got, expected)


# -- values ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in EVERY if name != "all_reduce"])  # whose values are in test_reductions
def test_values(name: str, size: int) -> None:
    """In every dtype that the operation takes. Blocks lie in rank order; a reduction is in new memory."""
    dtypes = [dtype for dtype in [*DTYPES, torch.complex64] if dtype != torch.bool or "reduce" not in name]  # those are below
    found = {
        dtype: wrong(EVERY[name], [of_rank(r, 2 * size, 2 * size, dtype=dtype) for r in range(size)], dist.group.WORLD)
        for dtype in dtypes
    }
    agree(not any(found.values()), found)
    if name.startswith("all_gather") and name not in COALESCED:
        given = [of_rank(r, 2, 2, dtype=torch.float8_e4m3fn) for r in range(size)]
        got = funcol.wait_tensor(EVERY[name].call(given[dist.get_rank()], dist.group.WORLD, list(range(size))))
        agree(torch.equal(got.view(torch.uint8), EVERY[name].expected([part.view(torch.uint8) for part in given], 0)), got)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex64], ids=str)
def test_reductions(dtype: torch.dtype, rank: int, size: int) -> None:
    """all_reduce and reduce_scatter by each operation; the input stays as it was."""
    parts, world, wrong = [of_rank(r, 2 * size, 3).to(dtype) for r in range(size)], dist.group.WORLD, []
    for op in LEGAL[dtype]:
        if op != "PREMUL_SUM":
            got = funcol.all_reduce(parts[rank], op, world), SCATTERS[-1](parts[rank], op.lower(), 0, world)
            expected = reduced(op, parts)
            right = same(funcol.wait_tensor(got[0]), expected) and same(funcol.wait_tensor(got[1]), expected.chunk(size)[rank])
            wrong += [] if right and torch.equal(parts[rank], of_rank(rank, 2 * size, 3).to(dtype)) else [(op, got)]
    agree(not wrong, wrong)


def test_what_is_refused(size: int) -> None:
    """avg of bools is our TypeError on every rank, before anything moves, through C++ too; the group works on."""
    with pytest.raises(TypeError, match=r"all_reduce: AVG on torch\.bool: it needs a number"):
        funcol.wait_tensor(funcol.all_reduce(torch.ones(2, dtype=torch.bool), "avg", dist.group.WORLD))
    agree(funcol.all_reduce(torch.ones(2), "sum", dist.group.WORLD).tolist() == [size, size])


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.t(),
    "every second": lambda x: torch.stack([x, x + 9], -1)[..., 0],
    "expanded": lambda x: x[:1].expand_as(x),
    "conjugated": lambda x: torch.complex(x, x + 1).conj(),
}


@pytest.mark.parametrize("kind", LAYOUTS)
def test_layouts(kind: str, size: int) -> None:
    """trap 83: what inductor hands over is not always contiguous; the values count, not the memory's order."""
    names = EVERY if TORCH >= (2, 13) else ["all_reduce", "broadcast"]  # older ones refuse what is not contiguous elsewhere
    given = [LAYOUTS[kind](of_rank(r, 2 * size, 2 * size) * 7 + 1) for r in range(size)]
    found = {name: wrong(EVERY[name], given, dist.group.WORLD) for name in names}
    agree(not any(found.values()), found)


def test_shapes(rank: int, size: int) -> None:
    """0-dim tensors gather to a vector of the group's size; empty ones take part."""
    world = dist.group.WORLD
    agree(GATHERS[-1](torch.tensor(rank), 0, world).tolist() == list(range(size)))
    empty = torch.empty(0, 3)
    got = [funcol.all_reduce(empty, "sum", world), GATHERS[-1](empty, 0, world), SCATTERS[-1](empty, "sum", 0, world)]
    agree(all(funcol.wait_tensor(t).shape == (0, 3) for t in got), [t.shape for t in got])
    images = [of_rank(r, 2, 3, 4, 5).to(memory_format=torch.channels_last) for r in range(size)]
    agree(torch.equal(funcol.all_reduce(images[rank], "sum", world), total(images, rank)))


def test_several_dtypes_as_one(rank: int, size: int) -> None:
    """trap 82: all_gather_tensor becomes a coalesced one on the way on torch 2.13."""
    shapes = [(torch.float32, (3,)), (torch.int64, (2, 2)), (torch.bfloat16, ()), (torch.float64, (0, 4))]
    mixed = [[of_rank(r, *shape, dtype=dtype) for dtype, shape in shapes] for r in range(size)]
    got = listed(funcol.all_reduce_coalesced(mixed[rank], "sum", dist.group.WORLD))
    got += listed(GATHERS_OF_MANY[-1](mixed[rank][:2], dist.group.WORLD))
    columns = list(zip(*mixed, strict=True))
    expected = [*(total(list(c), 0) for c in columns), *(torch.cat(c) for c in columns[:2])]
    agree(all(same(g, e) for g, e in zip(got, expected, strict=True)), got)


GROUPS: dict[str, Callable[[DeviceMesh], Any]] = {
    "ProcessGroup": lambda mesh: mesh.get_group("columns"),
    "DeviceMesh": lambda mesh: mesh["columns"],
    "(mesh, dim)": lambda mesh: (mesh, 1),
    "name": lambda mesh: mesh.get_group("columns").group_name,
    "ranks": lambda mesh: dist.get_process_group_ranks(mesh.get_group("columns")),
}


@pytest.mark.parametrize("kind", GROUPS)
def test_groups(kind: str, size: int) -> None:
    """Rows of a mesh work each for itself, whatever names them (trap 81: C++ finds the group by its name)."""
    shape = (size // 2, 2) if size % 2 == 0 else (size, 1)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("rows", "columns"))
    group, ranks = GROUPS[kind](mesh), dist.get_process_group_ranks(mesh.get_group("columns"))
    given = [of_rank(r, 2 * len(ranks), 2 * len(ranks)) for r in ranks]
    names = [name for name in DIFFERENTIABLE if (kind, name) != ("name", "permute_tensor")]  # torch's takes no name
    found = {name: wrong(EVERY[name], given, group, ranks) for name in names}
    agree(not any(found.values()), found)


# -- gradients ---------------------------------------------------------------------------------------------------------


GRADIENTS: dict[str, Callable[[Tensor, Any, list[int]], Any]] = {
    **{name: case.call for name, case in {**DIFFERENTIABLE, **COALESCED}.items()},
    "all_gather_tensor_autograd": lambda x, group, ranks: funcol.all_gather_tensor_autograd(x, 0, group),
    "reduce_scatter_tensor_autograd": lambda x, group, ranks: funcol.reduce_scatter_tensor_autograd(x, "sum", 0, group),
    "all_to_all_single_autograd": lambda x, group, ranks: funcol.all_to_all_single_autograd(x, None, None, group),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name: str, size: int) -> None:
    """Several tensors of different shapes are one operation in the backward as well."""
    shape = (1, size) if "dim 1" in name else (size + 2 * ("uneven" in name), 1)
    check(lambda x: GRADIENTS[name](x * x, dist.group.WORLD, list(range(size))), of_ranks(*shape))


@since_2_15
@pytest.mark.parametrize("op", ["avg", "min", "max", "premul_sum"])
def test_other_reductions(op: str) -> None:
    """The extremum's gradient goes to the rank that has it."""
    reduction = dist._make_nccl_premul_sum(0.5) if op == "premul_sum" else op
    check(lambda x: funcol.all_reduce_coalesced([x * x, x], reduction, dist.group.WORLD), of_ranks(3))


# -- torch.distributed.nn.functional -----------------------------------------------------------------------------------


def reduce(x: Tensor, group: Any, ranks: list[int]) -> Tensor:
    """The result on dst; the other ranks' tensors mean nothing, but they take part in backward."""
    reduced = dnf.reduce(x, ranks[-1], group=group)
    return reduced if dist.get_rank() == ranks[-1] else reduced * 0


def all_to_all(x: Tensor, group: Any, ranks: list[int]) -> Tensor:
    """Member i sends i % 2 + 1 rows to each."""
    rows = ranks.index(dist.get_rank()) % 2 + 1
    outputs = [torch.empty(i % 2 + 1, *x.shape[1:], dtype=x.dtype) for i in range(len(ranks))]
    return torch.cat(dnf.all_to_all(outputs, [x[:rows] * (rank + 1) for rank in range(len(ranks))], group=group))


def all_to_all_single(x: Tensor, receives: list[int], sends: list[int], group: Any) -> Tensor:
    return dnf.all_to_all_single(x.new_empty(sum(receives), *x.shape[1:]), x, receives, sends, group)


def weighted(x: Tensor, group: Any, ranks: list[int]) -> list[Tensor]:
    """One for each member."""
    return [x * (i + ranks.index(dist.get_rank()) + 1) for i in range(len(ranks))]


NN: dict[str, Case] = {
    "broadcast": Case(lambda x, g, ranks: dnf.broadcast(x, ranks[-1], g), lambda p, r: p[-1]),
    "gather": Case(
        lambda x, g, ranks: torch.stack(list(dnf.gather(x, ranks[-1], g))),
        lambda p, r: torch.stack(p) * (r == len(p) - 1),
    ),
    "scatter": Case(lambda x, g, ranks: dnf.scatter(weighted(x, g, ranks), ranks[-1], g), lambda p, r: p[-1] * (len(p) + r)),
    "reduce": Case(reduce, lambda p, r: total(p, r) * (r == len(p) - 1)),
    "reduce_scatter": Case(
        lambda x, g, ranks: dnf.reduce_scatter(torch.empty_like(x), weighted(x, g, ranks), group=g),
        lambda p, r: sum(part * (r + i + 1) for i, part in enumerate(p)),
    ),
    "all_gather": Case(lambda x, g, ranks: torch.stack(list(dnf.all_gather(x, g))), lambda p, r: torch.stack(p)),
    "all_to_all": Case(all_to_all, lambda p, r: torch.cat([part[: i % 2 + 1] * (r + 1) for i, part in enumerate(p)])),
    "all_to_all_single": Case(functools.partial(uneven, exchange=all_to_all_single), uneven_expected),
    "all_reduce": Case(lambda x, g, ranks: dnf.all_reduce(x, group=g), total),
    "all_reduce avg": Case(lambda x, g, ranks: dnf.all_reduce(x, dist.ReduceOp.AVG, g), lambda p, r: total(p, r) / len(p)),
}


@pytest.mark.parametrize("name", NN)
def test_gradients_of_nn_functional(name: str, size: int) -> None:
    """torch builds each backward of the functions themselves, which are differentiable again."""
    shape = {"all_to_all": (2, 1), "all_to_all_single": (size + 2, 1)}.get(name, (1,))
    twice = name in ("broadcast", "scatter", "reduce", "reduce_scatter", "all_gather", "all_reduce")
    check(lambda x: NN[name].call(x * x, dist.group.WORLD, list(range(size))), of_ranks(*shape), twice=twice)


@pytest.mark.parametrize("name", NN)
def test_values_of_nn_functional(name: str, rank: int, size: int) -> None:
    """Results for a transposed input, whose values stay; the gradient of a sum, which is one expanded element."""
    whole = of_ranks(3, 2 * size).transpose(1, 2).requires_grad_()
    mine = whole.detach()[rank].requires_grad_()
    exact = [of_rank(r, 3, 2 * size, dtype=torch.float64).t() for r in range(size)]  # whole numbers, in any order of a sum
    said = wrong(NN[name], exact, dist.group.WORLD)
    NN[name].call(mine * mine, dist.group.WORLD, list(range(size))).sum().backward()
    (gradient,) = torch.autograd.grad(sum(NN[name].expected(list(whole * whole), r).sum() for r in range(size)), whole)
    agree(said is None and torch.allclose(mine.grad, gradient[rank]), (said, mine.grad, gradient[rank]))


def test_subgroups(rank: int, size: int) -> None:
    """Even and odd ranks each for themselves."""
    ranks = list(range(rank % 2, size, 2))
    group = dist.new_group(ranks, use_local_synchronization=True)
    for name in ("all_reduce", "all_gather", "reduce", "all_to_all"):
        check(lambda x, name=name: NN[name].call(x * x, group, ranks), of_ranks(2))
    dist.destroy_process_group(group)


def test_other_reductions_of_nn_functional(rank: int, size: int) -> None:
    """torch reduces the gradients by the same operation, which is not the derivative; on MPI it is at least the same numbers."""
    beside, said = dist.new_group(backend="gloo"), []
    for group in (dist.group.WORLD, beside):
        for op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.PRODUCT):
            x = of_ranks(4)[rank].requires_grad_()
            y = dnf.all_reduce(x * x, op, group=group)
            (y * torch.arange(1.0, 5.0) * (rank + 1)).sum().backward()
            said += [y.detach(), x.grad]
    agree(all(torch.allclose(a, b) for a, b in zip(said[:6], said[6:], strict=True)), said)
    dist.destroy_process_group(beside)


def test_all_gather_base(rank: int, size: int) -> None:
    """Its values; its backward is written for NCCL alone."""
    inputs = of_ranks(3)
    output = dnf._all_gather_base(torch.empty(3 * size, dtype=torch.float64), inputs[rank])
    agree(torch.equal(output, inputs.flatten()), output)

    def backward(group: Any) -> None:
        x = inputs[rank].clone().requires_grad_()
        dnf._all_gather_base(torch.empty(3 * size, dtype=torch.float64), x, group=group).sum().backward()

    refused_alike(backward, RuntimeError)


# -- what functional collectives return: tensors that are waited for when they are used, if ever -----------------------

native: Any = torch.ops._c10d_functional  # what compiled graphs call
legacy: Any = torch.ops.c10d_functional


def summed(size: int, *shape: int) -> Tensor:
    return torch.stack([of_rank(r, *shape) for r in range(size)]).sum(0)


def gathered(size: int, *shape: int) -> Tensor:
    return torch.cat([of_rank(r, *shape) for r in range(size)])


def world_name() -> str:
    world = dist.group.WORLD
    assert world is not None
    return world.group_name


def begun(rank: int, *shape: int) -> Any:
    """A sum that is under way."""
    return funcol.all_reduce(of_rank(rank, *shape), "sum", dist.group.WORLD)


USES: dict[str, Callable[[Any], Any]] = {
    "add": lambda t: (t + 0).tolist(),
    "numpy": lambda t: t.numpy().tolist(),
    "item": lambda t: [t[i].item() for i in range(3)],
    "out": lambda t: torch.add(t, 0, out=torch.empty(3)).tolist(),
    "list": lambda t: torch.stack([t, t])[1].tolist(),
    "twice": lambda t: (funcol.wait_tensor(t), funcol.wait_tensor(t))[1].tolist(),
    "in place": lambda t: t.add_(0).tolist(),
}


def test_first_use_waits(rank: int, size: int) -> None:
    """Any use sees the finished values. What no collective has made is given back."""
    expected = summed(size, 3).tolist()
    for how, use in USES.items():
        tensor = begun(rank, 3)
        agree(type(tensor) is funcol.AsyncCollectiveTensor and use(tensor) == expected, how)
    agree(torch.equal(funcol.wait_tensor(of_rank(rank, 3)), of_rank(rank, 3)))


@pytest.mark.parametrize("view", [lambda t: t.view(6, 4), lambda t: t[1:, ::2].t()], ids=["view", "slice"])
def test_views_do_not_wait(view: Callable[[Tensor], Tensor], rank: int, size: int) -> None:
    """A view of an unfinished tensor is unfinished too, and right when it is used."""
    tensor: Any = view(begun(rank, 4, 6))
    unfinished = type(tensor) is funcol.AsyncCollectiveTensor and not tensor.completed
    agree(unfinished and torch.equal(tensor, view(summed(size, 4, 6))), tensor)


def test_many_under_way_used_in_any_order(rank: int, size: int) -> None:
    """Each wait finds its own operation (by the output's storage, trap 81), whatever else is under way or was waited for."""
    tensors = [begun(rank, 3 + i) for i in range(20)]
    rest = [GATHERS[-1](of_rank(rank, 2), 0, dist.group.WORLD) for _ in range(5)]
    order = [i for i in reversed(range(20)) if i % 3] + [i for i in range(20) if i % 3 == 0]
    wrong = [i for i in order if not torch.equal(tensors[i], summed(size, 3 + i))]
    agree(not wrong and all(torch.equal(tensor, gathered(size, 2)) for tensor in rest), wrong)


def test_the_input_may_go_before_the_result_is_used(rank: int, size: int) -> None:
    """The operation holds its input; new tensors of the same size must not land in it."""
    length, results = 200_000, []
    for i in range(4):
        given = torch.full((length,), float(rank + i))
        results.append(GATHERS[-1](given, 0, dist.group.WORLD))
        del given
        torch.full((length,), -1.0)
    expected = [torch.arange(float(size)).repeat_interleave(length) + i for i in range(4)]
    wrong = [i for i, result in enumerate(results) if not torch.equal(result, expected[i])]
    agree(not wrong, wrong)


@pytest.mark.launch
@pytest.mark.parametrize("how", ["destroy", "no destroy"])
def test_nobody_waits(how: str) -> None:
    """Dropped results do no harm, groups are destroyed under them, and the program ends well, with and without destroy."""
    done = launch(2, "tests/c10d/scripts/unwaited.py", how)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("through") == 2, done.stdout


def test_in_place_ops(rank: int, size: int) -> None:
    """What inductor makes of functional collectives: same storage, results where the input or out was."""
    tensor, pair, told, out = of_rank(rank, 4), [of_rank(rank, 4), of_rank(rank, 2, 2)], of_rank(rank, 4), torch.empty(4 * size)
    answers = [native.all_reduce_(tensor, "sum", world_name()), *native.all_reduce_coalesced_(pair, "max", world_name())]
    answers += [native.broadcast_(told, size - 1, world_name())]
    answers += [native.all_gather_into_tensor_out(of_rank(rank, 4), size, world_name(), out=out)]
    found = [tensor, *pair, told, out]
    expected = [summed(size, 4), of_rank(size - 1, 4), of_rank(size - 1, 2, 2), of_rank(size - 1, 4), gathered(size, 4)]
    if hasattr(native, "reduce_scatter_tensor_out"):
        found.append(torch.empty(2))
        answers.append(native.reduce_scatter_tensor_out(of_rank(rank, 2 * size), "sum", size, world_name(), out=found[-1]))
        expected.append(summed(size, 2 * size).chunk(size)[rank])
    places = [native.wait_tensor(answer).data_ptr() for answer in answers]
    agree(places == [t.data_ptr() for t in found] and all(map(torch.equal, found, expected)), found)


def test_legacy_ops(rank: int, size: int) -> None:
    """The older namespace, which names a group by tag and ranks."""
    world = ("", list(range(size)), size)
    found = [
        legacy.all_reduce(of_rank(rank, 3), "sum", *world),
        legacy.broadcast(of_rank(rank, 3), size - 1, *world),
        legacy.all_gather_into_tensor(of_rank(rank, 3), *world),
        legacy.reduce_scatter_tensor(of_rank(rank, 2 * size), "sum", *world),
        legacy.all_to_all_single(of_rank(rank, size), None, None, *world),
    ]
    swapped = torch.cat([of_rank(r, size)[rank : rank + 1] for r in range(size)])
    expected = [summed(size, 3), of_rank(size - 1, 3), gathered(size, 3), summed(size, 2 * size).chunk(size)[rank], swapped]
    agree(all(map(torch.equal, map(legacy.wait_tensor, found), expected)), found)


@pytest.mark.skipif(not hasattr(native, "isend"), reason="needs torch >= 2.13")
@pytest.mark.parametrize("batch", [False, True], ids=["one by one", "batch"])
def test_messages_as_ops(batch: bool, rank: int, size: int) -> None:
    """A ring of messages that are waited for by their tensors."""
    arrived, mine, right, left = torch.zeros(3), of_rank(rank, 3), (rank + 1) % size, (rank - 1) % size
    if batch:
        outcome = native.batch_p2p_ops(["isend", "irecv"], [right, left], [0, 0], [mine, arrived], world_name())
    else:
        outcome = [native.isend(mine, right, 5, world_name()), native.irecv(arrived, left, 5, world_name())]
    for tensor in (*reversed(outcome), mine):  # torch registers a send twice
        native.wait_tensor(tensor)
    agree(torch.equal(arrived, of_rank(left, 3)), arrived)


@pytest.mark.skipif(not hasattr(funcol, "wait_tensors"), reason="needs torch >= 2.15")
def test_wait_tensors(rank: int, size: int) -> None:
    tensors = native.all_reduce_coalesced([of_rank(rank, 3), of_rank(rank, 5)], "sum", world_name())
    first, second = funcol.wait_tensors(tensors)
    agree(torch.equal(first, summed(size, 3)) and torch.equal(second, summed(size, 5)), (first, second))

"""torch.distributed._functional_collectives on MPI: every function's values, by dtype, shape, layout and kind of group."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.support import agree
from tests.support.torch_backend import DTYPES, of_rank, same

SECTION = "Functional collectives and torch.compile"

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated.*:FutureWarning"),  # torch's older names are shown as well
    pytest.mark.filterwarnings("ignore:.*combination of ranks:FutureWarning"),
]

MORE_DTYPES = [*DTYPES, torch.complex64, torch.float8_e4m3fn]
# torch 2.13 renamed *_tensor to *_single; both names are shown where there are two
ALL_GATHER = [getattr(funcol, name) for name in ("all_gather_tensor", "all_gather_single") if hasattr(funcol, name)]
REDUCE_SCATTER = [getattr(funcol, name) for name in ("reduce_scatter_tensor", "reduce_scatter_single") if hasattr(funcol, name)]
ALL_GATHERS = [f for n in ("all_gather_into_tensor", "all_gather_single") if (f := getattr(funcol, f"{n}_coalesced", None))]
REDUCE_SCATTERS = [
    f for n in ("reduce_scatter_tensor", "reduce_scatter_single") if (f := getattr(funcol, f"{n}_coalesced", None))
]
REDUCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "sum": operator.add, "product": operator.mul, "min": torch.minimum, "max": torch.maximum,
    "band": operator.and_, "bor": operator.or_, "bxor": operator.xor,
}  # fmt: skip
BITWISE = ("band", "bor", "bxor")


def named(functions: list[Any]) -> Any:
    return pytest.mark.parametrize("function", functions, ids=lambda f: f.__name__)


def layout(kind: str, tensor: Tensor) -> Tensor:
    """The same values, lying otherwise in memory."""
    if kind == "transposed":
        return tensor.t().contiguous().t()
    if kind == "every second":
        wide = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1], dtype=tensor.dtype)
        wide[..., ::2] = tensor
        return wide[..., ::2]
    if kind == "expanded":
        assert torch.equal(tensor, tensor[:1].expand_as(tensor))
        return tensor[:1].expand_as(tensor)
    return tensor


def grid(size: int) -> DeviceMesh:
    return init_device_mesh("cpu", (size // 2, 2) if size % 2 == 0 else (size, 1), mesh_dim_names=("rows", "columns"))


@pytest.mark.feature("functional all_reduce: sum, avg, product, min, max, band, bor, bxor; every dtype")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_reduce(dtype: torch.dtype, rank: int, size: int) -> None:
    """The reduction of all ranks' values, in new memory; the input stays as it was (in the classic call it would not)."""
    parts = [of_rank(r, 2, 3, dtype=dtype) for r in range(size)]
    of_bool = {"sum": operator.or_, "product": operator.and_} if dtype == torch.bool else {}
    for op, combine in {**REDUCTIONS, **of_bool}.items():
        if dtype.is_floating_point and op in BITWISE:
            continue
        given = parts[rank].clone()
        got = funcol.all_reduce(given, op.upper(), dist.group.WORLD)
        right = same(funcol.wait_tensor(got), functools.reduce(combine, parts))
        agree(right and torch.equal(given, of_rank(rank, 2, 3, dtype=dtype)), (op, got))


@pytest.mark.feature("functional all_reduce: sum, avg, product, min, max, band, bor, bxor; every dtype")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64], ids=str)
def test_all_reduce_avg(dtype: torch.dtype, rank: int, size: int) -> None:
    """avg is divided once, after the sum, and rounded once in bf16 and fp16."""
    parts = torch.stack([of_rank(r, 5).to(torch.complex128 if dtype.is_complex else torch.float64) for r in range(size)])
    got = funcol.all_reduce(parts[rank].to(dtype), "avg", dist.group.WORLD)
    expected = parts.mean(0).to(dtype)
    agree(torch.allclose(got, expected, rtol=1e-6) and got.dtype == dtype, got)


@pytest.mark.feature("functional all_reduce: sum, avg, product, min, max, band, bor, bxor; every dtype")
def test_a_reduction_without_an_answer_is_refused(rank: int, size: int) -> None:
    """avg of bools is our TypeError on every rank, before anything moves, through C++ too; the group works on."""
    said = ""
    try:
        funcol.wait_tensor(funcol.all_reduce(torch.ones(2, dtype=torch.bool), "avg", dist.group.WORLD))
    except Exception as error:  # noqa: BLE001  its type is what is asked
        said = f"{isinstance(error, TypeError)} {error}"
    agree(said.startswith("True all_reduce: AVG on torch.bool: it needs a number"), said)
    agree(funcol.all_reduce(torch.ones(2), "sum", dist.group.WORLD).tolist() == [size, size])


@pytest.mark.feature("functional: any shape and layout: 0-dim, empty, transposed, strided, expanded, channels-last, conj")
@pytest.mark.parametrize("kind", ["plain", "transposed", "every second", "expanded"])
def test_layouts(kind: str, rank: int, size: int) -> None:
    """trap 83: what inductor hands over is not always contiguous; the values count, not the memory's order."""

    def part(r: int, rows: int = 2 * size) -> Tensor:
        values = of_rank(r, rows, 3) * 7 + 1
        return layout(kind, values[:1].expand(rows, 3).contiguous() if kind == "expanded" else values)

    def mine(rows: int = 2 * size) -> Tensor:
        return part(rank, rows) if len(ALL_GATHER) == 2 else part(rank, rows).contiguous()  # torch < 2.13 refuses the others

    world, every = dist.group.WORLD, range(size)
    agree(torch.equal(funcol.all_reduce(part(rank), "sum", world), sum(part(r).clone() for r in every)))  # type: ignore[arg-type]
    agree(torch.equal(ALL_GATHER[-1](mine(2), 0, world), torch.cat([part(r, 2) for r in every])))
    total = sum(part(r).clone() for r in every)
    agree(torch.equal(REDUCE_SCATTER[-1](mine(), "sum", 0, world), total[2 * rank : 2 * rank + 2]))  # type: ignore[index]
    arrived = torch.cat([part(r)[2 * rank : 2 * rank + 2] for r in every])
    agree(torch.equal(funcol.all_to_all_single(mine(), None, None, world), arrived))
    agree(torch.equal(funcol.broadcast(part(rank), size - 1, world), part(size - 1)))


@pytest.mark.feature("functional: any shape and layout: 0-dim, empty, transposed, strided, expanded, channels-last, conj")
def test_shapes(rank: int, size: int) -> None:
    """0-dim tensors gather to a vector of the group's size; empty ones take part."""
    world = dist.group.WORLD
    agree(funcol.all_reduce(torch.tensor(rank + 1.0), "sum", world).item() == size * (size + 1) / 2)
    agree(ALL_GATHER[-1](torch.tensor(rank), 0, world).tolist() == list(range(size)))
    empty = torch.empty(0, 3)
    got = [funcol.all_reduce(empty, "sum", world), ALL_GATHER[-1](empty, 0, world), REDUCE_SCATTER[-1](empty, "sum", 0, world)]
    agree(all(funcol.wait_tensor(t).shape == (0, 3) for t in got), [t.shape for t in got])
    image = of_rank(rank, 2, 3, 4, 5).to(memory_format=torch.channels_last)
    agree(torch.equal(funcol.all_reduce(image, "sum", world), sum(of_rank(r, 2, 3, 4, 5) for r in range(size))))  # type: ignore[arg-type]
    turned = torch.complex(of_rank(rank, 4), of_rank(rank, 4) + 1).conj()
    expected = torch.cat([torch.complex(of_rank(r, 4), -of_rank(r, 4) - 1) for r in range(size)])
    agree(torch.equal(ALL_GATHER[-1](turned, 0, world), expected), expected)


@pytest.mark.feature("functional all_gather_tensor / all_gather_single, gather_dim; every dtype")
@named(ALL_GATHER)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_all_gather(function: Callable[..., Tensor], dim: int, rank: int, size: int) -> None:
    """Blocks lie in rank order along gather_dim."""
    got = function(of_rank(rank, 2, 3, 4), dim, dist.group.WORLD)
    agree(torch.equal(got, torch.cat([of_rank(r, 2, 3, 4) for r in range(size)], dim)), got)


@pytest.mark.feature("functional all_gather_tensor / all_gather_single, gather_dim; every dtype")
@pytest.mark.parametrize("dtype", MORE_DTYPES, ids=str)
def test_all_gather_moves_every_dtype(dtype: torch.dtype, rank: int, size: int) -> None:
    got = ALL_GATHER[-1](of_rank(rank, 3, dtype=dtype), 0, dist.group.WORLD)
    expected = torch.cat([of_rank(r, 3, dtype=dtype) for r in range(size)])
    agree(got.dtype == dtype and torch.equal(got.view(torch.uint8), expected.view(torch.uint8)), got)


@pytest.mark.feature("functional reduce_scatter_tensor / reduce_scatter_single, scatter_dim; sum, avg, max")
@named(REDUCE_SCATTER)
@pytest.mark.parametrize("op", ["sum", "avg", "max"])
@pytest.mark.parametrize("dim", [0, 1])
def test_reduce_scatter(function: Callable[..., Tensor], dim: int, op: str, rank: int, size: int) -> None:
    """Each rank keeps its block of the reduction along scatter_dim."""
    parts = [of_rank(r, 2 * size, 3 * size, dtype=torch.float64) for r in range(size)]
    stacked = torch.stack(parts)
    whole = {"sum": stacked.sum(0), "avg": stacked.mean(0), "max": stacked.amax(0)}[op]
    got = function(parts[rank], op, dim, dist.group.WORLD)
    agree(torch.allclose(got, whole.chunk(size, dim)[rank]), got)


@pytest.mark.feature("functional reduce_scatter_tensor / reduce_scatter_single, scatter_dim; sum, avg, max")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64, torch.uint8, torch.bool], ids=str)
def test_reduce_scatter_dtypes(dtype: torch.dtype, rank: int, size: int) -> None:
    parts = [of_rank(r, 3 * size, dtype=dtype) for r in range(size)]
    whole = functools.reduce(operator.or_ if dtype == torch.bool else operator.add, parts)
    agree(same(funcol.wait_tensor(REDUCE_SCATTER[-1](parts[rank], "sum", 0, dist.group.WORLD)), whole.chunk(size)[rank]))


@pytest.mark.feature("functional reduce_scatter_tensor / reduce_scatter_single, scatter_dim; sum, avg, max")
@pytest.mark.min_ranks(2)
def test_reduce_scatter_of_an_uneven_tensor_is_refused(rank: int, size: int) -> None:
    with pytest.raises(AssertionError, match="multiple of group_size"):
        REDUCE_SCATTER[-1](torch.ones(size + 1), "sum", 0, dist.group.WORLD)
    agree(True)


@pytest.mark.feature("functional all_to_all_single: even and uneven splits, empty ones too")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
def test_all_to_all_single(dtype: torch.dtype, rank: int, size: int) -> None:
    """Rank i sends (i + j) % 3 rows to rank j, which may be none."""
    rows = [[(i + j) % 3 for j in range(size)] for i in range(size)]
    parts = [(of_rank(i, sum(rows[i]), 2) + 10 * i).to(dtype) for i in range(size)]
    sent, received = rows[rank], [rows[i][rank] for i in range(size)]
    got = funcol.all_to_all_single(parts[rank], received, sent, dist.group.WORLD)
    expected = torch.cat([parts[i].split(rows[i])[rank] for i in range(size)])
    agree(same(funcol.wait_tensor(got), expected), got)


@pytest.mark.feature("functional broadcast, from each rank")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.complex64], ids=str)
def test_broadcast(dtype: torch.dtype, rank: int, size: int) -> None:
    for src in range(size):
        given = of_rank(rank, 4, dtype=dtype)
        got = funcol.broadcast(given, src, dist.group.WORLD)
        agree(torch.equal(got, of_rank(src, 4, dtype=dtype)) and torch.equal(given, of_rank(rank, 4, dtype=dtype)), got)


@pytest.mark.feature("functional permute_tensor")
def test_permute_tensor(rank: int, size: int) -> None:
    """A ring; the reverse of all ranks; each moves whole tensors between pairs."""
    for to in ([(r + 1) % size for r in range(size)], list(reversed(range(size)))):
        got = funcol.permute_tensor(of_rank(rank, 5), to, dist.group.WORLD)
        agree(torch.equal(got, of_rank(to.index(rank), 5)), (to, got))


@pytest.mark.feature("functional *_coalesced: several tensors, several dtypes and shapes, as one")
def test_all_reduce_coalesced(rank: int, size: int) -> None:
    mixed = [(torch.float32, (3,)), (torch.int64, (2, 2)), (torch.bfloat16, ()), (torch.float64, (0, 4))]
    got = funcol.all_reduce_coalesced([of_rank(rank, *shape, dtype=dtype) for dtype, shape in mixed], "sum", dist.group.WORLD)
    expected = [sum(of_rank(r, *shape, dtype=dtype) for r in range(size)) for dtype, shape in mixed]
    agree(all(same(funcol.wait_tensor(g), e) for g, e in zip(got, expected, strict=True)), got)  # type: ignore[arg-type]


@pytest.mark.feature("functional *_coalesced: several tensors, several dtypes and shapes, as one")
@named(ALL_GATHERS)
def test_all_gather_coalesced(function: Callable[..., list[Tensor]], rank: int, size: int) -> None:
    """trap 82: this is what all_gather_tensor becomes on the way on torch 2.13."""
    mixed = [(torch.float32, (3,)), (torch.int32, (2, 2)), (torch.bool, (1, 4))]
    got = function([of_rank(rank, *shape, dtype=dtype) for dtype, shape in mixed], dist.group.WORLD)
    expected = [torch.cat([of_rank(r, *shape, dtype=dtype) for r in range(size)]) for dtype, shape in mixed]
    agree(all(same(funcol.wait_tensor(g), e) for g, e in zip(got, expected, strict=True)), got)


@pytest.mark.feature("functional *_coalesced: several tensors, several dtypes and shapes, as one")
@named(REDUCE_SCATTERS)
def test_reduce_scatter_coalesced(function: Callable[..., list[Tensor]], rank: int, size: int) -> None:
    """Each tensor has its own scatter_dim."""
    parts = [[of_rank(r, size, 3), of_rank(r, 2, 2 * size, dtype=torch.int64)] for r in range(size)]
    got = function(list(parts[rank]), "sum", [0, 1], dist.group.WORLD)
    expected = [sum(part[i] for part in parts).chunk(size, i)[rank] for i in range(2)]  # type: ignore[union-attr]
    agree(all(same(funcol.wait_tensor(g), e) for g, e in zip(got, expected, strict=True)), got)


GROUPS: dict[str, Callable[[DeviceMesh], Any]] = {
    "ProcessGroup": lambda mesh: mesh.get_group("columns"),
    "DeviceMesh": lambda mesh: mesh["columns"],
    "(mesh, dim)": lambda mesh: (mesh, 1),
    "name": lambda mesh: mesh.get_group("columns").group_name,
    "ranks": lambda mesh: dist.get_process_group_ranks(mesh.get_group("columns")),
}


@pytest.mark.feature("functional: groups given as ProcessGroup, DeviceMesh, (mesh, dim), name, ranks")
@pytest.mark.parametrize("kind", GROUPS)
def test_groups(kind: str, rank: int, size: int) -> None:
    """Rows of a mesh work each for itself, whatever names them (trap 81: C++ finds the group by its name)."""
    mesh = grid(size)
    group, members = GROUPS[kind](mesh), dist.get_process_group_ranks(mesh.get_group("columns"))
    here = members.index(rank)
    whole = of_rank(rank, 2 * len(members))
    total = sum(of_rank(r, 2 * len(members)) for r in members)
    agree(torch.equal(funcol.all_reduce(whole, "sum", group), total))  # type: ignore[arg-type]
    agree(torch.equal(ALL_GATHER[-1](whole, 0, group), torch.cat([of_rank(r, 2 * len(members)) for r in members])))
    agree(torch.equal(REDUCE_SCATTER[-1](whole, "sum", 0, group), total.chunk(len(members))[here]))  # type: ignore[union-attr]
    arrived = torch.cat([of_rank(r, 2 * len(members)).chunk(len(members))[here] for r in members])
    agree(torch.equal(funcol.all_to_all_single(whole, None, None, group), arrived))
    if kind != "name":  # torch's permute_tensor takes no name
        ring = [(i + 1) % len(members) for i in range(len(members))]
        agree(torch.equal(funcol.permute_tensor(whole, ring, group), of_rank(members[here - 1], 2 * len(members))))

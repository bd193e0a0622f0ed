"""What is wrong is said on every rank, before a byte moves: which call, what was given, what is allowed. The group works on."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

import mpicoll as dist
from tests.support import agree
from tests.support.doors import still_works

pytestmark = [
    pytest.mark.usefixtures("world"),
    pytest.mark.filterwarnings("ignore:.*quantize:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*deprecated.*:FutureWarning"),
]
Call = Callable[[Any], object]


def tensor_places(rank: int, size: int) -> dict[str, Call]:
    """Every place of every call where a tensor of shape (2,) belongs: "call: place" -> call with it."""
    ok, peer = torch.ones(2), (rank + 1) % size
    few = [torch.ones(2) for _ in range(size - 1)]
    long = torch.ones(2 * size)
    root, mine = rank == 0, rank
    places: dict[str, Call] = {
        "all_reduce: tensor": lambda x: dist.all_reduce(x),
        "reduce: tensor": lambda x: dist.reduce(x, 0),
        "broadcast: tensor": lambda x: dist.broadcast(x, 0),
        "all_gather: tensor": lambda x: dist.all_gather([*few, ok], x),
        "all_gather: tensor_list": lambda x: dist.all_gather([*few, x], ok),
        "all_gather_single: input": lambda x: dist.all_gather_single(long, x),
        "gather: tensor": lambda x: dist.gather(x, [*few, ok] if root else None, 0),
        "scatter: tensor": lambda x: dist.scatter(x, [*few, ok] if root else None, 0),
        "reduce_scatter: output": lambda x: dist.reduce_scatter(x, [*few, ok]),
        "reduce_scatter: input_list": lambda x: dist.reduce_scatter(ok, [*few, x]),
        "reduce_scatter_single: output": lambda x: dist.reduce_scatter_single(x, long),
        "all_to_all: output_tensor_list": lambda x: dist.all_to_all([*few, x], [*few, ok]),
        "all_to_all: input_tensor_list": lambda x: dist.all_to_all([*few, ok], [*few, x]),
        "all_reduce_coalesced: tensors": lambda x: dist.all_reduce_coalesced([ok, x]),
        "isend: tensor": lambda x: dist.isend(x, mine),
        "irecv: tensor": lambda x: dist.irecv(x, mine),
    }
    if size > 1:
        places["send: tensor"] = lambda x: dist.send(x, peer)
        places["recv: tensor"] = lambda x: dist.recv(x, peer)
    return places


def single_places(rank: int, size: int) -> dict[str, Call]:
    """The same where the tensor has the parts of all ranks."""
    return {
        "all_gather_single: output": lambda x: dist.all_gather_single(x, torch.ones(2)),
        "all_gather_into_tensor: output": lambda x: dist.all_gather_into_tensor(x, torch.ones(2)),
        "reduce_scatter_single: input": lambda x: dist.reduce_scatter_single(torch.ones(2), x),
        "reduce_scatter_tensor: input": lambda x: dist.reduce_scatter_tensor(torch.ones(2), x),
        "all_to_all_single: output": lambda x: dist.all_to_all_single(x, torch.ones(2 * size)),
        "all_to_all_single: input": lambda x: dist.all_to_all_single(torch.ones(2 * size), x),
    }


def at_root(rank: int, call: Call) -> Call | None:
    """None: only the root can see what is wrong; the other ranks refuse the same operation for another reason."""
    return call if rank == 0 else None


def refused(calls: Mapping[str, Call | None], value: Any, kinds: tuple[type[Exception], ...], says: str = "") -> Iterator[str]:
    """What was not refused, or not in the right words."""
    for place, call in calls.items():
        name = place.split(":")[0]
        if call is None:
            with pytest.raises(TypeError, match=name):
                getattr(dist, name)(None)
            continue
        try:
            call(value)
            yield f"{place} took {value!r}"
        except kinds as error:
            if name not in str(error) or not re.search(says, str(error)):
                yield f"{place}: {type(error).__name__}: {error}"
        except Exception as error:  # noqa: BLE001  whatever else it is goes into the report
            yield f"{place}: {type(error).__name__}: {error}"


def test_no_tensors(rank: int, size: int) -> None:
    wrong: list[str] = []
    for value in (None, 3, 1.5, "tensor", [1.0, 2.0], object()):
        wrong += refused({**tensor_places(rank, size), **single_places(rank, size)}, value, (TypeError,), "torch.Tensor")
    agree(not wrong and still_works(size), "\n".join(wrong))


def test_tensors_without_bytes_of_their_own(rank: int, size: int) -> None:
    """Sparse, quantized, meta, mkldnn."""
    wrong: list[str] = []
    for places, n in ((tensor_places(rank, size), 2), (single_places(rank, size), 2 * size)):
        dense = {place: call for place, call in places.items() if place != "all_reduce: tensor"}  # see test_sparse.py
        wrong += refused(dense, torch.ones(n).to_sparse(), (ValueError,), r"torch.sparse_coo; .*\.to_dense\(\)")
        wrong += refused(places, torch.ones(n, n).to_sparse_csr(), (ValueError,), r"torch.sparse_csr; .*\.to_dense\(\)")
        wrong += refused(places, torch.ones(n, device="meta"), (ValueError,), "on device meta")
        quantized = torch.quantize_per_tensor(torch.ones(n), 0.1, 0, torch.quint8)
        wrong += refused(places, quantized, (TypeError,), r"quantized dtype torch.quint8; send \.int_repr\(\)")
        if torch.backends.mkldnn.is_available():
            wrong += refused(places, torch.ones(n).to_mkldnn(), (ValueError,), "torch._mkldnn")
    agree(not wrong and still_works(size), "\n".join(wrong))


def test_dtypes_that_differ(rank: int, size: int) -> None:
    alone = {"all_reduce", "reduce", "broadcast", "send", "recv", "isend", "irecv", "all_reduce_coalesced"}
    pairs = {  # only the root of gather and scatter has a list to compare with
        place: at_root(rank, call) if place.startswith(("gather:", "scatter:")) else call
        for place, call in tensor_places(rank, size).items()
        if place.split(":")[0] not in alone
    }
    wrong = [*refused(pairs, torch.ones(2).double(), (TypeError,), "torch.float64.*torch.float32|torch.float32.*torch.float64")]
    singles = single_places(rank, size)
    wrong += refused(singles, torch.ones(2 * size, dtype=torch.int64), (TypeError,), "torch.int64")
    dist.barrier()
    agree(not wrong and still_works(size), "\n".join(wrong))


def test_sizes_that_differ(rank: int, size: int) -> None:
    """Where it can be known locally: a rank's own part, and the whole against the parts."""
    wrong: list[str] = []
    for n in (2 * size + 1, 0, 2 * size - 1 if size > 1 else 5):
        wrong += refused(single_places(rank, size), torch.ones(n), (ValueError,))
    own = [torch.ones(2) for _ in range(size)]
    own[rank] = torch.ones(3)
    parts: dict[str, Call | None] = {
        "all_gather": lambda x: dist.all_gather(x, torch.ones(2)),
        "reduce_scatter": lambda x: dist.reduce_scatter(torch.ones(2), x),
        "all_to_all": lambda x: dist.all_to_all(x, [torch.ones(2) for _ in range(size)]),
        "gather": at_root(rank, lambda x: dist.gather(torch.ones(2), x, 0)),
        "scatter": at_root(rank, lambda x: dist.scatter(torch.ones(2), x, 0)),
    }
    wrong += refused(parts, own, (ValueError,), "[23] elements")
    dist.barrier()
    agree(not wrong and still_works(size), "\n".join(wrong))


def list_places(rank: int, size: int) -> dict[str, Call | None]:
    ok = torch.ones(2)
    places: dict[str, Call | None] = {
        "all_gather": lambda x: dist.all_gather(x, ok),
        "reduce_scatter": lambda x: dist.reduce_scatter(ok, x),
        "all_to_all": lambda x: dist.all_to_all(x, [ok] * size),
        "all_to_all (input)": lambda x: dist.all_to_all([torch.ones(2) for _ in range(size)], x),
        "gather": at_root(rank, lambda x: dist.gather(ok, x, 0)),
        "scatter": at_root(rank, lambda x: dist.scatter(ok, x, 0)),
    }
    return {f"{place}:".replace(" (input):", ": input"): call for place, call in places.items()}


def test_lists(rank: int, size: int) -> None:
    """Too long, too short, no lists at all, lists of something else."""
    few = [torch.ones(2) for _ in range(size)]
    wrong: list[str] = []
    for value in ([*few, torch.ones(2)], few[1:] or [torch.ones(2)] * 3):
        wrong += refused(list_places(rank, size), value, (ValueError,), f"the group has {size} ranks|must be given on")
    for other in (torch.ones(size, 2), 7, "few", {0: torch.ones(2)}, iter(few)):
        wrong += refused(list_places(rank, size), other, (TypeError,), "must be a list of tensors|must be a torch.Tensor")
    for place, call in list_places(rank, size).items():
        wrong += refused({place: call}, [*few[1:], [1.0, 2.0]], (TypeError,), "torch.Tensor, got list")
    dist.barrier()
    agree(not wrong and still_works(size), "\n".join(wrong))


def test_coalesced_lists(rank: int, size: int) -> None:
    ok = torch.ones(2)
    with pytest.raises(ValueError, match=f"output_tensor_lists must be {size} lists"):
        dist.all_gather_coalesced([[ok]] * (size + 1), [ok])
    with pytest.raises(ValueError, match=f"output_tensor_lists must be {size} lists, one per rank, of 2 tensors each"):
        dist.all_gather_coalesced([[ok]] * size, [ok, ok])
    for nothing in (3, None):
        with pytest.raises(TypeError):
            dist.all_reduce_coalesced(nothing)
        with pytest.raises(TypeError):
            dist.all_gather_coalesced([[ok]] * size, nothing)
    agree(still_works(size))

"""What torch.distributed._functional_collectives returns: tensors that are waited for when they are used, if ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor

from tests.support import agree, launch
from tests.support.torch_backend import of_rank

SECTION = "Functional collectives and torch.compile"
USED = "functional: AsyncCollectiveTensor used at once, viewed, chained, late"
COMPILED = "functional: ops of compiled graphs: all_reduce_, broadcast_, *_out, *_coalesced_; legacy c10d_functional"
MESSAGES = "functional: isend, irecv, batch_p2p_ops"

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated.*:FutureWarning")

all_gather = getattr(funcol, "all_gather_single", funcol.all_gather_tensor)
reduce_scatter = getattr(funcol, "reduce_scatter_single", funcol.reduce_scatter_tensor)
native: Any = torch.ops._c10d_functional  # what compiled graphs call
legacy: Any = torch.ops.c10d_functional


def total(size: int, *shape: int) -> Tensor:
    return torch.stack([of_rank(r, *shape) for r in range(size)]).sum(0)


def gathered(size: int, *shape: int) -> Tensor:
    return torch.cat([of_rank(r, *shape) for r in range(size)])


def name() -> str:
    world = dist.group.WORLD
    assert world is not None
    return world.group_name


def begun(rank: int, *shape: int) -> Any:
    """A sum that is under way."""
    return funcol.all_reduce(of_rank(rank, *shape), "sum", dist.group.WORLD)


USES: dict[str, Callable[[Any], Any]] = {
    "add": lambda t: (t + 0).tolist(),
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy().tolist(),
    "item": lambda t: [t[i].item() for i in range(3)],
    "clone": lambda t: t.clone().tolist(),
    "out": lambda t: torch.add(t, 0, out=torch.empty(3)).tolist(),
    "list": lambda t: torch.stack([t, t])[1].tolist(),
    "wait": lambda t: t.wait().tolist(),
    "twice": lambda t: (funcol.wait_tensor(t), funcol.wait_tensor(t))[1].tolist(),
    "in place": lambda t: t.add_(0).tolist(),
    "repr": lambda t: [float(word) for word in repr(t).partition("[")[2].partition("]")[0].split(",")],
}


@pytest.mark.feature(USED)
def test_first_use_waits(rank: int, size: int) -> None:
    """Any use sees the finished values. What no collective has made is given back."""
    expected = total(size, 3).tolist()
    for how, use in USES.items():
        tensor = begun(rank, 3)
        agree(type(tensor) is funcol.AsyncCollectiveTensor and use(tensor) == expected, how)
    agree(torch.equal(funcol.wait_tensor(of_rank(rank, 3)), of_rank(rank, 3)))


@pytest.mark.feature(USED)
@pytest.mark.parametrize("view", [lambda t: t.view(6, 4), lambda t: t[1:, ::2].t()], ids=["view", "slice"])
def test_views_do_not_wait(view: Callable[[Tensor], Tensor], rank: int, size: int) -> None:
    """A view of an unfinished tensor is unfinished too, and right when it is used."""
    tensor: Any = view(begun(rank, 4, 6))
    unfinished = type(tensor) is funcol.AsyncCollectiveTensor and not tensor.completed
    agree(unfinished and torch.equal(tensor, view(total(size, 4, 6))), tensor)


@pytest.mark.feature(USED)
def test_many_under_way_used_in_any_order(rank: int, size: int) -> None:
    """Each wait finds its own operation (by the output's storage, trap 81), whatever else is under way or was waited for."""
    tensors = [begun(rank, 3 + i) for i in range(20)]
    rest = [all_gather(of_rank(rank, 2), 0, dist.group.WORLD) for _ in range(5)]
    order = [i for i in reversed(range(20)) if i % 3] + [i for i in range(20) if i % 3 == 0]
    wrong = [i for i in order if not torch.equal(tensors[i], total(size, 3 + i))]
    agree(not wrong and all(torch.equal(tensor, gathered(size, 2)) for tensor in rest), wrong)


@pytest.mark.feature(USED)
def test_the_input_may_go_before_the_result_is_used(rank: int, size: int) -> None:
    """The operation holds its input; new tensors of the same size must not land in it."""
    length, results = 200_000, []
    for i in range(4):
        given = torch.full((length,), float(rank + i))
        results.append(all_gather(given, 0, dist.group.WORLD))
        del given
        torch.full((length,), -1.0)
    expected = [torch.arange(float(size)).repeat_interleave(length) + i for i in range(4)]
    wrong = [i for i, result in enumerate(results) if not torch.equal(result, expected[i])]
    agree(not wrong, wrong)


@pytest.mark.feature("functional: collectives that nobody waits for, while the program runs and at its end")
@pytest.mark.launch
@pytest.mark.parametrize("how", ["destroy", "no destroy"])
def test_nobody_waits(how: str) -> None:
    """Dropped results do no harm, groups are destroyed under them, and the program ends well, with and without destroy."""
    done = launch(2, "tests/c10d/scripts/unwaited.py", how)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("through") == 2, done.stdout


@pytest.mark.feature(COMPILED)
def test_in_place_ops(rank: int, size: int) -> None:
    """What inductor makes of functional collectives: same storage, results where the input or out was."""
    tensor, pair, told, out = of_rank(rank, 4), [of_rank(rank, 4), of_rank(rank, 2, 2)], of_rank(rank, 4), torch.empty(4 * size)
    answers = [native.all_reduce_(tensor, "sum", name()), *native.all_reduce_coalesced_(pair, "max", name())]
    answers += [native.broadcast_(told, size - 1, name())]
    answers += [native.all_gather_into_tensor_out(of_rank(rank, 4), size, name(), out=out)]
    found = [tensor, *pair, told, out]
    expected = [total(size, 4), of_rank(size - 1, 4), of_rank(size - 1, 2, 2), of_rank(size - 1, 4), gathered(size, 4)]
    if hasattr(native, "reduce_scatter_tensor_out"):
        found.append(torch.empty(2))
        answers.append(native.reduce_scatter_tensor_out(of_rank(rank, 2 * size), "sum", size, name(), out=found[-1]))
        expected.append(total(size, 2 * size).chunk(size)[rank])
    places = [native.wait_tensor(answer).data_ptr() for answer in answers]
    agree(places == [t.data_ptr() for t in found] and all(map(torch.equal, found, expected)), found)


@pytest.mark.feature(COMPILED)
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
    expected = [total(size, 3), of_rank(size - 1, 3), gathered(size, 3), total(size, 2 * size).chunk(size)[rank], swapped]
    agree(all(map(torch.equal, map(legacy.wait_tensor, found), expected)), found)


@pytest.mark.feature(MESSAGES)
@pytest.mark.skipif(not hasattr(native, "isend"), reason="needs torch >= 2.13")
@pytest.mark.parametrize("batch", [False, True], ids=["one by one", "batch"])
def test_messages_as_ops(batch: bool, rank: int, size: int) -> None:
    """A ring of messages that are waited for by their tensors."""
    arrived, mine, right, left = torch.zeros(3), of_rank(rank, 3), (rank + 1) % size, (rank - 1) % size
    if batch:
        outcome = native.batch_p2p_ops(["isend", "irecv"], [right, left], [0, 0], [mine, arrived], name())
    else:
        outcome = [native.isend(mine, right, 5, name()), native.irecv(arrived, left, 5, name())]
    for tensor in (*reversed(outcome), mine):  # torch registers a send twice
        native.wait_tensor(tensor)
    agree(torch.equal(arrived, of_rank(left, 3)), arrived)


@pytest.mark.feature("functional: wait_tensors: several at once")
@pytest.mark.skipif(not hasattr(funcol, "wait_tensors"), reason="needs torch >= 2.15")
def test_wait_tensors(rank: int, size: int) -> None:
    tensors = native.all_reduce_coalesced([of_rank(rank, 3), of_rank(rank, 5)], "sum", name())
    first, second = funcol.wait_tensors(tensors)
    agree(torch.equal(first, total(size, 3)) and torch.equal(second, total(size, 5)), (first, second))

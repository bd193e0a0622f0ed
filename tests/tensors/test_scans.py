"""scan and exscan: the reduction of the ranks up to this one. Each dtype, op and layout is in test_reductions.py."""

import pytest
import torch

import mpicoll as dist
from tests.support import agree

pytestmark = pytest.mark.usefixtures("world")


def test_the_order_is_that_of_the_group(rank: int, size: int) -> None:
    members = list(range(1, size)) or [0]
    group = dist.new_group(members)
    number = torch.tensor(1)
    if rank in members:
        dist.scan(number, group=group)
        agree(number == members.index(rank) + 1, number)
    else:
        with pytest.warns(UserWarning, match="scan"):
            dist.scan(number, group=group)
        agree(number == 1)


def test_what_has_no_answer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"exscan: .*sparse"):
        dist.exscan(torch.ones(2).to_sparse())
    with pytest.raises(TypeError, match="exscan"):
        dist.exscan([1.0])
    dist.barrier()


def test_other_backends_have_none() -> None:
    gloo = dist.new_group(backend="gloo")
    with pytest.raises(ValueError, match="scan: the group's backend is 'gloo'"):
        dist.scan(torch.ones(1), group=gloo)
    dist.barrier()  # a rank that destroys it closes the connections of those that still make it
    dist.destroy_process_group(gloo)


def test_torch_compile_breaks_its_graph_there(rank: int) -> None:
    @torch.compile(backend="eager")
    def function(x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        dist.scan(x)
        return x + 1

    agree(function(torch.ones(2)).tolist() == [2.0 * (rank + 1) + 1] * 2)

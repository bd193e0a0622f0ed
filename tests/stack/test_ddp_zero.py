"""ZeroRedundancyOptimizer: each rank keeps the state of its share of the parameters.

Its two hooks that overlap the step with the backward pass are not for Gloo, which may hang in them: callbacks that broadcast
must run in one order on all ranks. Ours do. That it steps like one process is in test_training.py.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from tests.stack.sharded import SMALL, MakeOptimizer, adam, backward, ddp, differences, network, same_bits, sgd, train, zero
from tests.support import agree

SECTION = "Data parallel"
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore:.*TorchScript:DeprecationWarning")

feature = pytest.mark.feature


@feature("ZeroRedundancyOptimizer: consolidate_state_dict, load_state_dict")
def test_state_is_consolidated_and_loaded_on_a_part_of_the_ranks(rank: int, size: int) -> None:
    """Even and odd ranks by themselves: owners are group ranks, broadcasts name global ones (trap 9).

    The last rank of each gathers the state, as large as one process has it; each rank takes its share of it back.
    """
    lists = [list(range(odd, size, 2)) for odd in range(min(size, 2))]
    group, ranks = [dist.new_group(each) for each in lists][rank % 2], lists[rank % 2]
    members, place, last = len(ranks), rank // 2, ranks[-1]
    model, reference = network(), network()
    optimizer, whole = zero(model.parameters(), adam, process_group=group), adam(reference.parameters())
    train(ddp(model, group), optimizer, range(3), place, members)
    train(reference, whole, range(3), None, members)
    optimizer.consolidate_state_dict(to=dist.get_group_rank(group, last))
    holder = [optimizer.state_dict() if rank == last else None]
    wrong: list[Any] = []
    if rank == last:
        for index, expected in whole.state_dict()["state"].items():
            mine = holder[0]["state"][index]
            wrong += [(index, key) for key, value in expected.items() if not torch.allclose(mine[key], value, atol=1e-9)]
    else:
        with pytest.raises(RuntimeError, match="consolidate_state_dict"):
            optimizer.state_dict()
    dist.broadcast_object_list(holder, src=last, group=group)
    resumed = copy.deepcopy(model)
    again = zero(resumed.parameters(), adam, process_group=group)
    again.load_state_dict(holder[0])
    train(ddp(resumed, group), again, range(3, 5), place, members)
    train(reference, whole, range(3, 5), None, members)
    dist.destroy_process_group(group)
    wrong += differences(resumed.parameters(), reference.parameters(), 1e-9)
    agree(not wrong, wrong)


@feature("ZeroRedundancyOptimizer overlapped with DDP (hook_with_zero_step, interleaved), which Gloo refuses")
@pytest.mark.parametrize(
    ("static", "shard_buckets", "make"),
    [(False, False, sgd), (True, False, sgd), (False, True, adam), (True, True, adam)],
    ids=["dynamic", "static_graph", "shard_buckets", "static-shard_buckets"],
)
@pytest.mark.parametrize("name", ["hook_with_zero_step", "hook_with_zero_step_interleaved"])
def test_overlapped_with_ddp(name: str, static: bool, shard_buckets: bool, make: MakeOptimizer, rank: int, size: int) -> None:
    """Broadcasts from the callbacks of all-reduces. The first two passes (three if static) only look at the buckets."""
    from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook

    idle = 3 if static else 2
    model, reference = network(), network()
    parallel = ddp(model, static_graph=static, bucket_cap_mb=SMALL)
    optimizer = zero(parallel.parameters(), make, overlap_with_ddp=True)
    hook = getattr(ddp_zero_hook, name)(default_hooks.allreduce_hook, parallel, optimizer, shard_buckets=shard_buckets)
    parallel.register_comm_hook(None, hook)
    for step in range(idle + 4):
        model.zero_grad()
        backward(parallel, step, rank, size)
    train(reference, make(reference.parameters()), range(idle, idle + 4), None, size)
    bad = differences(model.parameters(), reference.parameters(), 1e-9)
    agree(same_bits(model.parameters()) and not bad, bad)

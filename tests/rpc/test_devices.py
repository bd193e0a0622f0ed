"""Device maps: a call goes by the caller's, its answer by the same one the other way round."""

from __future__ import annotations

import pytest
import torch

from mpicoll import rpc
from mpicoll.rpc.options import DeviceMaps
from tests.support import agree


def cuda(*pairs: tuple[int, int]) -> dict[torch.device, torch.device]:
    return {torch.device("cuda", here): torch.device("cuda", there) for here, there in pairs}


def test_the_callers_map_serves_both_ways() -> None:
    everybody = {"a": {"b": cuda((0, 1))}, "b": {}}
    a, b = DeviceMaps("a", everybody), DeviceMaps("b", everybody)
    assert a.to("b", answer=False) == cuda((0, 1))
    assert b.to("a", answer=True) == b.to("a", answer=False) == cuda((1, 0))
    assert a.to("a", answer=False) == {}


def test_each_ones_own_map_is_for_its_own_calls() -> None:
    everybody = {"a": {"b": cuda((0, 1))}, "b": {"a": cuda((1, 1), (0, 0))}}
    b = DeviceMaps("b", everybody)
    assert b.to("a", answer=False) == cuda((1, 1), (0, 0))
    assert b.to("a", answer=True) == cuda((1, 0), (0, 0))


def test_a_map_for_nobody(rank: int, size: int) -> None:
    """Named on all ranks, whoever has it."""
    options = rpc.MPIRpcBackendOptions(device_maps={"nobody": {0: 0}} if rank == size - 1 else {})
    with pytest.raises(
        ValueError, match=rf"Node worker{size - 1} has invalid target node names in its device maps: 'nobody'; the"
    ):
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size, rpc_backend_options=options)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
    rpc.shutdown()
    agree(True)

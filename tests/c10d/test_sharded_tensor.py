"""ShardedTensor.gather on "mpi": torch takes the device for its buffers from the list of devices that the backend claims."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec

from mpicoll._c10d import names
from mpicoll._device import streams
from tests.support import agree, everyone

pytestmark = pytest.mark.filterwarnings("ignore:Please use DTensor:FutureWarning")


@pytest.fixture(autouse=True)
def mpi_world(no_world: None) -> None:
    dist.init_process_group("mpi")


def test_gather(rank: int, size: int) -> None:
    placements = [f"rank:{r}/cpu" for r in range(size)]
    tensor = sharded_tensor.rand(ChunkShardingSpec(dim=0, placements=placements), 2 * size + 1, 3)  # type: ignore[arg-type]
    shards = everyone([(shard.metadata.shard_offsets, shard.tensor) for shard in tensor.local_shards()])
    for dst in {0, size - 1}:
        out = torch.zeros(2 * size + 1, 3) if rank == dst else None
        tensor.gather(dst, out)
        if out is not None:
            for (row, _), part in (shard for shards_of_rank in shards for shard in shards_of_rank):
                assert torch.equal(out[row : row + len(part)], part), (row, out)
        agree(True)


@pytest.mark.parametrize("gpus", [False, True])
def test_devices_are_those_that_there_are(gpus: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that was built with CUDA has them only where a rank sees a GPU; one that was not, never."""
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    assert names.devices() == ["cpu", "cuda"]
    names.serve(gpus)
    served = list(dist.BackendConfig(dist.Backend("mpi")).get_device_backend_map())
    monkeypatch.undo()
    names.serve(any(everyone(streams.seen())))
    agree(served == (["cpu", "cuda"] if gpus else ["cpu"]), served)

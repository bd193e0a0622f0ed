"""The full check of collectives on tensors of a GPU."""

from collections.abc import Iterator

import pytest
import torch
from torch.distributed import ReduceOp

from mpicoll._engine.communicator import Communicator
from mpicoll.errors import CollectiveMismatch
from tests.gpu.fake_gpu import plain
from tests.gpu.ways import Gpu, gpu, group_that_goes, on_gpu, total, values, way
from tests.support import agree

__all__ = ["gpu", "way"]
pytestmark = [pytest.mark.usefixtures("world"), pytest.mark.min_ranks(2)]


@pytest.fixture
def engine(way: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> Iterator[Communicator]:
    made = group_that_goes(way, monkeypatch, checks=True)
    yield made
    made.barrier()
    made.close()


def test_what_fits_works(engine: Communicator) -> None:
    for count in (6, 20_000):
        reduced, sent = on_gpu(engine.rank, count), on_gpu(engine.rank, count)
        engine.all_reduce(reduced)
        engine.broadcast(sent, 1)
        parts = [on_gpu(0, count) for _ in range(engine.size)]
        engine.all_gather(parts, on_gpu(engine.rank, count))
        work = engine.all_to_all(parts, list(parts), async_op=True)
        assert work is not None
        work.wait()
        agree(torch.equal(plain(reduced), total(engine.size, count)), reduced)
        agree(torch.equal(plain(sent), values(1, count)), sent)


def test_another_reduction_and_another_kind_of_device(engine: Communicator) -> None:
    op = ReduceOp.MAX if engine.rank == 0 else ReduceOp.SUM
    tensor = on_gpu(engine.rank, 6)
    with pytest.raises(
        CollectiveMismatch, match=r"Rank 0: all_reduce\(MAX, .*on cuda\); ranks? 1.*: all_reduce\(SUM, .*on cuda\)"
    ):
        engine.all_reduce(tensor, op)
    mixed = values(engine.rank, 6) if engine.rank == 0 else on_gpu(engine.rank, 6)
    with pytest.raises(CollectiveMismatch, match=r"Rank 0: all_reduce\([^)]*elements?\); ranks? 1.*: all_reduce\(.*on cuda\)"):
        engine.all_reduce(mixed)
    agree(torch.equal(plain(tensor), values(engine.rank, 6)), tensor)
    engine.all_reduce(tensor)
    agree(torch.equal(plain(tensor), total(engine.size, 6)), tensor)


@pytest.mark.parametrize("n", [6, 600, 20_000])
def test_messages(engine: Communicator, n: int) -> None:
    """A message of another size is received, and its receiver raises."""
    for short in (1, 0):
        received = on_gpu(9, n)
        request = engine.irecv(received, (engine.rank - 1) % engine.size)
        engine.send(on_gpu(engine.rank, n - short), (engine.rank + 1) % engine.size)
        if short:
            with pytest.raises(CollectiveMismatch, match=f"has {4 * (n - 1)} bytes of float32, and its tensor {4 * n} bytes"):
                request.wait()
        else:
            request.wait()
            agree(torch.equal(plain(received), values((engine.rank - 1) % engine.size, n)), received)

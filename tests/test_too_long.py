"""A message that is longer than the tensor that should receive it: an error, and not one byte beyond the tensor (trap 16)."""

from pathlib import Path

import pytest

from tests.support import launch

SCRIPT = """
import torch
import mpicoll as dist

dist.init_process_group()
rank = dist.get_rank()
for nbytes in (64, 2_000, 100_000, 1_200_000, 8_000_000):
    room = torch.zeros(nbytes, dtype=torch.uint8)
    front = room[: nbytes // 2]
    if rank == 0:
        dist.send(torch.ones(nbytes, dtype=torch.uint8), 1)
        dist.send(torch.ones(nbytes, dtype=torch.uint8), 1)
        work = dist.isend(torch.ones(nbytes, dtype=torch.uint8), 0)  # to itself
        refused = [lambda: dist.irecv(front, 0).wait()]
    else:
        refused = [lambda: dist.recv(front, 0), lambda: dist.irecv(front, 0).wait()]
    for receive in refused:
        try:
            receive()
        except dist.TruncationError as error:
            assert str(front.nbytes) in str(error), error
        else:
            raise AssertionError(f"{nbytes} bytes into {front.nbytes}: no error")
        assert not room[nbytes // 2 :].any(), f"{nbytes} bytes: written beyond the tensor"
    dist.barrier()
print(f"rank {rank}: all refused", flush=True)
"""


@pytest.mark.launch
def test_nothing_is_written_beyond_the_tensor(tmp_path: Path) -> None:
    script = tmp_path / "too_long.py"
    script.write_text(SCRIPT)
    result = launch(2, str(script))
    assert result.returncode == 0, result.stderr
    for rank in range(2):  # wherever on a line: unbuffered, an end of line is written on its own
        assert result.stdout.count(f"rank {rank}: all refused") == 1, result.stdout

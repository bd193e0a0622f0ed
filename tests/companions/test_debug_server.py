"""torch's debug server, in a job over MPI: its page "mpicoll" names the rank that has not come."""

from pathlib import Path

import pytest

from tests.support import free_port
from tests.support.jobs import OVER_MPI, attempt, command

HUNG_S = 100  # seconds; a job takes 10 to 20 on two free cores

pytestmark = [pytest.mark.companion, pytest.mark.launch, pytest.mark.timeout(HUNG_S + 20)]

PROGRAM = """
import sys, time, urllib.request
import torch
import mpicoll as dist
from torch.distributed.debug import start_debug_server, stop_debug_server


def page(port):
    try:
        return urllib.request.urlopen(f"http://localhost:{port}/mpicoll").read().decode()
    except OSError as error:  # the server starts
        return str(error)


if __name__ == "__main__":  # the server's process imports this file
    dist.init_process_group()
    start_debug_server(int(sys.argv[1]), start_method="spawn", handlers=[dist.debug_handler()])
    if dist.get_rank() == 1:
        last = time.monotonic() + 60
        while "rank 1 has not come" not in (shown := page(sys.argv[1])) and time.monotonic() < last:
            time.sleep(0.5)
        print(shown, flush=True)
    total = torch.ones(3)
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        stop_debug_server()  # raises on other ranks
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("by", OVER_MPI)
def test_the_page_compares_the_ranks(by: str, tmp_path: Path) -> None:
    pytest.importorskip("torch.distributed.debug", reason="torch >= 2.13")
    program = tmp_path / "waits.py"
    program.write_text(PROGRAM)
    done = attempt(command(by, str(program), str(free_port())), HUNG_S)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "rank 0 waits in #1 all_reduce(SUM, float32, 3 elements)" in done.stdout, said
    assert "rank 1 has not come" in done.stdout, said
    assert f"waits.py:{PROGRAM.splitlines().index('    total = torch.ones(3)') + 2}" in done.stdout, said  # where rank 0 is
    assert '"library_version"' in done.stdout.replace("&#34;", '"'), said

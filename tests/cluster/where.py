"""Reads what scripts/where.py prints."""

import json
import re
import subprocess
from typing import Any

from tests.support import ROOT

SCRIPT = str(ROOT / "tests" / "cluster" / "scripts" / "where.py")


def ranks(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """What each rank has said; the job has ended well."""
    found = re.search(r"^WHERE (.*)$", done.stdout, re.MULTILINE)
    assert done.returncode == 0, done.stderr
    assert found, done.stdout + done.stderr
    said: list[dict[str, Any]] = json.loads(found[1])
    return said


def check(done: subprocess.CompletedProcess[str], first: str, by_mpi: bool = False) -> list[str]:
    """The host of each rank. All ranks have added up right, and know by their variables all that torchrun would have told them.

    Args:
        first: The first host.
        by_mpi: The launcher does not name it, and the ranks learn it when MPI starts.
    """
    said = ranks(done)
    hosts = [rank["host"] for rank in said]
    nodes = list(dict.fromkeys(hosts))
    for rank, (host, one) in enumerate(zip(hosts, said, strict=True)):
        assert one["right"], rank
        node = nodes.index(host)
        expected = {
            "RANK": rank, "WORLD_SIZE": len(hosts), "LOCAL_RANK": hosts[:rank].count(host), "LOCAL_WORLD_SIZE": hosts.count(host),
            "NODE_RANK": node, "GROUP_RANK": node, "MASTER_ADDR": first,
        }  # fmt: skip
        assert one["after"] == {name: str(value) for name, value in expected.items()}, one["after"]
        assert one["before"]["MASTER_ADDR"] == (None if by_mpi else first)
        assert one["before"]["RANK"] == str(rank)
    return hosts

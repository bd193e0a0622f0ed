"""docs/reference/operations.md lists every public name of mpicoll, and no other."""

from __future__ import annotations

import re
import sys

import pytest
import torch

import mpicoll
from tests.support import ROOT, run

PAGE = (ROOT / "docs/reference/operations.md").read_text()
TABLES = PAGE.partition("## All names of mpicoll")[2]
OURS, ONLY_HERE, TORCHS, PACKAGES = TABLES.split("\n\n| | |\n")[1:]


def names(table: str) -> set[str]:
    """The names of its rows, without those of submodules in an aside."""
    rows = [row.partition(", and every other")[0] for row in table.splitlines() if row.startswith("|")]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_names_of_ours() -> None:
    assert names(OURS) | names(ONLY_HERE) == set(mpicoll.OURS)
    assert not [name for name in names(OURS) - {"shrink_group"} if not hasattr(torch.distributed, name) and not is_newer(name)]
    assert not [name for name in names(ONLY_HERE) if hasattr(torch.distributed, name)]


def is_newer(name: str) -> bool:
    """Whether torch has it since 2.13 only."""
    return name.endswith("_single")


@pytest.mark.filterwarnings("ignore:.torch.distributed.reduce_op. is deprecated:FutureWarning")
def test_all_names() -> None:
    """With the version of torch that constraints.txt has."""
    pinned = re.search(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    listed = names(OURS) | names(ONLY_HERE) | names(TORCHS) | names(PACKAGES)
    loaded = {"nn", "optim"}  # torch.distributed shows them once somebody has imported them; so do other submodules
    if pinned is not None and torch.__version__.partition("+")[0] == pinned[1]:
        done = run([sys.executable, "-c", NAMES], 60)  # nothing else imported
        assert done.returncode == 0, done.stderr
        found = {name for name in done.stdout.split() if "NCCL" not in name}  # which builds for CUDA show, too
        assert {*found, *submodules_at_start()} | loaded == listed


NAMES = """
import mpicoll
print(*(name for name in mpicoll.__all__ if not hasattr(getattr(mpicoll, name), "__spec__")))
"""


def submodules_at_start() -> list[str]:
    return ["algorithms", "autograd", "c10d_logger", "config", "constants", "device_mesh", "distributed_c10d", "logging_handlers",
            "remote_device", "rpc", "utils"]  # fmt: skip

"""Tensors on a GPU: collected where torch sees one, or with ``--device cpu``, which tries the tests themselves."""

import os
from pathlib import Path

import pytest
import torch

from mpicoll._device import streams


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    missing = config.getoption("--device") == "cuda" and not torch.cuda.is_available()
    return True if missing and collection_path.name.startswith("test_") else None


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    """This rank's: ranks of a host share its GPUs in turn."""
    kind = request.config.getoption("--device")
    if kind != "cuda":
        return torch.device(kind)
    return streams.own_device(int(os.environ.get("LOCAL_RANK", "0")))

"""A fault inside DistributedDataParallel. That it trains as one process does: tests/stack/test_training.py and test_ddp.py."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mpicoll._engine.communicator import Communicator
from mpicoll._engine.work import Work
from tests.support import agree


@pytest.mark.usefixtures("world")
def test_an_all_reduce_that_fails_in_a_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reducer reads the Future in C++, takes the first tensor of its value, and crashed because an error has none."""
    parallel = DistributedDataParallel(nn.Linear(6, 3))
    loss = parallel(torch.ones(2, 6)).sum()

    def fails(self: Communicator, *arguments: object) -> Work:
        work = Work("all_reduce", [], timeout_s=1)
        work._complete(ValueError("own words"))
        return work

    monkeypatch.setattr(Communicator, "all_reduce", fails)
    error = ""
    try:
        loss.backward()
    except RuntimeError as caught:
        error = str(caught)
    agree("own words" in error, error)

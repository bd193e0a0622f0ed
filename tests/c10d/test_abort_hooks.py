"""get_error and the abort hooks of torch >= 2.14, on every torch."""

import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed
from torch._C._distributed_c10d import ErrorType

import mpicoll
from tests.support import agree, everyone


@pytest.mark.usefixtures("no_world")
@pytest.mark.min_ranks(2)
def test_a_timeout(rank: int) -> None:
    """The hooks are called in spite of one that raises."""
    mpicoll.init_process_group(timeout=timedelta(seconds=30))
    group: Any = torch.distributed.group.WORLD
    backend, called = group._get_backend(torch.device("cpu")), threading.Event()
    group.register_abort_hook(0, lambda: 1 / 0)
    group.register_abort_hook(1, called.set)
    group.register_abort_hook(2, lambda: pytest.fail("unregistered"))
    group.unregister_abort_hook(2)
    before = backend.get_error()
    if rank == 0:
        work: Any = torch.distributed.all_reduce(torch.ones(1), async_op=True)
        with pytest.raises(mpicoll.OperationTimeout):
            work.wait(timedelta(milliseconds=50))
    everyone(None)
    if rank != 0:
        torch.distributed.all_reduce(torch.ones(1))
    expected = ErrorType.TIMEOUT if rank == 0 else ErrorType.SUCCESS
    agree((before, backend.get_error(), called.is_set()) == (ErrorType.SUCCESS, expected, rank == 0))

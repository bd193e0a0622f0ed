"""Version counters: which results of operations autograd counts as in-place writes.

The engine bypasses autograd when it writes memory, and counts nothing. Its callers count, after they have started the operation
and before they return to the program. The program cannot have saved the result in between, whichever thread completes the
operation.

    mpicoll's functions         count every tensor that the operation writes on this rank
    torch.distributed           counts the tensors that Gloo counts, see Note [What Gloo counts]

# Note [What Gloo counts]
# Measured with torch 2.13 and tested by tests/stack/test_version_counters.py. Gloo counts a result that it copies from its own
# buffer into the tensor: all_gather in each form, gather, reduce_scatter in each form, all_to_all of lists, the coalesced
# forms, all_reduce of sparse tensors. It does not count a result that it receives in place: all_reduce, reduce, broadcast,
# scatter, all_to_all_single, recv. Programs rely on both. DTensor's distribute_tensor broadcasts into memory to which the program
# may hold views from chunk() or split(); autograd refuses those views once their base counts as written.
"""

from __future__ import annotations

from torch import Tensor
from torch._C import _increment_version


def count_write(*tensors: Tensor) -> None:
    """Raises the tensors' version counters, so that autograd refuses a backward pass that needs their former values.

    Inference tensors have no counter and are skipped.
    """
    _increment_version(tensors)  # torch.autograd.graph.increment_version takes a quarter of a microsecond longer to call it

"""Wrappers for DDP, whose C++ expects the Future and the Work of a backend to be C++ objects.

# Note [A Future that C++ cannot read]
# ``ddp._register_builtin_comm_hook(FP16_COMPRESS)`` chains a C++ callback to the Future of an all_reduce, which
# asserts that the value is a TensorList. A value that Python sets is a PyObject there. (DDP's reducer and its Python hooks read
# both.) For our groups that hook is therefore torch's Python version of it, which computes the same.

# Note [A Work whose Python part is gone]
# ``ddp.join(divide_by_initial_world_size=False)`` hands the Work of an all_reduce to the reducer, which keeps its C++ part and
# asks it for the Future in the backward pass. By then the Python object is gone, and wait() and get_future() with it
# ("Work::getFuture not implemented"). So the reducer gets a C++ Work of torch that holds our Future.

# Note [The error of a backward pass]
# If an all_reduce of gradients fails, the reducer raises a RuntimeError with the text of our error at the end of the pass.
# In a job that goes on when a rank dies, programs catch PeerLost. So the pass first calls the Work's wait, which raises it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from mpicoll._c10d import patches
from mpicoll._c10d.operations import Operations
from mpicoll._engine.work import Work
from mpicoll._mpi import survivors

c10d: Any = torch._C._distributed_c10d  # whose stubs lack what is used here


def install() -> None:
    """Wraps them, once."""
    patches.wrap("torch.nn.parallel.distributed.DistributedDataParallel._register_builtin_comm_hook", _readable)
    patches.wrap("torch._C._distributed_c10d.Reducer._set_forward_pass_work_handle", _lasting)
    Operations.raises_in_pass = survivors.possible()


def _readable(original: Any) -> Any:
    """See Note [A Future that C++ cannot read]."""

    @functools.wraps(original)
    def _register_builtin_comm_hook(self: Any, comm_hook_type: Any) -> None:
        ours = isinstance(self.process_group._get_backend(self.device), Operations)
        if not ours or comm_hook_type != c10d.BuiltinCommHookType.FP16_COMPRESS:
            original(self, comm_hook_type)
            return
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        self.register_comm_hook(self.process_group, fp16_compress_hook)
        self.logger._set_comm_hook_name(str(comm_hook_type))

    return _register_builtin_comm_hook


def _lasting(original: Any) -> Any:
    """See Note [A Work whose Python part is gone]."""

    @functools.wraps(original)
    def _set_forward_pass_work_handle(self: Any, work: Any, use_static_world_size: bool) -> None:
        lasting = c10d._create_work_from_future(work.get_future()) if isinstance(work, Work) else work
        original(self, lasting, use_static_world_size)

    return _set_forward_pass_work_handle

"""Two places where the C++ of DDP takes of a backend only what is C++ as well; for our groups, round them.

# Note [A Future that C++ cannot read]
# ``ddp._register_builtin_comm_hook(FP16_COMPRESS)`` chains C++ to the Future of an all_reduce and asserts that its value is a
# TensorList. Whatever Python puts into a Future is a PyObject there, and Python cannot make another Future (DDP's reducer and
# its Python hooks read both). So that hook, where the group is ours, is torch's own Python form of it: the same arithmetic.

# Note [A Work whose Python part is gone]
# ``ddp.join(divide_by_initial_world_size=False)`` hands the Work of an all_reduce to the reducer, which keeps its C++ part and
# asks it for the Future in the backward pass. By then nobody holds the Python object, and with it wait() and get_future() are
# gone ("Work::getFuture not implemented"). The reducer gets a Work of torch's in its place, which holds our Future.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from mpicoll._c10d import patches
from mpicoll._c10d.operations import Operations
from mpicoll._progress.work import Work

__all__ = ["install"]

c10d: Any = torch._C._distributed_c10d  # whose stubs lack what is used here


def install() -> None:
    """Wraps both, once."""
    patches.wrap("torch.nn.parallel.distributed.DistributedDataParallel._register_builtin_comm_hook", _readable)
    patches.wrap("torch._C._distributed_c10d.Reducer._set_forward_pass_work_handle", _lasting)


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

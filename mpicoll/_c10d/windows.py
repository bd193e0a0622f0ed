"""Window, which is torch's c10d::Window over MPI, and empty_shared, which makes memory for it.

torch >= 2.14 has ``torch.distributed._new_window(tensor, group)`` and a class in C++ that Python cannot derive from. `backend.py`
makes it return our Window, which has the methods of torch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from enum import Enum
from math import prod
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch._C._distributed_c10d as c10d
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from mpicoll._c10d import torch_world
from mpicoll._tensors import buffers, checks
from mpicoll._tensors.reductions import Op

if TYPE_CHECKING:
    from mpicoll._engine.accesses import Exposed
    from mpicoll._engine.work import Work


# torch's names for MPI's memory models; of torch itself from 2.14 on.
WindowAccessType = Enum("WindowAccessType", {"UNIFIED": 0, "SEPARATE": 1})


def _timeout(opts: Any) -> timedelta | None:
    """The timeout of torch's options, where less than 0 means the group's."""
    timeout = getattr(opts, "timeout", None)
    return timeout if timeout is not None and timeout > timedelta(0) else None


def empty_shared(*size: int | Sequence[int], dtype: torch.dtype | None = None, group: ProcessGroup | None = None) -> Tensor:
    """Returns a new tensor in memory that the ranks of this node map (collective).

    Other ranks of the node put to it and get from it without MPI, if it is registered with a `Window`, and may map it. The memory
    is freed when no rank uses it any more. torch.distributed has no such function.

    Args:
        size: As of torch.empty: integers, or one sequence of them. May differ between the ranks.
        dtype: None: torch's default. May differ between the ranks.
        group: The ranks that call this. None means the default group.

    Returns:
        A tensor on the CPU with values that mean nothing. If the ranks cannot map each other's memory, because they are in
        containers of their own for example, it has ordinary memory, which MPI reaches.

    Raises:
        ValueError: This rank is not in the group, or the group has another backend.

    Example:
        >>> tensor = dist.empty_shared(2, 3, dtype=torch.int64)
        >>> tensor.shape
        torch.Size([2, 3])
    """
    communicator = torch_world.communicator("empty_shared", group)
    shape = tuple(size[0]) if len(size) == 1 and isinstance(size[0], Sequence) else size
    made = torch.empty(shape, dtype=dtype, device="meta")  # type: ignore[arg-type]  # checks the arguments
    found = communicator.accesses.share(made.dtype, prod(made.shape))
    return torch.empty_like(made, device="cpu") if found is None else found.view(made.shape)


class Window:
    """Tensors of all ranks of a group that every rank may read and write without the other rank's help (collective).

    One rank puts, gets or accumulates; the other one makes no call. `signal` and `wait_signal`, or `fence`, say when the data may
    be used. Ranks are ranks within the group. Tensors are contiguous and on the CPU.

    Between ranks of a node, put and get of tensors from `empty_shared` are plain copies. Everything else moves by MPI_Put,
    MPI_Get and MPI_Accumulate. The same object comes from ``torch.distributed._new_window`` (torch >= 2.14).

    A Window is a context manager that calls `close`, unless an exception leaves it. In a job that goes on when a rank dies
    (``--fault-tolerant``) ranks reach only tensors from `empty_shared` of their node. With Open MPI over UCX between nodes, only
    one thread of a rank may put, get and accumulate.

    Args:
        tensor: Passed to `tensor_register`. None: the program calls that later.
        group: None means the default group.

    Raises:
        ValueError: This rank is not in the group, or the group has another backend; or as for `tensor_register`.

    Example:
        >>> rank = dist.get_rank()  # 0 or 1
        >>> tensor = torch.zeros(4)
        >>> with dist.Window(tensor) as window:
        ...     for work in (
        ...         window.put(torch.tensor([rank + 0.5]), dst_rank=1 - rank, target_offset_nelems=2),
        ...         window.signal(1 - rank),
        ...         window.wait_signal(1 - rank),
        ...     ):
        ...         assert work.is_completed()
        >>> tensor[2].item() == 1 - rank + 0.5
        True
    """

    def __init__(self, tensor: Tensor | None = None, group: ProcessGroup | None = None) -> None:
        self._group = torch_world.communicator("Window", group)
        self._accesses = self._group.accesses
        self._number, self._accesses.windows = self._accesses.windows, self._accesses.windows + 1
        self._exposed: Exposed | None = None
        if tensor is not None:
            self.tensor_register(tensor)

    def __enter__(self) -> Window:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()

    def __repr__(self) -> str:
        state = "no tensor" if self._exposed is None else f"{self._exposed.counts[self._group.rank]} elements"
        return f"<Window {self._number} of group {self._group.name!r}: {state}>"

    @property
    def tensor(self) -> Tensor:
        """The tensor of this rank. Raises ValueError if none is registered."""
        return self._registered("tensor").tensor

    def _registered(self, operation: str) -> Exposed:
        if self._exposed is None:
            raise ValueError(f"{operation}: no tensor is registered with this window; all ranks call tensor_register first")
        return self._exposed

    def tensor_register(self, tensor: Tensor, owning: bool = True) -> None:
        """Lets the other ranks access a tensor (collective).

        Args:
            tensor: Contiguous, on the CPU. Sizes and dtypes may differ between the ranks.
            owning: Without effect: the window keeps the tensor in either case.

        Raises:
            ValueError: A tensor is registered already, or this one is not contiguous or on another device.
        """
        if self._exposed is not None:
            raise ValueError("tensor_register: the window has a tensor; all ranks call tensor_deregister first")
        self._exposed = self._accesses.expose(tensor)

    def tensor_deregister(self) -> None:
        """Ends the access to the tensors of all ranks, which come to it first (collective).

        Raises:
            ValueError: No tensor is registered.
        """
        self._accesses.withdraw(self._registered("tensor_deregister"))
        self._exposed = None

    def close(self) -> None:
        """Calls `tensor_deregister` if a tensor is registered (collective)."""
        if self._exposed is not None:
            self.tensor_deregister()

    def put(self, tensor: Tensor, dst_rank: int, target_offset_nelems: int = 0, async_op: bool = False, opts: Any = None) -> Work:
        """Writes a tensor into the registered tensor of another rank, or of this one (not collective).

        Args:
            tensor: Contiguous, on the CPU, of the dtype of the target.
            dst_rank: Rank within the group.
            target_offset_nelems: The place of the first element, in elements of the target.
            async_op: Return at once. The tensor may be changed after ``wait()`` of the Work, and has arrived at the next `signal`
                or `fence`. Without it, it has arrived when this returns.
            opts: torch's PutOptions, of which ``timeout`` counts if the put is asynchronous.

        Returns:
            A Work; it has completed without ``async_op``.

        Raises:
            ValueError: There is no such rank, or the elements do not fit into its tensor. Nothing has been written.
            TypeError: The dtype differs.
        """
        work = self._accesses.access("put", self._registered("put"), tensor, dst_rank, target_offset_nelems, async_op)
        if async_op:
            work.limit(_timeout(opts))
        return work

    def get(self, tensor: Tensor, src_rank: int, offset_nelems: int = 0, async_op: bool = False) -> Work:
        """Reads part of the registered tensor of a rank (not collective). torch's Window has no such method.

        Args:
            tensor: Overwritten. Contiguous, on the CPU, of the dtype of the source.
            src_rank: Rank within the group.
            offset_nelems: The place of the first element, in elements of the source.
            async_op: Return before the elements are here, which `wait` of the Work tells.

        Returns:
            A Work; it has completed without ``async_op``.

        Raises:
            ValueError: As for `put`.
            TypeError: The dtype differs.
        """
        work = self._accesses.access("get", self._registered("get"), tensor, src_rank, offset_nelems, async_op)
        buffers.count_write(tensor)
        return work

    def accumulate(
        self, tensor: Tensor, dst_rank: int, offset_nelems: int = 0, op: Op = ReduceOp.SUM, async_op: bool = False
    ) -> Work:
        """Reduces a tensor into part of the registered tensor of a rank (not collective). torch's Window has no such method.

        Several ranks may accumulate into the same elements at once. Each element is right, if no rank puts there meanwhile.

        Args:
            tensor: Contiguous, on the CPU, of the dtype of the target.
            dst_rank: Rank within the group.
            offset_nelems: The place of the first element, in elements of the target.
            op: What MPI reduces as it is: N in the table of reductions.
            async_op: As for `put`.

        Returns:
            A Work; it has completed without ``async_op``.

        Raises:
            ValueError: As for `put`.
            TypeError: The dtype differs, or MPI does not reduce it by ``op`` as it is (UnsupportedReduction).
        """
        exposed = self._registered("accumulate")
        return self._accesses.access("accumulate", exposed, tensor, dst_rank, offset_nelems, async_op, op)

    def fence(self) -> None:
        """Returns when every rank has called it and everything that was put or accumulated before is visible (collective)."""
        exposed = self._registered("fence")
        self._accesses.flush("fence", exposed)
        self._group.barrier()
        exposed.memory.sync()

    def signal(self, peer_rank: int, async_op: bool = False, opts: Any = None) -> Work:
        """Tells a rank that everything that this rank has put there before has arrived (not collective).

        Args:
            peer_rank: Rank within the group, which calls `wait_signal`.
            async_op: Return before the signal has left. It waits for asynchronous puts to this rank in either case.
            opts: torch's SignalOptions, of which ``timeout`` counts.

        Returns:
            A Work; it has completed without ``async_op``.

        Raises:
            ValueError: There is no such rank.
        """
        exposed, rank = self._registered("signal"), self._peer("signal", peer_rank)
        self._accesses.flush("signal", exposed, rank)
        return self._accesses.signal(self._number, rank, async_op, _timeout(opts))

    def wait_signal(self, peer_rank: int, async_op: bool = False, opts: Any = None) -> Work:
        """Takes one signal of this window from a rank (not collective). Each signal ends one wait.

        Args:
            peer_rank: Rank within the group, which calls `signal`.
            async_op: Return at once; `wait` of the Work tells that the signal has come.
            opts: torch's WaitSignalOptions, of which ``timeout`` counts.

        Returns:
            A Work; it has completed without ``async_op``.

        Raises:
            ValueError: There is no such rank.
            OperationTimeout: No signal came in time; the message names the rank.
        """
        exposed, rank = self._registered("wait_signal"), self._peer("wait_signal", peer_rank)
        return self._accesses.wait_signal(exposed, self._number, rank, async_op, _timeout(opts))

    def map_remote_tensor(self, rank: int) -> Tensor:
        """Returns the registered tensor of a rank of this node, without a copy, as one dimension (not collective).

        Args:
            rank: Rank within the group; its tensor is from `empty_shared`. This rank: any tensor.

        Raises:
            ValueError: The tensor is not from `empty_shared`, or its rank is on another node.
        """
        operation, exposed = "map_remote_tensor", self._registered("map_remote_tensor")
        rank = self._peer(operation, rank)
        if rank == self._group.rank:
            return exposed.tensor.detach().view(-1)
        if not exposed.counts[rank]:
            return torch.empty(0, dtype=exposed.dtypes[rank], device="cpu")
        if (mapped := exposed.mapped(rank)) is None:
            shared = exposed.memory.is_shared[rank]
            why = "rank is on another node, or this rank has freed its own part" if shared else "tensor is not from empty_shared"
            raise ValueError(f"{operation}: rank {rank}: its {why}; get copies it")
        return mapped

    def get_attr(self, peer_rank: int) -> Any:
        """Returns the memory model of MPI: an object with ``access_type``, UNIFIED for every MPI that is known (not collective).

        Args:
            peer_rank: Rank within the group; all have the same.
        """
        self._peer("get_attr", peer_rank)
        kinds = getattr(c10d, "WindowAccessType", WindowAccessType)
        return SimpleNamespace(access_type=kinds.UNIFIED if self._registered("get_attr").memory.unified else kinds.SEPARATE)

    def _peer(self, operation: str, rank: int) -> int:
        return checks.group_rank(operation, "the peer", rank, self._group.size)

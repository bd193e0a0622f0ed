"""What torch calls on a process group, translated for the engine; the same for both adapters.

torch passes lists of one tensor (it once had several devices per process) and option objects. Where a method has one form in
torch, its parameters have torch's names. Methods have been renamed: ``_allgather_base`` is now ``all_gather_single``,
``alltoall_base`` is ``all_to_all_single``. Every name that torch 2.11 to 2.15 calls, from Python or from C++, is here. Ranks are
group ranks. ``opts.asyncOp is False`` means that the caller ignores the Work: the operation then runs in the caller's thread and
returns None.

A comment gives our name of an operation where torch's differs. A result counts as an in-place write if it does with Gloo
(mpicoll/_tensors/buffers.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor
from torch._C import _current_graph_task_id
from torch._C._distributed_c10d import ErrorType
from torch.autograd import Variable
from torch.distributed import ReduceOp
from torch.distributed import Work as TorchWork
from torch.futures import Future, collect_all

from mpicoll._base.group_errors import GroupFailed, OperationTimeout
from mpicoll._tensors.buffers import count_write
from mpicoll._tensors.reductions import OPS

if TYPE_CHECKING:
    from mpicoll._engine.communicator import Communicator

Answer = TorchWork | None
T = TypeVar("T")


class Operations:
    """The operations of one group, over its communicator; a base of both adapters."""

    communicator: Communicator
    on_close: Callable[[Communicator], None]  # called before torch gives the group up
    raises_in_pass = False  # a backward pass raises the error of its all_reduces; see Note [The error of a backward pass], ddp.py
    _coalesced: CoalescedWork | None = None  # the operations since _start_coalescing, until _end_coalescing

    # -- reductions ----------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None) -> Answer:  # all_reduce
        tensor = tensors[0] if type(tensors) is list and len(tensors) == 1 else _only(tensors)
        if opts is None:
            op, async_op = ReduceOp.SUM, True
        else:  # `_how`, without a hop more
            op, async_op = _KINDS.get(hash(op := opts.reduceOp), op), getattr(opts, "asyncOp", True)
        work = self.communicator.all_reduce(tensor, op, async_op)
        if work is not None and self.raises_in_pass and _current_graph_task_id() >= 0:
            Variable._execution_engine.queue_callback(work.wait)  # type: ignore[arg-type]
        return self._answer(work)

    # all_reduce_coalesced
    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Answer:
        return self._wrote(self.communicator.all_reduce_coalesced(tensors, *_how(opts)), tensors)

    def reduce(self, tensors: Any, opts: Any) -> Answer:
        return self._answer(self.communicator.reduce(_only(tensors), opts.rootRank, *_how(opts)))

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> Answer:
        output = _only(outputs)
        return self._wrote(self.communicator.reduce_scatter(output, _only(inputs), *_how(opts)), [output])

    def reduce_scatter_single(self, outputTensor: Tensor, inputTensor: Tensor, opts: Any = None) -> Answer:
        work = self.communicator.reduce_scatter_single(outputTensor, inputTensor, *_how(opts))
        return self._wrote(work, [outputTensor])

    _reduce_scatter_base = reduce_scatter_single  # of torch <= 2.13

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Answer:
        work = self.communicator.reduce_scatter_single_coalesced(outputs, inputs, *_how(opts))
        return self._wrote(work, outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # -- from one rank, from all ranks ---------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any) -> Answer:
        tensor = tensors[0] if type(tensors) is list and len(tensors) == 1 else _only(tensors)
        return self._answer(self.communicator.broadcast(tensor, opts.rootRank, getattr(opts, "asyncOp", True)))

    def allgather(self, outputs: Any, tensors: Any, opts: Any = None) -> Answer:  # all_gather
        targets = _only(outputs)
        return self._wrote(self.communicator.all_gather(targets, _only(tensors), _async(opts)), targets)

    # all_gather_coalesced
    def allgather_coalesced(self, output_lists: list[list[Tensor]], input_list: list[Tensor], opts: Any = None) -> Answer:
        """``output_lists[rank][i]`` is the i-th tensor of that rank; the engine takes ``[i][rank]``."""
        by_tensor = [list(column) for column in zip(*output_lists, strict=True)]
        work = self.communicator.all_gather_coalesced(by_tensor, input_list, _async(opts))
        return self._wrote(work, [target for column in by_tensor for target in column])

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Answer:
        return self._wrote(self.communicator.all_gather_single(output, input, _async(opts)), [output])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> Answer:
        return self._wrote(self.communicator.all_gather_single_coalesced(outputs, inputs, _async(opts)), outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    # -- messages between pairs ----------------------------------------------------------------------------------------

    def gather(self, outputs: list[list[Tensor]], tensors: Any, opts: Any) -> Answer:
        targets = outputs[0] if outputs else None
        return self._wrote(self.communicator.gather(_only(tensors), targets, opts.rootRank, _async(opts)), targets or [])

    def gather_single(self, output: Tensor | None, tensor: Tensor, opts: Any = None) -> Answer:
        """Rank i's tensor arrives as the i-th block of the root's ``output``."""
        targets, root = None, 0 if opts is None else opts.rootRank
        if self.communicator.rank == root:
            assert output is not None
            targets = _blocks(output, tensor, self.communicator.size)
        work = self.communicator.gather(tensor, targets, root, _async(opts))
        return self._wrote(work, [] if targets is None or output is None else [output])

    gather_into_tensor = gather_single

    def scatter(self, outputs: Any, inputs: list[list[Tensor]], opts: Any) -> Answer:
        sources = inputs[0] if inputs else None
        return self._answer(self.communicator.scatter(_only(outputs), sources, opts.rootRank, _async(opts)))

    # all_to_all
    def alltoall(self, output_tensors: list[Tensor], input_tensors: list[Tensor], opts: Any = None) -> Answer:
        return self._wrote(self.communicator.all_to_all(output_tensors, input_tensors, _async(opts)), output_tensors)

    def all_to_all_single(
        self, output: Tensor, tensor: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], opts: Any = None
    ) -> Answer:
        """Empty splits mean equal shares."""
        communicator = self.communicator
        return self._answer(
            communicator.all_to_all_single(output, tensor, output_splits or None, input_splits or None, _async(opts))
        )

    alltoall_base = all_to_all_single

    def send(self, tensors: Any, dstRank: int, tag: int = 0) -> Answer:  # isend
        return self._answer(self.communicator.isend(_only(tensors), dstRank, tag))

    def recv(self, tensors: Any, srcRank: int, tag: int = 0) -> Answer:  # irecv
        return self._answer(self.communicator.irecv(_only(tensors), srcRank, tag))

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Answer:  # irecv
        return self._answer(self.communicator.irecv(_only(tensors), None, tag))

    # -- barriers ------------------------------------------------------------------------------------------------------

    def barrier(self, opts: Any = None) -> Answer:
        timeout = getattr(opts, "timeout", None)  # -1 ms if the user gave none
        seconds = timeout.total_seconds() if timeout is not None and timeout > timedelta(0) else None
        return self._answer(self.communicator.barrier(_async(opts), seconds))

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Names the missing ranks. ``timeout`` is a timedelta if a group is called, BarrierOptions if C++ calls a Backend."""
        limit = getattr(timeout, "timeout", timeout)
        seconds = limit.total_seconds() if limit is not None and limit > timedelta(0) else None
        self.communicator.monitored_barrier(seconds, wait_all_ranks)

    # -- several as one ------------------------------------------------------------------------------------------------

    def start_coalescing(self, device: Any = None) -> None:
        self._coalesced = CoalescedWork()

    def end_coalescing(self, device: Any = None) -> Answer:
        coalesced, self._coalesced = self._coalesced, None
        return coalesced

    _start_coalescing = start_coalescing
    _end_coalescing = end_coalescing

    # -- life ----------------------------------------------------------------------------------------------------------

    def set_timeout(self, timeout: timedelta) -> None:
        self.communicator.set_timeout(timeout.total_seconds())

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Frees the communicators; called by destroy_process_group, never by garbage collection."""
        self.on_close(self.communicator)
        self.communicator.close()

    def abort(self) -> None:
        """Gives the group up without waiting for other ranks; their operations time out there."""
        self.on_close(self.communicator)
        self.communicator.fail(GroupFailed("aborted by the program"))
        self.communicator.ending = "aborted"
        self.communicator.close()

    def get_error(self) -> ErrorType:
        """Whether an operation has failed, and whether by its timeout; what the program has aborted has not failed."""
        failure = self.communicator.failure
        if failure is None:
            return ErrorType.SUCCESS
        return ErrorType.TIMEOUT if isinstance(failure, OperationTimeout) else ErrorType.COMM_ERROR

    def register_abort_hook(self, hook_id: int, hook: Callable[[], object]) -> None:
        """``hook`` is called when an operation has failed, before later ones raise, and before a timeout ends the job."""
        self.communicator.abort_hooks[hook_id] = hook

    def unregister_abort_hook(self, hook_id: int) -> None:
        self.communicator.abort_hooks.pop(hook_id, None)

    registerAbortHook, unregisterAbortHook = register_abort_hook, unregister_abort_hook  # as C++ calls them

    def getBackendName(self) -> str:  # torch's name
        return "mpi"

    def supports_tensor_alloc(self, device: Any) -> bool:
        """False: the backend allocates no memory, so fully_shard uses torch's allocator for its buffers."""
        return False

    def _set_sequence_number_for_group(self) -> None:
        """Does nothing: the operations have numbers."""

    def _get_sequence_number_for_group(self) -> int:
        return self.communicator.queue.issued()

    def _wrote(self, work: TorchWork | None, tensors: Sequence[Tensor]) -> Answer:
        """`_answer` for an operation whose results count as writes with Gloo."""
        count_write(*tensors)
        return self._answer(work)

    def _answer(self, work: TorchWork | None) -> Answer:
        """Returns what torch gets for an operation that has started. Every operation ends here."""
        if work is not None and self._coalesced is not None:
            self._coalesced.add(work)
        return work


class CoalescedWork(TorchWork):
    """Several operations with one Work."""

    def __init__(self) -> None:
        super().__init__()
        self._works: list[TorchWork] = []

    def add(self, work: TorchWork) -> None:
        self._works.append(work)

    def wait(self, timeout: Any = None) -> bool:
        for work in self._works:
            work.wait() if timeout is None else work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> Any:
        return next((work.exception() for work in self._works if work.exception()), None)

    def result(self) -> list[Tensor]:
        return [tensor for work in self._works for tensor in work.result()]

    def synchronize(self) -> None:
        self.wait()

    def get_future(self) -> Future[Any]:
        futures = collect_all([work.get_future() for work in self._works])
        return futures.then(lambda all_: [tensor for future in all_.value() for tensor in future.value()])


def _only(items: Any) -> Any:
    """Returns the one element of a list: a tensor or a list of tensors. Returns a tensor as it is."""
    if type(items) is list and len(items) == 1:  # asking Tensor's metaclass about a list takes 0.2 us
        return items[0]
    if isinstance(items, Tensor):
        return items
    if len(items) != 1:
        raise ValueError(f"mpicoll: expected a list of one tensor per process, got {len(items)}")
    return items[0]


# The keys of our tables, by the number to which torch hashes an operation. Reading ``opts.reduceOp.op`` and comparing it takes
# 1 us, and each read makes another object. PREMUL_SUM is not here: it stays what it is, with its factor.
_KINDS = {hash(ReduceOp(kind)): kind for kind in OPS.values() if kind != ReduceOp.PREMUL_SUM}


def _how(opts: Any) -> tuple[Any, bool]:
    """Returns the kind of reduction, a key of our tables, which ``opts.reduceOp`` is not; and `_async`, without a hop more."""
    if opts is None:
        return ReduceOp.SUM, True
    op = opts.reduceOp
    return _KINDS.get(hash(op), op), getattr(opts, "asyncOp", True)


def _async(opts: Any) -> bool:
    """Whether a call is asynchronous: it is if the options lack the attribute, and if C++ does not set it."""
    return getattr(opts, "asyncOp", True)


def _blocks(output: Tensor, tensor: Tensor, size: int) -> list[Tensor]:
    """Returns one view of ``output`` per rank, with the shape of ``tensor``; ``output`` is concatenated or stacked."""
    if output.numel() != size * tensor.numel():
        raise ValueError(f"gather_single: output has {output.numel()} elements, needs {size} ranks x {tensor.numel()}")
    return list(output.view(size, *tensor.shape).unbind(0))

"""Collectives that are messages between pairs of ranks: gather, scatter, all-to-all of any sizes, straight between tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from mpicoll._algorithms.blocks import Block, block
from mpicoll._engine.point_to_point import PointToPoint
from mpicoll._host.collectives import Memories
from mpicoll._progress.work import Work
from mpicoll._tensors import buffers, checks
from mpicoll._tensors.buffers import Message

Step = Callable[[], None]


class Exchanges(PointToPoint):
    """The part of a Communicator whose operations are exchanges."""

    def gather(self, tensor: Tensor, outputs: Sequence[Tensor] | None, dst: int, async_op: bool = False) -> Work | None:
        """Rank i's tensor arrives in ``outputs[i]`` on ``dst``; sizes may differ (collective).

        Raises: ValueError: ``outputs`` is missing on dst, or given elsewhere.
        """
        dst = checks.group_rank("gather", "dst", dst, self.size)
        if not async_op and self._to_or_from_root("gather", tensor, outputs, dst):
            return None
        source = buffers.outgoing("gather", tensor)
        if self.rank != dst:
            if checks.given(outputs):
                raise ValueError(f"gather: gather_list must be None on rank {self.rank}; only dst (rank {dst}) receives")
            return self.start("gather", self._exchange([(dst, source.memory)], [], None), [], async_op, reads=[tensor])
        if not checks.given(outputs):
            raise ValueError("gather: gather_list must be given on dst, one tensor per rank")
        targets = checks.tensors("gather", "gather_list", outputs, self.size)
        checks.same_dtype("gather", ("tensor", tensor), *((f"gather_list[{i}]", t) for i, t in enumerate(targets)))
        checks.same_numel("gather", "tensor", tensor.numel(), f"gather_list[{dst}]", targets[dst].numel())
        incoming = [(rank, buffers.incoming("gather", target)) for rank, target in enumerate(targets)]
        return self.start("gather", self._exchange([], incoming, source.memory), targets, async_op, reads=[tensor])

    def scatter(self, tensor: Tensor, inputs: Sequence[Tensor] | None, src: int, async_op: bool = False) -> Work | None:
        """``inputs[i]`` on ``src`` arrives in rank i's tensor; sizes may differ (collective).

        Raises: ValueError: ``inputs`` is missing on src, or given elsewhere.
        """
        src = checks.group_rank("scatter", "src", src, self.size)
        if not async_op and self._to_or_from_root("scatter", tensor, inputs, src):
            return None
        target = buffers.incoming("scatter", tensor)
        if self.rank != src:
            if checks.given(inputs):
                raise ValueError(f"scatter: scatter_list must be None on rank {self.rank}; only src (rank {src}) sends")
            return self.start("scatter", self._exchange([], [(src, target)], None), [tensor], async_op, reads=[])
        if not checks.given(inputs):
            raise ValueError("scatter: scatter_list must be given on src, one tensor per rank")
        given = checks.tensors("scatter", "scatter_list", inputs, self.size)
        checks.same_dtype("scatter", ("tensor", tensor), *((f"scatter_list[{i}]", t) for i, t in enumerate(given)))
        checks.same_numel("scatter", "tensor", tensor.numel(), f"scatter_list[{src}]", given[src].numel())
        sources = [buffers.outgoing("scatter", t).memory for t in given]
        others = [(rank, memory) for rank, memory in enumerate(sources) if rank != src]
        return self.start("scatter", self._exchange(others, [(src, target)], sources[src]), [tensor], async_op, reads=given)

    def _to_or_from_root(self, name: str, tensor: Tensor, others: Sequence[Tensor] | None, root: int) -> bool:
        """The bare path of gather and scatter; False, and nothing done, for what wants a check, or has something before it."""
        if not buffers.is_bare(tensor):
            return False
        mine = block(tensor)
        if self.rank != root:
            if others is not None:
                return False
            there = [(root, mine)]
            return self.at_once(name, self.host.exchange_blocks, *((there, []) if name == "gather" else ([], there)), None)
        if type(others) is not list or len(others) != self.size:
            return False
        dtype = tensor.dtype
        if not all(buffers.is_bare(other) and other.dtype is dtype for other in others):
            return False
        if others[root].nbytes != tensor.nbytes:
            return False
        theirs = [(rank, block(other)) for rank, other in enumerate(others) if rank != root]
        if name == "gather":
            return self.at_once(name, self.host.exchange_blocks, [], theirs, (block(others[root]), mine))
        return self.at_once(name, self.host.exchange_blocks, theirs, [], (mine, block(others[root])))

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], async_op: bool = False) -> Work | None:
        """``inputs[j]`` of rank i arrives in ``outputs[i]`` of rank j; sizes may differ (collective)."""
        if not async_op and self._all_to_all_lists_at_once(outputs, inputs):
            return None
        targets = checks.tensors("all_to_all", "output_tensor_list", outputs, self.size)
        given = checks.tensors("all_to_all", "input_tensor_list", inputs, self.size)
        checks.same_dtype("all_to_all", ("input_tensor_list[0]", given[0]), *(("a tensor", t) for t in [*given, *targets]))
        own = self.rank
        checks.same_numel("all_to_all", f"input {own}", given[own].numel(), f"output {own}", targets[own].numel())
        incoming = [buffers.incoming("all_to_all", target) for target in targets]
        sources = [buffers.outgoing("all_to_all", t).memory for t in given]
        if any(buffers.overlap(source, target.memory) for source in sources for target in incoming):
            sources = [buffers.packed(source) for source in sources]

        def transfer() -> None:
            into = [block(mine.memory) for mine in incoming]
            self.host.all_to_all("all_to_all", into, [block(memory) for memory in sources], held)
            for mine in incoming:
                mine.deliver()

        held = [*(mine.memory for mine in incoming), *sources]
        return self.start("all_to_all", buffers.ordered(transfer, held), targets, async_op, reads=given)

    def _all_to_all_lists_at_once(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> bool:
        """The bare path; False, and nothing done, for what wants a check or a copy, or has something before it."""
        if type(outputs) is not list or type(inputs) is not list or len(outputs) != self.size or len(inputs) != self.size:
            return False
        both = outputs + inputs
        if not all(buffers.is_bare(tensor) and tensor.dtype is both[0].dtype for tensor in both):
            return False
        targets, sources = [block(tensor) for tensor in outputs], [block(tensor) for tensor in inputs]
        if targets[self.rank][1] != sources[self.rank][1] or any(buffers.overlap(a, b) for a in outputs for b in inputs):
            return False
        return self.at_once("all_to_all", self.host.all_to_all, "all_to_all", targets, sources)

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """Rows of dim 0 travel: ``input_splits[j]`` rows go to rank j, ``output_splits[j]`` rows come from it (collective).

        Args:   output_splits, input_splits: rows per rank, 0 allowed; None: equal shares.
        """
        name = "all_to_all_single"
        checks.movable(name, output, "output")
        checks.movable(name, tensor, "input")
        checks.same_dtype(name, ("output", output), ("input", tensor))
        if tensor.dim() == 0 or output.dim() == 0:
            raise ValueError(
                f"{name}: input and output need a dim 0 to split, got shapes {tuple(tensor.shape)}, {tuple(output.shape)}"
            )
        sends = checks.splits(name, "input_split_sizes", input_splits, tensor.size(0), self.size)
        receives = checks.splits(name, "output_split_sizes", output_splits, output.size(0), self.size)
        if tensor.shape[1:].numel() != output.shape[1:].numel():
            raise ValueError(
                f"{name}: a row of input has shape {tuple(tensor.shape[1:])}, a row of output {tuple(output.shape[1:])}; "
                "they must have as many elements"
            )
        checks.same_numel(name, "the input's own share (rows)", sends[self.rank], "the output's", receives[self.rank])
        if not async_op and buffers.is_bare(tensor) and buffers.is_bare(output) and not buffers.overlap(output, tensor):
            rows = _rows(output, receives), _rows(tensor, sends)
            if self.at_once(name, self.host.all_to_all, name, *rows):
                return None
        source, target = buffers.outgoing(name, tensor), buffers.incoming(name, output)
        memory = buffers.packed(source.memory) if buffers.overlap(source.memory, target.memory) else source.memory

        def transfer() -> None:
            self.host.all_to_all(name, _rows(target.memory, receives), _rows(memory, sends), held)
            target.deliver()

        held = [target.memory, memory]
        return self.start(name, buffers.ordered(transfer, held), [output], async_op, reads=[tensor])

    def _exchange(self, sends: Memories, incoming: list[tuple[int, Message]], own: Tensor | None) -> Step:
        """``own``: what this rank has for itself."""

        def transfer() -> None:
            others = [(peer, target.memory) for peer, target in incoming if peer != self.rank]
            mine = next((target.memory for peer, target in incoming if peer == self.rank), None)
            self.host.exchange(sends, others, None if mine is None or own is None else (mine, own))
            for _, target in incoming:
                target.deliver()

        memories = [memory for _, memory in sends] + [target.memory for _, target in incoming]
        return buffers.ordered(transfer, memories if own is None else [*memories, own])


def _rows(memory: Tensor, counts: Sequence[int]) -> list[Block]:
    """So many rows of dim 0 each, one block behind the other."""
    address, row = memory.data_ptr(), memory.nbytes // max(memory.size(0), 1)
    found = []
    for count in counts:
        found.append((address, count * row))
        address += count * row
    return found


def in_turn(steps: Sequence[Step]) -> Step:
    def transfer() -> None:
        for step in steps:
            step()

    return transfer

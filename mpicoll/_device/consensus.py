"""What ranks agree on about GPUs when a world is made: as the weakest rank decides."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from mpicoll import _config
from mpicoll._cuda import streams
from mpicoll._discovery import cuda_support, probe
from mpicoll._mpi.channel import Channel
from mpicoll._mpi.library import MPI
from mpicoll.errors import MpicollError


@dataclass(frozen=True)
class DeviceChoices:
    """How GPU memory travels in a world in which some rank has a GPU.

    Attributes:
        direct: MPI takes GPU memory.
        shares: Every rank has a GPU, and may open the GPU memory of its node's ranks.
    """

    direct: bool = False
    shares: bool = False


def describe(choices: DeviceChoices | None) -> str:
    """How the log says it."""
    if choices is None:
        return "no rank has a GPU"
    if choices.direct:
        return "GPU memory is handed to MPI"
    near = "by CUDA IPC within a node, and " if choices.shares else ""
    return f"GPU memory travels {near}through pinned host memory"


def seen() -> bool:
    """Whether this rank sees a GPU."""
    return streams.seen()


def settle_in() -> None:
    """Called by our background threads before they call MPI; see Note [Threads] in _cuda/streams.py."""
    streams.settle_in()


def settings() -> tuple[bool | None, bool]:
    """What this rank's variables say: whether MPI takes GPU memory (None: find out), and whether ranks may share theirs."""
    return _config.get("MPICOLL_CUDA_AWARE"), _config.get("MPICOLL_CUDA_IPC")


def agree(channel: Channel, wanted: tuple[bool | None, bool], gpus: Sequence[bool]) -> DeviceChoices | None:
    """What holds for all ranks (collective if any has a GPU); None: no rank has one.

    Args:
        wanted: Rank 0's `settings`.
        gpus: For each rank, whether it has one.

    Raises:
        MpicollError: On all ranks: one of them could not find out.
    """
    if not any(gpus):
        return None
    aware, shares = wanted
    direct = _takes_gpu_memory(channel) if aware is None else bool(aware)
    return DeviceChoices(direct, shares=all(gpus) and bool(shares) and not direct)


def _takes_gpu_memory(channel: Channel) -> bool:
    """Whether every rank's MPI says so, and a trial by rank 0 shows it (collective).

    Raises: MpicollError, on all ranks: one of them could not find out.
    """
    with channel.lock:
        claims = channel.comm.allgather(_found(lambda: streams.seen() and claimed()))
        _raise_for(claims)
        if not all(claim for claim, _ in claims):
            return False
        proofs = channel.comm.allgather(_found(proven) if channel.comm.Get_rank() == 0 else (False, ""))
    _raise_for(proofs)
    return bool(proofs[0][0])


def _found(question: Callable[[], bool]) -> tuple[bool, str]:
    """The answer, or what went wrong: the other ranks wait for either."""
    try:
        return question(), ""
    except Exception as error:  # noqa: BLE001  raised again, by all ranks
        return False, f"{type(error).__name__}: {error}"


def _raise_for(answers: list[tuple[bool, str]]) -> None:
    for rank, (_, error) in enumerate(answers):
        if error:
            raise MpicollError(f"rank {rank} cannot tell whether MPI takes GPU memory: {error}; set MPICOLL_CUDA_AWARE")


@cache
def claimed() -> bool:
    """Whether this rank's MPI says so."""
    library = probe.loaded_library()
    started: dict[str, Any] = {
        "vendor": MPI.get_vendor()[0],
        "library_version": MPI.Get_library_version(),
        "library_file": library,
        "cuda_query": probe.cuda_query(library),
    }
    return cuda_support.claims(started, os.environ, cuda_support.driver_loads(), thorough=False).aware


@cache
def proven() -> bool:
    """Whether two other ranks, on this host, have sent GPU memory; takes some seconds, once."""
    return cuda_support.verdict(cuda_support.prove(os.environ)).moves

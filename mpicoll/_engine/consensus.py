"""What all ranks agree upon when a world is made: rank 0's choices, and, as the weakest rank decides, what MPI does with GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from mpicoll import _config
from mpicoll._cuda import streams
from mpicoll._discovery import cuda_support, probe
from mpicoll._host import thresholds
from mpicoll._host.thresholds import Choices
from mpicoll._mpi.channel import Channel
from mpicoll._mpi.library import MPI
from mpicoll.errors import MpicollError


def agree(channel: Channel) -> Choices:
    """Rank 0's choices, on all ranks (collective): ranks that chose otherwise would wait for each other.

    Raises: ValueError, on all ranks: a variable of rank 0's, or its table, holds what is not allowed.
    """
    error, mine = "", None
    if channel.comm.Get_rank() == 0:
        try:
            wanted = _config.get("MPICOLL_CUDA_AWARE"), _config.get("MPICOLL_CUDA_IPC")
            mine = thresholds.choices(channel.runtime.library), *wanted
        except ValueError as caught:
            error = str(caught)
    with channel.lock:
        # Not bcast: see topology.discover.
        told = channel.comm.allgather((mine, error, streams.seen()))
    agreed, error, _ = told[0]
    if error:
        raise ValueError(error)
    choices, aware, shares = agreed
    assert isinstance(choices, Choices)
    gpus = [available for *_, available in told]
    if not any(gpus):
        return choices
    direct = _takes_gpu_memory(channel) if aware is None else bool(aware)
    return replace(choices, gpus=True, direct=direct, shares_gpus=all(gpus) and bool(shares) and not direct)


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

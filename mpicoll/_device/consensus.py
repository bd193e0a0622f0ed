"""The settings for GPUs that ranks agree on when a world is made: GPU support as far as every rank has it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

from mpicoll._base import config
from mpicoll._base.errors import MpicollError
from mpicoll._device import streams
from mpicoll._mpi.channel import Channel


class DeviceChoices(NamedTuple):
    """How GPU memory travels in a world in which some rank has a GPU."""

    direct: bool = False  # MPI takes GPU memory
    shares: bool = False  # every rank has a GPU and may open the GPU memory of the other ranks on its node


def describe(choices: DeviceChoices | None) -> str:
    """Returns the choices in words, for the log."""
    if choices is None:
        return "no rank has a GPU"
    if choices.direct:
        return "GPU memory is handed to MPI"
    near = "by CUDA IPC within a node, and " if choices.shares else ""
    return f"GPU memory travels {near}through pinned host memory"


def seen() -> bool:
    """True if this rank sees a GPU."""
    return streams.seen()


def settle_in() -> None:
    """Prepares a background thread for MPI calls; see Note [Threads] in _device/streams.py."""
    streams.settle_in()


def settings() -> tuple[bool | None, bool]:
    """Returns two environment settings: whether MPI takes GPU memory (None: find out), and whether ranks may share GPU memory."""
    return config.get("MPICOLL_CUDA_AWARE"), config.get("MPICOLL_CUDA_IPC")


def agree(channel: Channel, wanted: tuple[bool | None, bool], gpus: Sequence[bool]) -> DeviceChoices | None:
    """Returns the choices that hold for all ranks (collective if any rank has a GPU); None: no rank has a GPU.

    Args:
        wanted: Rank 0's `settings`.
        gpus: For each rank, whether it has a GPU.
    """
    if not any(gpus):
        return None
    aware, shares = wanted
    direct = _takes_gpu_memory(channel) if aware is None else bool(aware)
    return DeviceChoices(direct, shares=all(gpus) and bool(shares) and not direct)


def _takes_gpu_memory(channel: Channel) -> bool:
    """True if MPI claims so on every rank, and a trial by rank 0 shows it (collective).

    Raises:
        MpicollError: A rank could not find out; raised on all ranks.
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
    """Returns the answer, or an error text. The other ranks wait for either of them."""
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
    """True if this rank's MPI claims that it takes GPU memory."""
    from mpicoll._base import probe
    from mpicoll._launch.find import cuda_support

    started = {"cuda_query": probe.cuda_query(probe.loaded_library())}
    return cuda_support.claims(started, cuda_support.driver_loads()).moves


@cache
def proven() -> bool:
    """True if a trial job of two ranks on this host could send GPU memory. It runs once and takes some seconds."""
    from mpicoll._launch.find import cuda_support

    return cuda_support.prove(os.environ).moves

"""The number of a rank's threads, and of its node, from the first group on. `mpicoll run` sets threads in _launch/rank.py."""

from __future__ import annotations

import ctypes
import os

import torch

from mpicoll._base import binding, cpus, inherited, launcher, log, torch_variables
from mpicoll._mpi.topology import Topology


def provide(rank: int, topology: Topology) -> None:
    """Sets GROUP_RANK, NODE_RANK and OMP_NUM_THREADS where they are unset, and the number of threads of torch accordingly.

    Note [Threads of ranks that a plain mpirun or srun has started]
    Without OMP_NUM_THREADS each rank computes with as many threads as there are cores. torchrun and mpicoll.run set the variable
    before the interpreter starts. Here torch is loaded, and OpenMP has read its variables, so torch is told. Only a default is
    changed: the numbers of CPUs and of cores are those that torch takes by itself. Where torch has MKL (wheels for x86), MKL
    reads OMPI_COMM_WORLD_LOCAL_SIZE and MPI_LOCALNRANKS, and has divided the cores already; srun sets neither.
    """
    nodes = topology.nodes
    if launcher.detect() is not None:
        torch_variables.provide_node_rank([*dict.fromkeys(nodes)].index(nodes[rank]))
    if nodes.count(nodes[rank]) > 1 and not threads():
        _share_cores(rank, topology.share)


def threads() -> int:
    """Number of threads of torch in this rank; 0: it is torch's default, of which `provide` takes this rank's share."""
    allowed, number = cpus.allowed(), torch.get_num_threads()
    chosen = any(name in os.environ for name in binding.THREAD_SETTINGS)
    return number if chosen or number not in (len(allowed), cpus.count(allowed)) else 0


def _share_cores(rank: int, share: int) -> None:
    share = min(share, binding.threads(os.environ, cpus.allowed(), launcher.detect()) or share)
    threads = torch.get_num_threads()
    if share >= threads:
        return
    torch.set_num_threads(share)
    inherited.provide_here(binding.THREADS, str(share))
    if rank == 0:
        log.say(
            f"torch computes with {share} thread{'s' * (share > 1)} in each rank instead of {threads}, because the ranks"
            " of a node share its cores (set OMP_NUM_THREADS for another number)"
        )


def compute_with_one_thread() -> None:
    """From now on torch computes with one thread where the calling thread runs. Needs OpenMP, as in torch's wheels for Linux.

    Note [One thread beside the program's]
    OpenMP makes a pool of threads for every thread that computes, and torch takes as many in each. A pool beside the program's
    takes the cores of the backward pass. Even while it is idle it slows the program down: GCC's OpenMP counts the threads of all
    pools, and once they are more than the cores of the process, each call wakes the threads of its pool by the kernel. With 2
    threads on 2 cores torch.add of 70,000 floats took 19 to 23 us instead of 7 to 8 (5th percentile). So the thread of a queue
    computes alone. A synchronous collective of an idle group runs in the program's thread, with its pool. torch.set_num_threads
    would not do: it also changes the number for threads that begin later.
    """
    torch.get_num_threads()  # in each thread, torch sets the number once, at its first use
    getattr(ctypes.CDLL(None), "omp_set_num_threads", lambda count: None)(1)

"""What libraries ask about an agent, under torch's names: its workers, and how much is in flight."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mpicoll.rpc import current_agent, rref

if TYPE_CHECKING:
    from mpicoll.rpc.agent import Agent
    from mpicoll.rpc.options import MPIRpcBackendOptions
    from mpicoll.rpc.workers import WorkerInfo


class CurrentAgent:
    """The read-only part of torch's RpcAgent."""

    is_static_group = True  # all workers take part from init_rpc to shutdown

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def get_worker_info(self, worker: str | int | None = None) -> WorkerInfo:
        """Returns the worker of this name or rank; None: this one. Raises RuntimeError if there is none."""
        return self._agent.me if worker is None else self._agent.workers.find(worker)

    def get_worker_infos(self) -> list[WorkerInfo]:
        return list(self._agent.workers.all)

    def get_metrics(self) -> dict[str, str]:
        """Returns the numbers of pending and running calls, and of threads."""
        agent = self._agent
        return {
            "agent.client_active_calls": str(agent.counts()[2]),
            "agent.server_active_calls": str(agent.handler.running),
            "agent.thread_pool_size": str(agent.pool.threads),
            "agent.num_idle_threads": str(agent.pool.idle()),
        }

    get_debug_info = get_metrics

    def _get_device_map(self, worker: WorkerInfo) -> dict[torch.device, torch.device]:
        return self._agent.options.device_maps.get(worker.name, {})

    def _get_backend_options(self) -> MPIRpcBackendOptions:
        return self._agent.options


def rref_debug_info() -> dict[str, str]:
    """Returns the number of references on this worker, by state."""
    agent = current_agent.get()
    owned = agent.objects.all()
    return {
        "num_owner_rrefs": str(len(owned)),
        "num_forks": str(sum(entry.outside != 0 for entry in owned)),
        "num_pending_users": str(rref.pending_users(agent)),
        "num_pending_children": "0",  # weighted counting: no reference waits for the arrival of a copy
        "num_pending_futures": str(agent.counts()[2]),
    }

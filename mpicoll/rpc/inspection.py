"""What libraries ask an agent: who takes part, and how much is under way, by torch's names."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mpicoll.rpc import entries
from mpicoll.rpc import rref as references

if TYPE_CHECKING:
    from mpicoll.rpc.agent import Agent
    from mpicoll.rpc.options import MPIRpcBackendOptions
    from mpicoll.rpc.workers import WorkerInfo


class CurrentAgent:
    """torch's RpcAgent, as far as it can be asked."""

    is_static_group = True  # all workers are there from init_rpc to shutdown

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def get_worker_info(self, worker: str | int | None = None) -> WorkerInfo:
        """The worker of this name or rank; None: this one. Raises: RuntimeError: there is none."""
        return self._agent.me if worker is None else self._agent.workers.find(worker)

    def get_worker_infos(self) -> list[WorkerInfo]:
        """All of them, by rank."""
        return list(self._agent.workers.all)

    def get_metrics(self) -> dict[str, str]:
        """Calls under way, and threads."""
        agent = self._agent
        return {
            "agent.client_active_calls": str(agent.counts()[2]),
            "agent.server_active_calls": str(agent.under_way),
            "agent.thread_pool_size": str(agent.pool.threads),
            "agent.num_idle_threads": str(agent.pool.idle()),
        }

    def get_debug_info(self) -> dict[str, str]:
        """The same."""
        return self.get_metrics()

    def _get_device_map(self, worker: WorkerInfo) -> dict[torch.device, torch.device]:
        return self._agent.options.device_maps.get(worker.name, {})

    def _get_backend_options(self) -> MPIRpcBackendOptions:
        return self._agent.options


def rref_debug_info() -> dict[str, str]:
    """How many references there are here, and in which state. Weights count the copies elsewhere: see rref.py."""
    agent = references.agent()
    known = entries.owned()
    return {
        "num_owner_rrefs": str(len(known)),
        "num_forks": str(sum(entry.outside != 0 for entry in known)),
        "num_pending_users": str(references.pending_users()),
        "num_pending_children": "0",  # a copy on its way has weight: nobody needs to wait for its arrival
        "num_pending_futures": str(agent.counts()[2]),
    }
